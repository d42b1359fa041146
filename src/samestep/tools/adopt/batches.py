"""What a DataLoader of a script becomes: the global batch size, and options of `run.batches`."""

from __future__ import annotations

import ast
from typing import Final

from samestep.tools.adopt.roles import Names, code, dotted
from samestep.tools.adopt.rules import matcher

OPTIONS: Final = {
    "collate_fn": "collate_fn",
    "drop_last": "drop_last",
    "num_workers": "loader_workers",
}
KINDS_OF_ORDER: Final = {"sampler", "batch_sampler", "shuffle", None}  # None: `**options`
ROUNDED: Final = matcher("int()", "max()", "round()", "math.*()")
WORKERS: Final = "WORKERS"


class Batches:
    """Finds data sets and batch sizes of loaders."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def arguments(self, loader: ast.expr) -> tuple[ast.expr | None, ast.expr | None]:
        """Return the data set and the batch size that a call of DataLoader has."""
        if not isinstance(loader, ast.Call):
            return None, None
        given = {each.arg: each.value for each in loader.keywords if each.arg}
        for each in loader.keywords:
            if each.arg is None:  # `**options`
                given |= self._entries(each.value)
        values = [*loader.args[:2], None, None]
        dataset = given.get("dataset", values[0])
        size = given.get("batch_size", values[1])
        sampler = given.get("batch_sampler")
        made = [*self._names.assigned.get(dotted(sampler), []), sampler]
        for call in (each for each in made if isinstance(each, ast.Call)):
            keywords = {each.arg: each.value for each in call.keywords}
            size = keywords.get("batch_size", call.args[1] if len(call.args) > 1 else size)
        if isinstance(size, ast.Constant) and size.value is None:
            return dataset, None
        if size is None and "batch_sampler" not in given and not _has_more(loader):
            size = ast.Constant(1)  # torch's default
        return dataset, size

    def _entries(self, options: ast.expr) -> dict[str, ast.expr]:
        """Return the entries of a dict of options, if the script has it as a literal."""
        entries: dict[str, ast.expr] = {}
        for value in [options, *self._names.assigned.get(dotted(options), [])]:
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                entries |= {str(k.value): v for k, v in pairs if isinstance(k, ast.Constant)}
            elif isinstance(value, ast.Call) and self._names.name(value) == "dict()":
                entries |= {each.arg: each.value for each in value.keywords if each.arg}
        return entries

    def total(self, size: ast.expr) -> tuple[str, str]:
        """Return the global batch size in the script's own names, and a note about it.

        A size that the script divides by its workers was the global one; another one is that of a
        process, if the script has several. Steps of accumulation multiply it.
        """
        base, is_divided = self._undivided(size)
        steps, are_divided = self._accumulation()
        has_workers = self._names.has_workers and not (is_divided or are_divided)
        text = code(base)
        if steps:
            product = isinstance(base, ast.BinOp) and isinstance(base.op, ast.FloorDiv)
            is_whole = product and code(base.right) == steps  # type: ignore[attr-defined]
            text = code(base.left) if is_whole else f"{grouped(text)} * {grouped(steps)}"  # type: ignore[attr-defined]
        if not has_workers:
            return text, ""
        text = f"{grouped(text) if not steps else text} * {WORKERS}"
        return text, f"; {WORKERS} is the number of processes of your old job, as a constant"

    def _undivided(self, size: ast.expr) -> tuple[ast.expr, bool]:
        """Return a number before the script divides it by its workers, and whether it does."""
        seen: list[ast.expr] = []
        while all(size is not each for each in seen):
            seen.append(size)
            if (
                isinstance(size, ast.Call)
                and ROUNDED.fullmatch(self._names.name(size))
                and size.args
            ):
                size = size.args[0]
            if self._names.name(size) in {"/ <world>", "// <world>"} and isinstance(
                size, ast.BinOp
            ):
                return size.left, True
            if any(code(divided) == code(size) for divided in self._divided_in_place()):
                return size, True
            values = self._names.assigned.get(dotted(size), [])
            for value in values:
                inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
                if self._names.name(inner) in {"/ <world>", "// <world>"}:
                    size = inner
        return size, False

    def _divided_in_place(self) -> list[ast.expr]:
        nodes = (node for node in self._names.nodes if isinstance(node, ast.AugAssign))
        signs = {"/= <world>", "//= <world>"}
        return [node.target for node in nodes if self._names.name(node) in signs]

    def _accumulation(self) -> tuple[str, bool]:
        """Return the number of micro-batches of an update, and whether workers divide it."""
        for node in self._names.nodes:
            if isinstance(node, ast.keyword) and node.arg == "gradient_accumulation_steps":
                return code(node.value), False
            by = [node.right] if isinstance(node, ast.BinOp) else []
            by += [node.value] if isinstance(node, ast.AugAssign) else []
            by += node.args if self._names.name(node).endswith("range()") else []
            for number in by:
                if self._names.role(number) == "accumulation":
                    values = [*self._names.assigned.get(dotted(number), []), number]
                    divided = [
                        base for base, is_divided in map(self._undivided, values) if is_divided
                    ]
                    return code(divided[0] if divided else number), bool(divided)
        return "", False


def _has_more(loader: ast.Call) -> bool:
    return any(each.arg is None for each in loader.keywords)


def grouped(text: str) -> str:
    """Return an expression that may be a factor."""
    is_simple = text.replace(".", "").replace("_", "").isalnum()
    return text if is_simple else f"({text})"


def options_of(loader: ast.expr, names: Names, *, is_training: bool) -> str:
    """Return the options of a DataLoader that stay, as `run.batches` or `run.evaluate` has them."""
    keywords = {e.arg: e.value for e in loader.keywords} if isinstance(loader, ast.Call) else {}
    texts = {name: code(value) for name, value in keywords.items()}
    kept = {
        OPTIONS[name]: texts[name] for name in OPTIONS if texts.get(name) not in {None, "False"}
    }
    sampler = keywords.get("sampler")
    made = " ".join(
        map(code, [sampler, *names.assigned.get(dotted(sampler), [])] if sampler else [])
    )
    is_fixed = texts.get("shuffle") == "False" if not sampler else "shuffle=False" in made
    if not is_training:
        kept.pop("drop_last", None)
    elif is_fixed or not KINDS_OF_ORDER & keywords.keys():
        kept["shuffle"] = "False"
    return "".join(f", {name}={text}" for name, text in kept.items())
