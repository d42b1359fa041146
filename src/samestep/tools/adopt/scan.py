"""Find what a training script has to change: the entries of a plan, by the rules of rules.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from samestep.tools.adopt.batches import Batches, options_of
from samestep.tools.adopt.roles import Function, Names, Value, code, dotted
from samestep.tools.adopt.rules import Rule, matcher, rules
from samestep.tools.adopt.source import Source

Branch = ast.If | ast.IfExp | ast.While
Loop = ast.For | ast.AsyncFor | ast.While
NAME_WIDTH: Final = 60  # characters of code in an entry
DEPTH: Final = 4  # calls that are followed from a function to the loops around it
# rules that `Scan` finds by the structure of loops; all others are found by names
FINDERS: Final = frozenset(
    {
        *("start", "model", "track", "loader", "evaluated loader", "unknown loader", "batch size"),
        *("epochs", "loop", "own batches", "unknown loop", "no loop", "backward", "evaluation"),
        *("several losses", "several optimizers", "index", "buffer", "not read"),
    }
)
TRACKED: Final = ("model", "optimizer", "scheduler", "scaler", "ema")
WRAPPED: Final = matcher("*Parallel()", "<accelerator>.*()", "<fabric>.*()")
OWN_BACKWARD: Final = ("super()", "ctx.", "run.", "batch.")
# calls that one worker must not make alone
TOGETHER: Final = matcher(
    *("*backward()", "*.step()", "*evaluate*()", "*barrier()", "*.wait_for_everyone()"),
    *("torch.distributed.all_*()", "torch.distributed.broadcast*()", "torch.distributed.reduce*()"),
)
KEYWORDS: Final = ("max_norm", "max_epochs")  # that rules name
SORTS: Final = matcher("sorted()", "len()", "set()", "any()", "max()", "min()")


@dataclass(frozen=True)
class Entry:
    """What to do about one place of a script."""

    kind: str
    file: str
    line: int
    name: str  # the script's own code
    say: str
    write: str
    link: str  # a page of docs/, with its section


class _Given(dict[str, str]):
    """What the script has, by the names in braces of a rule; `...` for what it does not show."""

    def __missing__(self, name: str) -> str:
        return "..."


def head(loop: Loop) -> str:
    """Return the first line of a loop."""
    if isinstance(loop, ast.While):
        return f"while {code(loop.test)}:"
    target = re.sub("[()]", "", code(loop.target))
    return f"for {target} in {code(loop.iter)}:"


class Scan:
    """The entries of the plan of a script, in `entries`."""

    def __init__(self, sources: Sequence[Source], missing: Mapping[Path, str]) -> None:
        self.entries: list[Entry] = []
        self._script, self._names = sources[0], Names(sources)
        self._batches = Batches(self._names)
        self._seen: set[tuple[str, ast.AST]] = set()
        self._lanes: dict[ast.AST, Loop] = {}  # nodes that a loop over batches runs
        self._trained: list[Value] = []  # loaders
        self._models = [*self._names.made.get("model", {})]
        self._objects = [text for role in TRACKED for text in self._names.made.get(role, {})]
        for path, why in missing.items():
            self.add("not read", self._script.tree, str(path), why=why)
        self._find_training()
        self._find_evaluations()
        self._find_loaders()
        self._find_state()
        self._find_buffers()
        # those for some places first
        by_place = sorted(rules().values(), key=lambda rule: not rule.where)
        named = [(r, matcher(*r.patterns)) for r in by_place if r.name not in FINDERS]
        any_name = matcher(*(pattern for rule, _ in named for pattern in rule.patterns))
        for node in self._names.nodes:
            name = self._names.name(node)
            if any(value.role == "rank" for value in self._names.values(node)):
                name = "<rank>" if self._place("test", node) else name
            if any_name.fullmatch(name):
                self._find_name(node, name, named)
        trains = {"backward", "lightning", "trainer"} & {name for name, _ in self._seen}
        if not trains:
            self.add("no loop", self._script.tree, "backward")

    def add(self, name_of_rule: str, node: ast.AST, name: str = "", /, **given: str) -> None:
        """Add an entry for a node, once for each rule."""
        rule = rules()[name_of_rule]
        if (rule.name, node) in self._seen:
            return
        self._seen.add((rule.name, node))
        path = self._names.source_of[self._names.module(node)].path
        text = name or code(node)
        named = {each.rpartition(".")[2]: each for each in self._objects}
        texts = _Given(
            name=text,
            model=next(iter(self._models), "model"),
            stem=self._script.path.stem,
            script=str(self._script.path),
            objects=", ".join(f"{key}={value}" for key, value in named.items()) or "...",
        )
        texts.update(given)
        say, write = rule.say.format_map(texts), rule.write.format_map(texts)
        short = text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 2]} …"
        line = getattr(node, "lineno", 1)
        self.entries.append(Entry(rule.kind, str(path), line, short, say, write, rule.link))

    # loops

    def _find_training(self) -> None:
        """Find the loops around each call of backward."""
        passes: dict[Loop, list[ast.Call]] = {}
        for call in self._names.nodes:
            if isinstance(call, ast.Call) and self._is_backward(call):
                self.add("backward", call, loss=self._loss_of(call))
                if loops := [*self._loops_around(call, DEPTH)]:
                    passes.setdefault(self._loop_of(loops), []).append(call)
        for loop, calls in passes.items():
            self._add_loop(loop, calls)

    def _is_backward(self, call: ast.Call) -> bool:
        name = self._names.name(call)
        return name.endswith(".backward()") and not name.startswith(OWN_BACKWARD)

    def _loops_around(self, node: ast.AST, depth: int) -> Iterator[Loop]:
        """Yield the loops around a node, then those around the first call of its function."""
        function: Function | None = None
        for outer in self._names.around(node):
            if isinstance(outer, Loop):
                yield outer
            function = outer if isinstance(outer, Function) else function
        callers = self._names.callers.get(function, []) if function else []
        if callers and depth:
            yield from self._loops_around(callers[0], depth - 1)

    def _loop_of(self, loops: list[Loop]) -> Loop:
        """Return the one of the loops around backward that makes a step, and note its loaders."""
        inner = [loop for loop in loops if "<accumulation>" in self._iterated(loop)]
        for loop in inner:
            self.add("accumulation", loop, head(loop))
        rest = [loop for loop in loops if loop not in inner] or loops
        found = next((loop for loop in rest if self._loaders(loop)), None)
        if found is None:
            steps = [one for one in rest if any(self._is_step(node) for node in ast.walk(one))]
            found = (steps or rest)[0]
            loaders = self._loaders(found, of_next=True)
            end = self._end(found)
            if not loaders and end is None and isinstance(found, ast.For):
                self.add("unknown loop", found, head(found), iterated=code(found.iter))
            elif not loaders:
                self.add("own batches", found, head(found), epochs=end or "...")
            self._trained += loaders
        else:
            self._trained += self._loaders(found)
        for loop in rest[rest.index(found) + 1 :]:
            if end := self._end(loop):
                target = code(loop.target) if isinstance(loop, ast.For) else "epoch"
                self.add("epochs", loop, head(loop), target=target, epochs=end)
                break
        return found

    def _iterated(self, loop: Loop) -> list[str]:
        nodes = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
        return [self._names.name(node) for node in nodes]

    def _end(self, loop: Loop) -> str | None:
        """Return the end of a loop over a range, None of others; of `while True`, `...`."""
        if isinstance(loop, ast.While):
            return "..."
        call = loop.iter
        is_range = any(name.endswith("range()") for name in self._iterated(loop))
        while isinstance(call, ast.Call) and not self._names.name(call).endswith("range()"):
            call = call.args[0] if call.args else loop.target  # of tqdm
        if is_range and isinstance(call, ast.Call) and call.args:
            return code(call.args[min(len(call.args), 2) - 1])
        return None

    def _loaders(self, loop: Loop, *, of_next: bool = False) -> list[Value]:
        """Return the loaders that a loop iterates, or that `next` reads in it."""
        nodes: list[ast.AST] = [*ast.walk(loop.iter)] if isinstance(loop, ast.For) else []
        if of_next:
            nexts = (n for n in ast.walk(loop) if self._names.name(n) == "next()")
            nodes = [call.args[0] for call in nexts if isinstance(call, ast.Call) and call.args]
        values = (value for node in nodes for value in self._names.values(node))
        return [value for value in values if value.role == "loader"]

    def _is_step(self, node: ast.AST) -> bool:
        return self._names.name(node) in {"<optimizer>.step()", "<scaler>.step()"}

    def _loss_of(self, call: ast.Call) -> str:
        """Return what `batch.backward` gets in place of a call of backward."""
        loss = call.func.value if isinstance(call.func, ast.Attribute) else call
        if call.args and self._names.role(loss) in {"accelerator", "fabric"}:
            loss = call.args[0]
        if self._names.name(loss) == "/ <accumulation>" and isinstance(loss, ast.BinOp):
            loss = loss.left
        if isinstance(loss, ast.Call) and self._names.name(loss) == "<scaler>.scale()":
            return f"{code(loss)}, loss={code(loss.args[0])}"
        return code(loss)

    def _add_loop(self, loop: Loop, backward: list[ast.Call]) -> None:
        """Add what a loop over batches becomes, and note what belongs to its lanes."""
        is_counted = self._iterated(loop)[:1] == ["enumerate()"]
        target = loop.target if isinstance(loop, ast.For) else None
        if is_counted and isinstance(target, ast.Tuple):
            index, target = target.elts
            if any(dotted(node) == dotted(index) for node in nodes_of(loop.body)):
                self.add("index", loop, code(index))
        batch = code(target).strip("()") if target and self._loaders(loop) else "..."
        self.add("loop", loop, head(loop), target=batch)
        region = nodes_of(loop.body)
        for node in region:  # which grows by the functions that call backward
            function = self._names.callee(node)
            inner = [*ast.walk(function)] if function and function not in region else []
            if any(isinstance(each, ast.Call) and self._is_backward(each) for each in inner):
                region += inner
        self._lanes.update(dict.fromkeys(region, loop))
        alone = [call for call in backward if not is_alternative(self._names.around(call), loop)]
        if len(alone) > 1:
            steps = {code(node) for node in region if self._is_step(node)}
            name = "several optimizers" if len(steps) > 1 else "several losses"
            self.add(name, alone[1], code(alone[1]))

    def _find_evaluations(self) -> None:
        for loop in self._names.nodes:
            if isinstance(loop, ast.For) and ("loop", loop) not in self._seen:
                for value in sorted(self._loaders(loop), key=lambda value: value.made.lineno)[:1]:
                    dataset, size = self._batches.arguments(value.made)
                    self.add(
                        "evaluation",
                        loop,
                        head(loop),
                        dataset=code(dataset) if dataset else "...",
                        batch=code(size) if size else "...",
                        options=options_of(value.made, self._names, is_training=False),
                    )

    # data and state

    def _find_loaders(self) -> None:
        named = {made: text for text, made in self._names.made.get("loader", {}).items()}
        calls = [n for n in self._names.nodes if self._names.name(n).endswith("DataLoader()")]
        for node in dict.fromkeys([*named, *calls]):
            is_trained = any(value.made is node for value in self._trained)
            dataset, size = self._batches.arguments(node)
            name = named.get(node, "")
            if not self._names.name(node).endswith("DataLoader()"):
                self.add("unknown loader", node, f"{name} = {code(node)}")
                continue
            if size is None:
                self.add("batch size", node, name, dataset=code(dataset or node))
            batch, note = self._batches.total(size) if size and is_trained else ("", "")
            given = {"dataset": code(dataset) if dataset else "...", "note": note}
            given["batch"] = batch or (code(size) if size else "...")
            options = options_of(node, self._names, is_training=is_trained)
            rule = "loader" if is_trained else "evaluated loader"
            self.add(rule, node, name, options=options, **given)

    def _find_state(self) -> None:
        """Add where the run starts, what it replicates and what it tracks."""
        roles = self._names.made.values()
        made = {each for role in roles for each in role.values()}
        body = self._script.tree.body
        last = [node for node in body if isinstance(node, ast.If) and "__main__" in code(node.test)]
        first = [node for node in body if made & {*ast.walk(node)} and self._is_run(node)]
        start = (last or first or body)[0]
        self.add("start", start, first_line(start), body="main(run)" if last else "...")
        for text, made in self._names.made.get("model", {}).items():
            if not (
                {"accelerator", "fabric"} & self._names.made.keys()
                or WRAPPED.fullmatch(self._names.name(made))
            ):
                self.add("model", made, text, model=text)
        optimizers = [*self._names.made.get("optimizer", {}).items()]
        own = [each for each in optimizers if self._names.module(each[1]) is self._script.tree]
        for text, made in (own or optimizers)[-1:]:
            self.add("track", made, text)

    def _is_run(self, node: ast.AST) -> bool:
        return not isinstance(node, Function | ast.ClassDef)

    def _find_buffers(self) -> None:
        """Add buffers of modules that a method other than `__init__` changes."""
        for node in self._names.nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=name), *_]
                ):
                    owner = next(
                        (n for n in self._names.around(node) if isinstance(n, ast.ClassDef)), None
                    )
                    methods = [n for n in owner.body if isinstance(n, Function)] if owner else []
                    inner = [n for one in methods if "init" not in one.name for n in ast.walk(one)]
                    if any(changes(each, f"self.{name}") for each in inner):
                        self.add("buffer", node, f"self.{name}", buffer=str(name))

    # names

    def _find_name(
        self, node: ast.AST, name: str, named: list[tuple[Rule, re.Pattern[str]]]
    ) -> None:
        """Add an entry of the first rule that has the name of a node, and fits its place."""
        for rule, pattern in named:
            if pattern.fullmatch(name) and (place := self._place(rule.where, node)):
                outer = (each for each in self._names.around(place) if isinstance(each, ast.expr))
                if any((rule.name, each) in self._seen for each in outer):
                    return  # a().b() of one rule
                self.add(rule.name, place, first_line(place), **self._given(node, place))
                return

    def _place(self, where: str, node: ast.AST) -> ast.AST | None:
        """Return the node that an entry is about, None if the rule is not for this place."""
        around = [*self._names.around(node)]
        inner = [node, *around]
        pairs = zip(around, inner, strict=False)
        tests = [n for n, one in pairs if isinstance(n, Branch) and n.test is one]
        if where in {"test", "compared", "output"}:
            compared = [n for n in around if isinstance(n, ast.Compare) and where == "compared"]
            is_other = where == "output" and tests and self._acts(tests[0])
            return None if is_other else next(iter([*tests, *compared]), None)
        loops = [each for each in around if isinstance(each, Loop)]
        functions = [each.name for each in around if isinstance(each, Function)]
        is_there = {
            "": True,
            "lane": node in self._lanes,
            "loop": bool(loops),
            "top": not functions and not loops,
            "forward": "forward" in functions,
            "train": not any(("evaluation", loop) in self._seen for loop in loops),
            "unsorted": where == "unsorted" and not self._is_sorted(around),
        }
        return node if is_there[where] else None

    def _acts(self, branch: Branch) -> bool:
        """Return whether a branch does what all workers have to do."""
        bodies = [getattr(branch, "body", []), getattr(branch, "orelse", [])]
        nodes = nodes_of(
            [n for body in bodies for n in (body if isinstance(body, list) else [body])]
        )
        leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in nodes)
        values = [node.value for node in nodes if isinstance(node, ast.Assign)]
        changes = any(self._names.callee(value) for value in values)  # what others do not have
        names = (self._names.name(node) for node in nodes)
        return leaves or changes or any(TOGETHER.fullmatch(name) for name in names)

    def _is_sorted(self, around: list[ast.AST]) -> bool:
        if any(SORTS.fullmatch(self._names.name(node)) for node in around):
            return True
        targets = [dotted(n.targets[0]) for n in around if isinstance(n, ast.Assign)]
        calls = (node for node in self._names.nodes if isinstance(node, ast.Call))
        sorts = {dotted(call.func) for call in calls}
        return any(f"{target}.sort" in sorts for target in targets)

    def _given(self, node: ast.AST, place: ast.AST) -> dict[str, str]:
        """Return what a rule may say of a node: its arguments, and the objects around it."""
        given: dict[str, str] = {}
        if isinstance(node, ast.Call):
            arguments = [code(each) for each in node.args]
            given |= zip(("first", "second"), arguments, strict=False)
            given |= {e.arg: code(e.value) for e in node.keywords if e.arg in KEYWORDS}
            given["args"] = ", ".join(map(code, [*node.args, *node.keywords]))
            match node.args:
                case [ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_]:
                    given["model"] = code(model)
                case [ast.Call(func=ast.Attribute(attr="to" | "cuda", value=model)), *_]:
                    given["first"] = code(model)
            given.setdefault("max_norm", given.get("second", "1.0"))
            is_half = "float16" in given["args"] and "bfloat16" not in given["args"]
            has_scaler = "scaler" in self._names.made
            given["precision"] = "float16" if is_half or has_scaler else "bfloat16"
        if isinstance(node, ast.Attribute):
            given["object"] = code(node.value)
        if isinstance(node, ast.BinOp):
            left = self._names.name(node).startswith("<world>")
            given["rest"] = code(node.right if left else node.left)
        if isinstance(place, Branch):
            given["test"] = code(place.test)
        parent = next(self._names.around(node), None)
        if isinstance(parent, ast.Assign):
            given["target"] = code(parent.targets[0])
        if self._names.role(node) == "generator":
            made = self._names.name(self._names.values(node)[0].made)
            given["seed"] = f"{code(node)}.{'manual_seed' if 'torch' in made else 'seed'}"
        return given


def first_line(node: ast.AST) -> str:
    """Return the first line of a statement, or an expression."""
    if isinstance(node, Loop):
        return head(node)
    if isinstance(node, ast.If):
        return f"if {code(node.test)}:"
    return f"class {node.name}:" if isinstance(node, ast.ClassDef) else code(node)


def nodes_of(statements: Sequence[ast.AST]) -> list[ast.AST]:
    """Return all nodes of statements."""
    return [node for statement in statements for node in ast.walk(statement)]


def is_alternative(around: Iterator[ast.AST], loop: Loop) -> bool:
    """Return whether a node is in a branch of a loop's body."""
    return any(
        isinstance(node, ast.If) for node in takewhile(lambda node: node is not loop, around)
    )


def changes(node: ast.AST, text: str) -> bool:
    """Return whether a node assigns a variable or an entry of it, or changes it in place."""
    if isinstance(node, ast.Assign):
        return any(
            dotted(getattr(each, "value", 0)) == text or dotted(each) == text
            for each in node.targets
        )
    if isinstance(node, ast.AugAssign):
        return dotted(node.target) == text
    func = node.func if isinstance(node, ast.Call) else None
    in_place = isinstance(func, ast.Attribute) and func.attr.endswith("_")
    return in_place and dotted(getattr(func, "value", None)).startswith(text)
