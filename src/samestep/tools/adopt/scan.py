"""Find what a training script has to change: the entries of a plan, by the rules of rules.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from samestep.tools.adopt.batches import arguments_of, options_of, total
from samestep.tools.adopt.roles import Function, Names, Value, code, dotted
from samestep.tools.adopt.rules import matcher, rules
from samestep.tools.adopt.source import Source

Loop = ast.For | ast.AsyncFor | ast.While
Branch = ast.If | ast.IfExp | ast.While
NAME_WIDTH: Final = 60  # characters of code in an entry
DEPTH: Final = 4  # calls that are followed from a function to the loops around it
TRACKED: Final = ("model", "optimizer", "scheduler", "scaler", "ema")
LIGHTNING: Final = matcher("*lightning*.Trainer()")  # which takes loaders
WRAPPED: Final = matcher("*Parallel()", "<accelerator>.*()", "<fabric>.*()")
OWN_BACKWARD: Final = ("super()", "ctx.", "run.", "batch.")
STEPS: Final = {"<optimizer>.step()", "<scaler>.step()"}
# calls that one worker must not make alone
TOGETHER: Final = matcher(
    *("*backward()", "*.step()", "*evaluate*()", "*barrier()", "*.wait_for_everyone()"),
    *("torch.distributed.all_*()", "torch.distributed.broadcast*()", "torch.distributed.reduce*()"),
)
NUMPY_SEED: Final = 'lambda seed: setattr({}.bit_generator, "state", np.random.PCG64(seed).state)'
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


def head(node: ast.AST) -> str:
    """Return the first line of a statement, or an expression."""
    if isinstance(node, ast.For):
        return f"for {re.sub('[()]', '', code(node.target))} in {code(node.iter)}:"
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {code(node.test)}:"
    return f"class {node.name}:" if isinstance(node, ast.ClassDef) else code(node)


def nodes_of(statements: Iterable[ast.AST]) -> list[ast.AST]:
    """Return all nodes of statements."""
    return [node for statement in statements for node in ast.walk(statement)]


def changes(node: ast.AST, text: str) -> bool:
    """Return whether a node assigns a variable or an entry of it, or changes it in place."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bases = [one.value if isinstance(one, ast.Subscript) else one for one in targets]
        return text in map(dotted, bases)
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr[-1:] == "_" and dotted(func.value) == text


