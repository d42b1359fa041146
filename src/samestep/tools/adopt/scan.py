"""Find what a training script has to change: its loops, loaders and state, and what it calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from samestep.tools.adopt.batches import loader_of, per_step, total
from samestep.tools.adopt.entries import Entries
from samestep.tools.adopt.places import Places
from samestep.tools.adopt.roles import Names
from samestep.tools.adopt.source import Source
from samestep.tools.adopt.syntax import (
    Function,
    Loop,
    bare,
    code,
    dotted,
    head,
    iterated,
    lines_of,
    nodes_of,
    passes_of,
    range_of,
)

TRACKED: Final = ("model", "optimizer", "scheduler", "scaler", "ema")
CHANGED: Final = r"self\.{0}(\[[^=]*\])? [+*/@-]*= |self\.{0}\.\w+_\("  # a buffer, in place or not
OWN_BACKWARD: Final = ("super()", "ctx.", "run.", "batch.")


class Scan:
    """The entries of the plan of a script, the first of the sources, in `entries`.

    `missing` says why some of its modules could not be read.
    """

    def __init__(self, sources: Sequence[Source], missing: Mapping[Path, str]) -> None:
        self._script, self._names = sources[0], Names(sources)
        self._calls = [node for node in self._names.nodes if isinstance(node, ast.Call)]
        self._lanes: set[ast.AST] = set()  # nodes that a loop over batches runs
        self._trained: list[ast.expr] = []  # what makes loaders
        self._evaluated: list[ast.expr] = []
        made = self._names.made
        self._loader_names = {
            value: text
            for text in [*made.get("loader", {})][::-1]  # the first name stays
            for value in self._names.assigned[text]
        }
        self._buffers = [*self._changed_buffers()]
        tracked = dict.fromkeys(text for role in TRACKED for text in made.get(role, {}))
        tracked |= dict.fromkeys(owner for _, _, owner in self._buffers if owner)
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
        around = {call: [*self._names.loops(call)] for call in backward}
        loops = [loop for of_call in around.values() for loop in of_call]
        self.entries = Entries(self._names, texts, loops)
        self._add_unread(sources, missing)
        self._add_training(around)
        self._add_evaluation()
        self._add_loaders()
        self._add_start()
        self._add_state()
        Places(self._names, self.entries, self._lanes).add_all()
        if not any(map(self.entries.node_of, ("backward", "lightning", "trainer"))):
            self.entries.add("no loop", self._script.tree, "backward")

    def _add_unread(self, sources: Sequence[Source], missing: Mapping[Path, str]) -> None:
        """Add the modules that could not be read, and those that are not where the script is."""
        for path, why in missing.items():
            self.entries.add("not read", self._script.tree, str(path), why=why)
        folder = self._script.path.parent
        imports = [bound for source in sources for bound in source.imports]
        absent = {bound.module: bound for bound in imports[::-1] if bound.is_absent(folder)}
        for module, bound in absent.items():
            self.entries.add("not found", bound.statement, module)

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

    def _is_update(self, node: ast.AST) -> bool:
        return self._names.is_for(node, "updates")

    def _loop_of(self, loops: list[Loop]) -> Loop:
        """Return the one of the loops around backward that makes a step, and note its loaders."""
        visit = self._names.visit
        inner = [loop for loop in loops if "<accumulation>" in map(visit, iterated(loop))]
        for loop in inner:
            self.entries.add("accumulation", loop, head(loop))
        rest = [loop for loop in loops if loop not in inner] or loops
        updating = [loop for loop in rest if any(map(self._is_update, ast.walk(loop)))]
        over_loaders = [loop for loop in rest if self._loaders(iterated(loop))]
        step = [*over_loaders, *updating, *rest][0]
        reads = [node for node in ast.walk(step) if visit(node) == "next()"]
        loaders = self._loaders(iterated(step)) or self._loaders(nodes_of(reads))
        self._trained += loaders
        if not loaders and (passes := passes_of(step)):
            texts = {"epochs": passes, "calls": per_step(self._names)}
            self.entries.add("own batches", step, head(step), **texts)
        elif not loaders and isinstance(step, ast.For):
            assigned = [self._names.assigned.get(dotted(node), []) for node in iterated(step)]
            lines = [value.lineno for values in assigned for value in values]
            made = "".join(f" of line {line}" for line in lines[:1])
            self.entries.add("unknown loop", step, head(step), iterated=code(step.iter), made=made)
        outer = [loop for loop in rest[rest.index(step) + 1 :] if passes_of(loop)]
        for loop in outer[:1]:
            epoch = code(loop.target) if isinstance(loop, ast.For) else "epoch"
            start, end = range_of(loop)
            is_shifted = start.isdigit()  # else, it is where the old job resumed
            texts = {"epoch": epoch, "epochs": passes_of(loop), "end": passes_of(loop)}
            texts |= {"shift": f" + {start}", "end": code(end)} if is_shifted else {"shift": ""}
            self.entries.add("epochs", loop, head(loop), **texts)
        return step

    def _loaders(self, nodes: Iterable[ast.AST]) -> list[ast.expr]:
        """Return what made the loaders that nodes are."""
        values = (value for node in nodes for value in self._names.values(node))
        return [value.made for value in values if value.role == "loader"]

    def _loop_text(self, loop: Loop) -> str:
        """Return what the loop over batches iterates: the loader's name, or what makes it."""
        loaders = [node for node in iterated(loop) if dotted(node) and self._loaders([node])]
        if loaders:
            return dotted(loaders[0])
        return "loop" if self.entries.has("own batches", loop) else "run.batches(dataset, GLOBAL)"

    def _loss_of(self, call: ast.Call) -> str:
        """Return what `batch.backward` gets in place of a call of backward."""
        loss = call.func.value if isinstance(call.func, ast.Attribute) else call
        if call.args and self._names.role(loss) in {"accelerator", "fabric"}:
            loss = call.args[0]
        match self._names.visit(loss), loss:
            case "/ <accumulation>", ast.BinOp(left=left):
                loss = left
            case "<scaler>.scale()", ast.Call(args=[unscaled, *_]):
                return f"{code(loss)}, loss={code(unscaled)}"
        return code(loss)

    def _add_loop(self, loop: Loop, backward: list[ast.Call]) -> None:
        """Add what a loop over batches becomes, and note what belongs to its lanes."""
        is_own = self.entries.has("own batches", loop)
        target = loop.target if isinstance(loop, ast.For) and not is_own else None
        visited = [*map(self._names.visit, iterated(loop))]
        is_counted = "enumerate()" in visited[:1] or {"zip()", "range()"} <= {*visited}
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
        visit = self._names.visit
        for loop in (node for node in self._names.nodes if isinstance(node, Loop)):
            inside, around = [*ast.walk(loop)], [*self._names.around(loop)]
            is_source = any(isinstance(node, ast.Yield) for node in inside)  # of a loader
            if is_source or self.entries.has("loop", loop):
                continue
            loaders = self._loaders(iterated(loop))
            self._evaluated += loaders
            for made in sorted(loaders, key=lambda made: made.lineno)[:1]:
                self._add_loader("evaluation", loop, head(loop), made)
            functions = [node for node in around if isinstance(node, Function)]
            called = {visit(node) for node in nodes_of([loop, *functions[:1]])}
            nested = [node for node in inside if isinstance(node, Loop)]
            is_known = (
                any(self._loaders(iterated(inner)) for inner in nested)
                or any(map(self._is_backward, inside))
                or any(isinstance(node, Loop) for node in around)
            )
            evaluates = "<model>()" in map(visit, inside) and "<model>.eval()" in called
            if evaluates and not is_known:
                self.entries.add("own evaluation", loop, head(loop))

    # data

    def _add_loaders(self) -> None:
        """Add all loaders: those of loops that train, and others."""
        names = self._names
        made = [call for call in self._calls if names.visit(call).endswith("DataLoader()")]
        is_fit = any(names.is_for(call, "takes loaders") for call in self._calls)
        others = names.made.get("loader", {}).values() if is_fit else ()
        loaders = dict.fromkeys([*made, *self._trained, *self._evaluated, *others])
        for call in [call for call in loaders if not names.is_for(call, "prepares its arguments")]:
            is_trained = call in self._trained or not (self._trained or is_fit)
            name = "evaluation" if call in self._evaluated else "evaluated loader"
            name = "loader" if is_trained and call not in self._evaluated else name
            text = self._loader_names.get(call, code(call))
            self._add_loader("lightning loader" if is_fit else name, call, text, call)

    def _add_loader(self, name: str, node: ast.AST, text: str, call: ast.expr) -> None:
        """Add what a loader, or a loop over it, becomes, and what cannot be seen of it."""
        loader = loader_of(call, self._names)
        called = self._loader_names.get(call, code(call))
        is_training = name in {"loader", "lightning loader"}
        batch, note = code(loader.size), ""
        if is_training and loader.size:
            batch, note = total(loader.size, self._names)
        texts = {
            "loader": f"{called} = " * (call in self._loader_names),
            "dataset": code(loader.dataset) if loader.dataset or loader.is_known else "dataset",
            "batch": batch if loader.size or loader.is_known else "GLOBAL",
            "options": loader.options(is_training=is_training),
            "note": note,
        }
        if node is call and not loader.is_known:
            name = "unknown loader" if is_training else "unknown evaluated loader"
            text = f"{called} = {code(call)}"
        elif loader.size is None and loader.is_known:
            self.entries.add("batch size", call, called, dataset=texts["dataset"])
        self.entries.add(name, node, text, **texts)

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
            if not is_prepared and not names.is_for(model, "wraps a model"):
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
            owners = [node for node in names.around(call) if isinstance(node, ast.ClassDef)]
            if not (names.visit(call).endswith(".register_buffer()") and call.args and owners):
                continue
            owner, buffer = owners[0], code(call.args[0])[1:-1]
            methods = [node for node in ast.walk(owner) if isinstance(node, Function)]
            texts = [code(method) for method in methods if "init" not in method.name]
            if any(re.search(CHANGED.format(re.escape(buffer)), text) for text in texts):
                variables = (
                    text
                    for text, values in names.assigned.items()
                    if "." not in text and owner.name in map(dotted, nodes_of(values))
                )
                yield call, buffer, next(variables, "")
