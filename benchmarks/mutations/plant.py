"""Where a fault goes in a training script: places in its syntax tree, and the names it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from samestep.host import parse

# places for statements, in the order of a script
PLACES: Final = ("module", "data", "begin", "body", "lane", "after", "update", "end")


@dataclass(frozen=True)
class Names:
    """What a script calls its things: those of the first loop over lanes."""

    model: str
    loss: str
    inputs: str
    optimizer: str


class Script:
    """The syntax tree of a script of docs/loops, in which statements are inserted."""

    def __init__(self, source: str) -> None:
        self._tree = parse(source)
        functions = [node for node in self._tree.body if isinstance(node, ast.FunctionDef)]
        self._main = next(node for node in functions if node.name == "main")
        loops = [node for node in self._main.body if isinstance(node, ast.For)]
        self._loop = loops[0]
        self._lanes = next((node for node in self._loop.body if _is_lanes(node)), None)
        self._backward = next(
            (
                node
                for node in ([] if self._lanes is None else self._lanes.body)
                if _called(node).endswith(".backward")
            ),
            None,
        )

    def names(self) -> Names:
        """Return the names of the first loop over lanes, and of the optimizer that follows."""
        update = next(node for node in self._loop.body if _is_update(node))
        call = update.value
        of_scaler = [ast.unparse(argument) for argument in call.args]
        optimizer = (of_scaler or [_called(update).removesuffix(".step")])[0]
        if self._lanes is None or self._backward is None:
            return Names("model", "loss", "images", optimizer)
        target = self._lanes.target
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        losses = [node.id for node in ast.walk(self._backward.value) if isinstance(node, ast.Name)]
        loss = next(name for name in losses if name.startswith("loss"))
        model = ast.unparse(self._lanes.iter.args[0])
        return Names(model, loss, ast.unparse(first), optimizer)

    def insert(self, place: str, code: str) -> None:
        """Insert statements at one of `PLACES`."""
        names = self.names()
        statements = parse(code.format(**vars(names))).body
        block, at = self._find(place)
        block[at:at] = statements

    def _find(self, place: str) -> tuple[list[ast.stmt], int]:
        """Return the block of statements of a place, and the position there."""
        main, loop = self._main.body, self._loop.body
        if place == "module":
            return self._tree.body, 1 + max(
                n for n, node in enumerate(self._tree.body) if isinstance(node, ast.Import)
            )
        if place == "data":  # after the data set, if there is one
            own = [n for n, node in enumerate(main) if "make_data" in ast.unparse(node)]
            return main, own[0] + 1 if own else 0
        if place == "begin":
            return main, 1 + next(n for n, node in enumerate(main) if _called(node) == "run.track")
        if place in {"lane", "after"}:
            if self._lanes is None or self._backward is None:
                raise LookupError("the script has no loop over lanes")
            body = self._lanes.body
            return body, body.index(self._backward) + (place == "after")
        if place == "update":
            return loop, next(n for n, node in enumerate(loop) if _is_update(node))
        return loop, 0 if place == "body" else len(loop)

    def forget(self, keyword: str, function: str) -> None:
        """Remove a keyword argument from the first call of a function."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                kept = [each for each in node.keywords if each.arg != keyword]
                if len(kept) < len(node.keywords):
                    node.keywords = kept
                    return
        raise LookupError(f"no call of {function} has {keyword}=")

    def replace(self, old: str, new: str) -> None:
        """Replace the first expression that is written as `old`."""
        for node in ast.walk(self._tree):
            for name, value in ast.iter_fields(node):
                values = value if isinstance(value, list) else [value]
                for number, child in enumerate(values):
                    is_read = not isinstance(getattr(child, "ctx", None), ast.Store)
                    if isinstance(child, ast.expr) and is_read and ast.unparse(child) == old:
                        expression = parse(f"_ = {new}").body[0].value
                        if isinstance(value, list):
                            value[number] = expression
                        else:
                            setattr(node, name, expression)
                        return
        raise LookupError(f"the script has no {old}")

    def __str__(self) -> str:
        return ast.unparse(ast.fix_missing_locations(self._tree)) + "\n"


def _called(node: ast.stmt) -> str:
    """Return the function of a statement that is a call, or assigns one; "" for others."""
    value = getattr(node, "value", None)
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _is_update(node: ast.stmt) -> bool:
    name = _called(node)
    return name.endswith(".step") and not name.startswith("scheduler")


def _is_lanes(node: ast.stmt) -> bool:
    return isinstance(node, ast.For) and ast.unparse(node.iter).startswith("batch.lanes(")


def planted(
    source: str,
    inserted: Mapping[str, str],
    forgotten: Iterator[tuple[str, str]],
    replaced: Mapping[str, str],
) -> str:
    """Return a script with a fault: statements by place, keywords removed, expressions replaced."""
    script = Script(source)
    for keyword, function in forgotten:
        script.forget(keyword, function)
    for old, new in replaced.items():
        script.replace(old, new)
    for place in PLACES:
        if place in inserted:
            script.insert(place, inserted[place])
    return str(script)