class Scan:
    """The entries of the plan of a script, in `entries`."""

    def __init__(self, sources: Sequence[Source], missing: Mapping[Path, str]) -> None:
        self.entries: list[Entry] = []
        self._script, self._names = sources[0], Names(sources)
        self._seen: set[tuple[str, ast.AST]] = set()
        self._lanes: set[ast.AST] = set()  # nodes that a loop over batches runs
        self._trained: list[Value] = []  # loaders
        self._evaluated: list[Value] = []
        made = self._names.made
        self._loader_names = {each: text for text, each in made.get("loader", {}).items()}
        tracked = {text.rpartition(".")[2]: text for role in TRACKED for text in made.get(role, {})}
        self._given = {  # by the names in braces of a rule
            "model": next(iter(made.get("model", {})), "model"),
            "stem": self._script.path.stem,
            "script": str(self._script.path),
            "objects": ", ".join(f"{key}={value}" for key, value in tracked.items()) or "...",
        }
        for path, why in missing.items():
            self._add("not read", self._script.tree, str(path), why=why)
        self._find_training()
        for loop in self._names.nodes:
            is_other = any(isinstance(node, ast.Yield) for node in ast.walk(loop))  # of a loader
            is_other |= ("loop", loop) in self._seen
            loaders = [] if is_other else self._loaders(loop)
            self._evaluated += loaders
            for value in sorted(loaders, key=lambda value: value.made.lineno)[:1]:
                self._add_loader("evaluation", loop, head(loop), value.made)
        self._find_state()
        self._find_names()
        if not {"backward", "lightning", "trainer"} & {name for name, _ in self._seen}:
            self._add("no loop", self._script.tree, "backward")

    def _add(self, name: str, node: ast.AST, text: str, /, **given: str) -> None:
        """Add an entry for a node, once for each rule."""
        if (name, node) in self._seen:
            return
        self._seen.add((name, node))
        rule, texts = rules()[name], defaultdict(lambda: "...", self._given, name=text)
        texts.update(given)
        path = self._names.source_of[self._names.module(node)].path
        short = text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 2]} …"
        say, write = rule.say.format_map(texts), rule.write.format_map(texts)
        line = getattr(node, "lineno", 1)
        self.entries.append(Entry(rule.kind, str(path), line, short, say, write, rule.link))

    # loops

    def _find_training(self) -> None:
        """Find the loops around each call of backward."""
        passes: dict[Loop, list[ast.Call]] = {}
        for call in self._names.nodes:
            if isinstance(call, ast.Call) and self._is_backward(call):
                self._add("backward", call, code(call), loss=self._loss_of(call))
                if loops := [*self._loops_around(call, DEPTH)]:
                    passes.setdefault(self._loop_of(loops), []).append(call)
        for loop, calls in passes.items():
            self._add_loop(loop, calls)

    def _is_backward(self, node: ast.AST) -> bool:
        name = self._names.visit(node)
        return name.endswith(".backward()") and not name.startswith(OWN_BACKWARD)

    def _loops_around(self, node: ast.AST, depth: int) -> Iterator[Loop]:
        """Yield the loops around a node, then those around the first call of its function."""
        around = [*self._names.around(node)]
        yield from (outer for outer in around if isinstance(outer, Loop))
        functions = [outer for outer in around if isinstance(outer, Function)]
        callers = self._names.callers.get(functions[-1], []) if functions else []
        if callers and depth:
            yield from self._loops_around(callers[0], depth - 1)

    def _loop_of(self, loops: list[Loop]) -> Loop:
        """Return the one of the loops around backward that makes a step, and note its loaders."""
        inner = [loop for loop in loops if "<accumulation>" in self._iterated(loop)]
        for loop in inner:
            self._add("accumulation", loop, head(loop))
        rest = [loop for loop in loops if loop not in inner] or loops
        steps = [one for one in rest if any(self._is_step(node) for node in ast.walk(one))]
        found = next(iter([*filter(self._loaders, rest), *steps, *rest]))
        loaders = self._loaders(found) or self._loaders(found, of_next=True)
        self._trained += loaders
        if not loaders and self._end(found):
            self._add("own batches", found, head(found), epochs=self._end(found))
        elif not loaders and isinstance(found, ast.For):
            self._add("unknown loop", found, head(found), iterated=code(found.iter))
        for loop in [each for each in rest[rest.index(found) + 1 :] if self._end(each)][:1]:
            epoch = code(loop.target) if isinstance(loop, ast.For) else "epoch"
            self._add("epochs", loop, head(loop), epoch=epoch, epochs=self._end(loop))
        return found

    def _iterated(self, loop: ast.AST) -> list[str]:
        nodes = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
        return [self._names.visit(node) for node in nodes]

    def _end(self, loop: Loop) -> str:
        """Return the end of a loop over a range, `...` of `while`, "" of others."""
        call = loop.iter if isinstance(loop, ast.For) else None
        inner = call.args[0] if isinstance(call, ast.Call) and call.args else None  # of tqdm
        for node in (call, inner):
            if isinstance(node, ast.Call) and self._names.visit(node).endswith("range()"):
                return code([*node.args, None][min(len(node.args), 2) - 1])
        return "..." if isinstance(loop, ast.While) else ""

    def _loaders(self, loop: ast.AST, *, of_next: bool = False) -> list[Value]:
        """Return the loaders that a loop iterates, or that `next` reads in it."""
        nodes = [*ast.walk(loop.iter)] if isinstance(loop, ast.For) else []
        if of_next:
            calls = [each for each in ast.walk(loop) if self._names.visit(each) == "next()"]
            nodes = [each.args[0] for each in calls if isinstance(each, ast.Call) and each.args]
        values = (value for node in nodes for value in self._names.values(node))
        return [value for value in values if value.role == "loader"]

    def _is_step(self, node: ast.AST) -> bool:
        return self._names.visit(node) in STEPS

    def _loss_of(self, call: ast.Call) -> str:
        """Return what `batch.backward` gets in place of a call of backward."""
        loss = call.func.value if isinstance(call.func, ast.Attribute) else call
        if call.args and self._names.role(loss) in {"accelerator", "fabric"}:
            loss = call.args[0]
        if self._names.visit(loss) == "/ <accumulation>" and isinstance(loss, ast.BinOp):
            loss = loss.left
        if self._names.visit(loss) == "<scaler>.scale()" and isinstance(loss, ast.Call):
            return f"{code(loss)}, loss={code(loss.args[0])}"
        return code(loss)

    def _add_loop(self, loop: Loop, backward: list[ast.Call]) -> None:
        """Add what a loop over batches becomes, and note what belongs to its lanes."""
        target = loop.target if isinstance(loop, ast.For) and self._loaders(loop) else None
        iterated = self._iterated(loop)
        is_counted = "enumerate()" in iterated[:1] or {"zip()", "range()"} <= {*iterated}
        if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            index, target = target.elts
            if dotted(index) in map(dotted, nodes_of(loop.body)):
                self._add("index", loop, code(index))
        self._add("loop", loop, head(loop), target=re.sub(r"^\((.*)\)$", r"\1", code(target)))
        region = nodes_of(loop.body)
        for node in region:  # which grows by the functions that call backward
            function = self._names.callee(node)
            inner = [*ast.walk(function)] if function and function not in region else []
            region += inner if any(map(self._is_backward, inner)) else []
        self._lanes |= {*region}
        alone = [
            call
            for call in backward
            if not any(
                isinstance(outer, ast.If)
                for outer in takewhile(lambda node: node is not loop, self._names.around(call))
            )
        ]
        if len(alone) > 1:
            steps = {code(node) for node in region if self._is_step(node)}
            name = "several optimizers" if len(steps) > 1 else "several losses"
            self._add(name, alone[1], code(alone[1]))

    # data and state

    def _add_loader(self, name: str, node: ast.AST, text: str, loader: ast.expr) -> None:
        """Add what a loader, or a loop over it, becomes, and what cannot be seen of it."""
        called = self._loader_names.get(loader, code(loader))
        if not self._names.visit(loader).endswith("DataLoader()"):
            self._add("unknown loader", loader, f"{called} = {code(loader)}")
            if node is loader:
                return
        dataset, size = arguments_of(loader, self._names)
        is_training = name in {"loader", "lightning loader"}
        batch, note = total(size, self._names) if is_training and size else (code(size), "")
        options = options_of(loader, self._names, is_training=is_training)
        given = {"dataset": code(dataset), "batch": batch, "options": options, "note": note}
        self._add(name, node, text, **given)
        if size is None:
            self._add("batch size", loader, called, dataset=code(dataset))

    def _find_state(self) -> None:
        """Add where the run starts, what it loads, replicates and tracks, and its buffers."""
        made = self._names.made
        calls = [node for node in self._names.nodes if isinstance(node, ast.Call)]
        loaders = [node for node in calls if self._names.visit(node).endswith("DataLoader()")]
        is_fit = any(LIGHTNING.fullmatch(self._names.visit(node)) for node in calls)
        others = "lightning loader" if is_fit else "evaluated loader"
        for loader in dict.fromkeys([*self._loader_names, *loaders]):
            trained = [value.made for value in self._trained] or [loader] * (not is_fit)
            is_evaluated = any(value.made is loader for value in self._evaluated)
            is_trained = any(each is loader for each in trained) and not is_evaluated
            name = "loader" if is_trained else others
            text = self._loader_names.get(loader, code(loader))
            self._add_loader(name, loader, text, loader)
        body = self._script.tree.body
        everything = {each for by_text in made.values() for each in by_text.values()}
        main = [node for node in body if isinstance(node, ast.If) and "__main__" in code(node.test)]
        runs = [node for node in body if not isinstance(node, Function | ast.ClassDef)]
        first = [node for node in runs if everything & {*ast.walk(node)}]
        callers = [node for node in runs if any(map(self._names.callee, ast.walk(node)))]
        start = [*main, *first, *callers, *body][0]
        is_called = bool(main) or start in callers
        self._add("start", start, head(start), body="main(run)" if is_called else "...")
        for text, each in made.get("model", {}).items():
            if (
                not WRAPPED.fullmatch(self._names.visit(each))
                and not {"accelerator", "fabric"} & made.keys()
            ):
                self._add("model", each, text, model=text)
        optimizers = made.get("optimizer", {}).items()
        own = [each for each in optimizers if self._names.module(each[1]) is self._script.tree]
        for text, each in [*optimizers, *own][-1:]:
            self._add("track", each, text)
        for node in calls:
            if self._names.visit(node).endswith(".register_buffer()") and node.args:
                buffer = f"self.{code(node.args[0])[1:-1]}"
                owners = [
                    each for each in self._names.around(node) if isinstance(each, ast.ClassDef)
                ]
                methods = [each for each in nodes_of(owners[:1]) if isinstance(each, Function)]
                inner = nodes_of(each for each in methods if "init" not in each.name)
                if any(changes(each, buffer) for each in inner):
                    self._add("buffer", node, buffer, buffer=buffer.removeprefix("self."))

    # names

    def _find_names(self) -> None:
        """Add an entry of the first rule that has the name of a node, and fits its place."""
        by_name = [rule for rule in rules().values() if rule.where != "structure"]
        by_name.sort(key=lambda rule: not rule.where)  # those for some places first
        named = [(rule, matcher(*rule.patterns)) for rule in by_name]
        any_name = matcher(*(pattern for rule in by_name for pattern in rule.patterns))
        for node in self._names.nodes:
            name = self._names.visit(node)
            if any(value.role == "rank" for value in self._names.values(node)):
                name = "<rank>" if self._place("test", node) else name
            if any_name.fullmatch(name):
                fitting = (rule for rule, pattern in named if pattern.fullmatch(name))
                places = ((rule, self._place(rule.where, node)) for rule in fitting)
                rule, place = next((each for each in places if each[1]), (None, None))
                around = self._names.around(place) if place else ()
                outer = [each for each in around if isinstance(each, ast.expr)]
                if rule and place and not any((rule.name, each) in self._seen for each in outer):
                    self._add(rule.name, place, head(place), **self._texts(node, place))

    def _place(self, where: str, node: ast.AST) -> ast.AST | None:
        """Return the node that an entry is about, None if the rule is not for this place."""
        around = [*self._names.around(node)]
        pairs = zip(around, [node, *around], strict=False)
        tests = [each for each, inner in pairs if isinstance(each, Branch) and each.test is inner]
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
        """Return whether a branch does what all workers have to do, or need the result of."""
        bodies = [one if isinstance(one, list) else [one] for one in (branch.body, branch.orelse)]
        nodes = nodes_of(node for body in bodies for node in body)
        if any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in nodes):
            return True
        values = [node.value for node in nodes if isinstance(node, ast.Assign)]
        together = (TOGETHER.fullmatch(self._names.visit(node)) for node in nodes)
        return any(map(self._names.callee, values)) or any(together)

    def _is_sorted(self, around: list[ast.AST]) -> bool:
        targets = [dotted(each.targets[0]) for each in around if isinstance(each, ast.Assign)]
        calls = {dotted(each.func) for each in self._names.nodes if isinstance(each, ast.Call)}
        is_later = any(f"{target}.sort" in calls for target in targets)
        return is_later or any(SORTS.fullmatch(self._names.visit(each)) for each in around)

    def _texts(self, node: ast.AST, place: ast.AST) -> dict[str, str]:
        """Return what a rule may say of a node: its arguments, and what is around it."""
        texts: dict[str, str] = {}
        if isinstance(node, ast.Call):
            texts |= zip(("first", "max_norm"), map(code, node.args), strict=False)
            texts |= {e.arg: code(e.value) for e in node.keywords if e.arg in KEYWORDS}
            texts["args"] = ", ".join(map(code, [*node.args, *node.keywords]))
            match node.args:
                case [ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_]:
                    texts["model"] = code(model)
                case [ast.Call(func=ast.Attribute(attr="to" | "cuda", value=model)), *_]:
                    texts["first"] = code(model)
            is_half = re.search(r"\bfloat16", texts["args"]) or "scaler" in self._names.made
            texts["precision"] = "float16" if is_half else "bfloat16"
        if isinstance(node, ast.Attribute):
            texts["object"] = code(node.value)
        if isinstance(node, ast.BinOp):
            is_left = self._names.visit(node).startswith("<world>")
            texts["rest"] = code(node.right if is_left else node.left)
        if isinstance(place, Branch):
            texts["test"] = code(place.test)
        parent = next(self._names.around(node), None)
        if isinstance(parent, ast.Assign):
            texts["assigned"] = code(parent.targets[0])
        for value in self._names.values(node)[:1]:
            made, name = self._names.visit(value.made), code(node)
            texts["seed"] = f"{name}.manual_seed" if "torch" in made else f"{name}.seed"
            if made.startswith("numpy"):
                texts["seed"] = NUMPY_SEED.format(name)
        return texts
