"""Find what a training script has to change: its loops, loaders and state, and what it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from samestep.tools.adopt.batches import arguments_of, options_of, per_step, total
from samestep.tools.adopt.entries import Entries, bare, head
from samestep.tools.adopt.places import Places
from samestep.tools.adopt.roles import Function, Loop, Names, Value, code, dotted, nodes_of
from samestep.tools.adopt.rules import calls
from samestep.tools.adopt.source import Source

DEPTH: Final = 4  # calls that are followed from a function to the loops around it
TRACKED: Final = ("model", "optimizer", "scheduler", "scaler", "ema")
OWN_BACKWARD: Final = ("super()", "ctx.", "run.", "batch.")


def changes(node: ast.AST, text: str) -> bool:
    """Return whether a node assigns a variable or an entry of it, or changes it in place."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bases = [part.value if isinstance(part, ast.Subscript) else part for part in targets]
        return text in map(dotted, bases)
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr[-1:] == "_" and dotted(func.value) == text


def lines_of(nodes: Sequence[ast.stmt]) -> str:
    """Return the lines of statements as text."""
    first, last = nodes[0].lineno, nodes[-1].end_lineno
    return f"line {first}" if first == last else f"lines {first} to {last}"


class Scan:
    """The entries of the plan of a script, the first of the sources, in `entries`.

    `missing` says why some of its modules could not be read.
    """

    def __init__(self, sources: Sequence[Source], missing: Mapping[Path, str]) -> None:
        self._script, self._names = sources[0], Names(sources)
        self._calls = [node for node in self._names.nodes if isinstance(node, ast.Call)]
        self._lanes: set[ast.AST] = set()  # nodes that a loop over batches runs
        self._trained: list[Value] = []  # loaders
        self._evaluated: list[Value] = []
        made = self._names.made
        self._loader_names = {loader: text for text, loader in made.get("loader", {}).items()}
        self._buffers = [*self._changed_buffers()]
        tracked = {text: text for role in TRACKED for text in made.get(role, {})}
        tracked |= {owner: owner for _, _, owner in self._buffers if owner}
        objects = {
            text.rpartition(".")[2]: text
            for text in tracked
            if text.rpartition(".")[0] not in tracked  # which has it
        }
        texts = {  # by the names in braces of a rule
            "model": next(iter(made.get("model", {})), "model"),
            "stem": self._script.path.stem,
            "script": str(self._script.path),
            "objects": ", ".join(f"{key}={value}" for key, value in objects.items()) or "...",
        }
        backward = [call for call in self._calls if self._is_backward(call)]
        around = {call: [*self._loops_around(call, DEPTH)] for call in backward}
        loops = [loop for of_call in around.values() for loop in of_call]
        self.entries = Entries(self._names, texts, loops)
        for path, why in missing.items():
            self.entries.add("not read", self._script.tree, str(path), why=why)
        self._add_training(around)
        self._add_evaluation()
        self._add_loaders()
        self._add_start()
        self._add_state()
        Places(self._names, self.entries, self._lanes).add_all()
        if not self.entries.has_rule("backward", "lightning", "trainer"):
            self.entries.add("no loop", self._script.tree, "backward")

    # loops

    def _add_training(self, around: Mapping[ast.Call, list[Loop]]) -> None:
        """Add each call of backward, and the loop over batches around it."""
        passes: dict[Loop, list[ast.Call]] = {}
        for call, loops in around.items():
            self.entries.add("backward", call, code(call), loss=self._loss_of(call))
            if loops:
                passes.setdefault(self._loop_of(loops), []).append(call)
        for loop, backward in passes.items():
            self._add_loop(loop, backward)

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
            self.entries.add("accumulation", loop, head(loop))
        rest = [loop for loop in loops if loop not in inner] or loops
        updating = [loop for loop in rest if any(map(self._is_update, ast.walk(loop)))]
        step = next(iter([*filter(self._loaders, rest), *updating, *rest]))
        loaders = self._loaders(step) or self._loaders(step, of_next=True)
        self._trained += loaders
        if not loaders and self._end(step):
            texts = {"epochs": self._end(step), "calls": per_step(self._names)}
            self.entries.add("own batches", step, head(step), **texts)
        elif not loaders and isinstance(step, ast.For):
            self.entries.add("unknown loop", step, head(step), iterated=code(step.iter))
        for loop in [loop for loop in rest[rest.index(step) + 1 :] if self._end(loop)][:1]:
            epoch = code(loop.target) if isinstance(loop, ast.For) else "epoch"
            start, end = self._range_of(loop)
            is_shifted = start.isdigit()  # else, it is where the old job resumed
            texts = {"epoch": epoch, "epochs": self._end(loop), "end": self._end(loop)}
            texts |= {"shift": f" + {start}", "end": code(end)} if is_shifted else {"shift": ""}
            self.entries.add("epochs", loop, head(loop), **texts)
        return step

    def _iterated(self, loop: ast.AST) -> list[str]:
        nodes = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
        return [self._names.visit(node) for node in nodes]

    def _range_of(self, loop: Loop) -> tuple[str, ast.expr | None]:
        """Return the start of a loop over a range, "" if it is 0, and the end, None of others."""
        call = loop.iter if isinstance(loop, ast.For) else None
        inner = call.args[0] if isinstance(call, ast.Call) and call.args else None  # of tqdm
        for node in (call, inner):
            if isinstance(node, ast.Call) and self._names.visit(node).endswith("range()"):
                start, end, *_ = [ast.Constant(0), *node.args] if node.args[1:] == [] else node.args
                return code(start).removeprefix("0"), end
        return "", None

    def _end(self, loop: Loop) -> str:
        """Return the number of passes of a loop over a range, `...` of `while`, "" of others."""
        start, end = self._range_of(loop)
        if end is None:
            return "..." if isinstance(loop, ast.While) else ""
        if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add):
            parts = {code(end.left): end.right, code(end.right): end.left}
            return code(parts.get(start, end))
        # a start that is no number is where the old job resumed
        return f"{code(end)} - {start}" if start.isdigit() else code(end)

    def _loaders(self, loop: ast.AST, *, of_next: bool = False) -> list[Value]:
        """Return the loaders that a loop iterates, or that `next` reads in it."""
        nodes = [*ast.walk(loop.iter)] if isinstance(loop, ast.For) else []
        if of_next:
            reads = [node for node in ast.walk(loop) if self._names.visit(node) == "next()"]
            nodes = [read.args[0] for read in reads if isinstance(read, ast.Call) and read.args]
        return [value for node in nodes for value in self._loader_values(node)]

    def _loader_values(self, node: ast.AST) -> list[Value]:
        return [value for value in self._names.values(node) if value.role == "loader"]

    def _loop_text(self, loop: Loop) -> str:
        """Return what the loop over batches iterates: the loader's name, or what makes it."""
        names = [*ast.walk(loop.iter)] if isinstance(loop, ast.For) else []
        loaders = [node for node in names if dotted(node) and self._loader_values(node)]
        if loaders:
            return dotted(loaders[0])
        return "loop" if self.entries.has("own batches", loop) else "run.batches(dataset, GLOBAL)"

    def _is_update(self, node: ast.AST) -> bool:
        return bool(calls("updates").fullmatch(self._names.visit(node)))

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
        is_own = self.entries.has("own batches", loop)
        target = loop.target if isinstance(loop, ast.For) and not is_own else None
        iterated = self._iterated(loop)
        is_counted = "enumerate()" in iterated[:1] or {"zip()", "range()"} <= {*iterated}
        if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            index, target = target.elts
            if dotted(index) in map(dotted, nodes_of(loop.body)):
                self.entries.add("index", loop, code(index), loop=self._loop_text(loop))
        region = nodes_of(loop.body)
        for node in region:  # which grows by the functions that call backward
            function = self._names.callee(node)
            inner = [*ast.walk(function)] if function and function not in region else []
            region += inner if any(map(self._is_backward, inner)) else []
        self._lanes |= {*region}
        ends = [part for part in loop.body if {*ast.walk(part)} & {*backward}]
        inside = lines_of(loop.body[: loop.body.index(ends[-1]) + 1]) if ends else "what follows"
        texts = {"target": bare(target), "inside": inside, "loop": self._loop_text(loop)}
        self.entries.add("loop", loop, head(loop), **texts)
        alone = []
        for call in backward:
            outer = takewhile(lambda node: node is not loop, self._names.around(call))
            alone += [call] if not any(isinstance(node, ast.If) for node in outer) else []
        if len(alone) > 1:
            steps = {code(node) for node in region if self._is_update(node)}
            name = "several optimizers" if len(steps) > 1 else "several losses"
            self.entries.add(name, alone[1], code(alone[1]))

    def _add_evaluation(self) -> None:
        """Add the loops that evaluate: those over other loaders, and those that call a model."""
        for loop in (node for node in self._names.nodes if isinstance(node, Loop)):
            is_other = any(isinstance(node, ast.Yield) for node in ast.walk(loop))  # of a loader
            if is_other or self.entries.has("loop", loop):
                continue
            loaders = self._loaders(loop)
            self._evaluated += loaders
            for value in sorted(loaders, key=lambda value: value.made.lineno)[:1]:
                self._add_loader("evaluation", loop, head(loop), value.made)
            functions = [node for node in self._names.around(loop) if isinstance(node, Function)]
            called = {self._names.visit(node) for node in nodes_of([loop, *functions[:1]])}
            called -= {"<model>()"} - {self._names.visit(node) for node in ast.walk(loop)}
            nested = [node for node in ast.walk(loop) if isinstance(node, Loop)]
            is_known = any(map(self._loaders, nested)) or any(
                map(self._is_backward, ast.walk(loop))
            )
            is_inner = any(isinstance(node, Loop) for node in self._names.around(loop))
            if not (is_known or is_inner) and {"<model>()", "<model>.eval()"} <= called:
                self.entries.add("own evaluation", loop, head(loop))

    # data

    def _add_loaders(self) -> None:
        """Add all loaders: those of loops that train, and others."""
        names = self._names
        made = [call for call in self._calls if names.visit(call).endswith("DataLoader()")]
        is_fit = any(calls("takes loaders").fullmatch(names.visit(call)) for call in self._calls)
        evaluated = {value.made for value in self._evaluated}
        for loader in dict.fromkeys([*self._loader_names, *made]):
            default = set() if is_fit else {loader}
            trained = {value.made for value in self._trained} or default
            others = "evaluation" if loader in evaluated else "evaluated loader"
            name = "loader" if loader in trained - evaluated else others
            text = self._loader_names.get(loader, code(loader))
            self._add_loader("lightning loader" if is_fit else name, loader, text, loader)

    def _add_loader(self, name: str, node: ast.AST, text: str, loader: ast.expr) -> None:
        """Add what a loader, or a loop over it, becomes, and what cannot be seen of it."""
        called = self._loader_names.get(loader, code(loader))
        if not self._names.visit(loader).endswith("DataLoader()"):
            self.entries.add("unknown loader", loader, f"{called} = {code(loader)}")
            if node is loader:
                return
        dataset, size = arguments_of(loader, self._names)
        is_training = name in {"loader", "lightning loader"}
        batch, note = total(size, self._names) if is_training and size else (code(size), "")
        options = options_of(loader, self._names, is_training=is_training)
        texts = {"dataset": code(dataset), "batch": batch, "options": options, "note": note}
        texts["loader"] = f"{called} = " if loader in self._loader_names else ""
        self.entries.add(name, node, text, **texts)
        if size is None:
            self.entries.add("batch size", loader, called, dataset=code(dataset))

    # state

    def _add_start(self) -> None:
        """Add where the run starts: the main block, or the first statement that needs it."""
        body, made = self._script.tree.body, self._names.made
        everything = {value for by_text in made.values() for value in by_text.values()}
        main = [node for node in body if isinstance(node, ast.If) and "__main__" in code(node.test)]
        runs = [node for node in body if not isinstance(node, Function | ast.ClassDef)]
        first = [node for node in runs if everything & {*ast.walk(node)}]
        callers = [node for node in runs if any(map(self._names.callee, ast.walk(node)))]
        start = [*main, *first, *callers, *body][0]
        inner = [node for node in ast.walk(start) if isinstance(node, ast.Call)]
        called = [call for call in inner if self._names.callee(call)] if start not in first else []
        text = "..."
        for call in sorted(called, key=lambda call: call.lineno)[-1:]:
            arguments = [self.entries.name_of("run"), *map(code, [*call.args, *call.keywords])]
            text = f"{code(call.func)}({', '.join(arguments)})"
        self.entries.add("start", start, head(start), body=text)

    def _add_state(self) -> None:
        """Add what the run replicates and tracks, and buffers that a forward pass changes."""
        made, names = self._names.made, self._names
        is_prepared = bool({"accelerator", "fabric"} & made.keys())
        for text, model in made.get("model", {}).items():
            if not is_prepared and not calls("wraps a model").fullmatch(names.visit(model)):
                self.entries.add("model", model, text, model=text)
        optimizers = [*made.get("optimizer", {}).items()]
        of_script = [pair for pair in optimizers if names.module(pair[1]) is self._script.tree]
        for text, optimizer in [*optimizers, *of_script][-1:]:
            self.entries.add("track", optimizer, text)
        for call, buffer, owner in self._buffers:
            texts = {"buffer": buffer} | ({"model": owner} if owner else {})
            self.entries.add("buffer", call, f"self.{buffer}", **texts)

    def _changed_buffers(self) -> Iterator[tuple[ast.Call, str, str]]:
        """Yield calls that register buffers which a forward pass changes, and their names.

        The last part is the variable of the module that has it, "" if that is part of another one.
        """
        names = self._names
        for call in self._calls:
            if names.visit(call).endswith(".register_buffer()") and call.args:
                buffer = code(call.args[0])[1:-1]
                (owner, *_) = (
                    node for node in names.around(call) if isinstance(node, ast.ClassDef)
                )
                methods = [node for node in ast.walk(owner) if isinstance(node, Function)]
                inner = nodes_of(method for method in methods if "init" not in method.name)
                if any(changes(node, f"self.{buffer}") for node in inner):
                    variables = (
                        text
                        for text, values in names.assigned.items()
                        if "." not in text and owner.name in map(dotted, nodes_of(values))
                    )
                    yield call, buffer, next(variables, "")
