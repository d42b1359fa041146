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
ORDERS: Final = {"sampler", "batch_sampler", "shuffle", None}  # None: `**options`
ROUNDED: Final = matcher("int()", "max()", "round()", "math.*()")
ACCUMULATION: Final = {"gradient_accumulation_steps", "accumulate_grad_batches"}
SHARES: Final = {"/ <world>", "// <world>"}
NOTE: Final = "; WORKERS is the number of processes of your old job, as a constant"


def keywords_of(call: ast.expr, names: Names) -> dict[str | None, ast.expr]:
    """Return the keywords of a call, with those of `**options` if the script shows them."""
    given: dict[str | None, ast.expr] = {}
    for each in call.keywords if isinstance(call, ast.Call) else ():
        given[each.arg] = each.value
        for value in names.assigned.get(dotted(each.value), []) if each.arg is None else ():
            pairs = (
                zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
            )
            given |= {str(key.value): one for key, one in pairs if isinstance(key, ast.Constant)}
    return given


def arguments_of(loader: ast.expr, names: Names) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the data set and the batch size of a call of DataLoader, None if unknown."""
    given = keywords_of(loader, names)
    positional = [*getattr(loader, "args", []), None, None]
    size = given.get("batch_size", positional[1])
    sampler = given.get("batch_sampler")
    for call in [*names.assigned.get(dotted(sampler), []), sampler]:
        if isinstance(call, ast.Call):
            second = call.args[1] if len(call.args) > 1 else size
            size = keywords_of(call, names).get("batch_size", second)
    if size is None and not {"batch_sampler", None} & given.keys():
        size = ast.Constant(1)  # torch's default
    is_none = isinstance(size, ast.Constant) and size.value is None
    return given.get("dataset", positional[0]), None if is_none else size


def options_of(loader: ast.expr, names: Names, *, is_training: bool) -> str:
    """Return the options of a DataLoader that stay, as `run.batches` or `run.evaluate` has them."""
    given = keywords_of(loader, names)
    texts = {key: code(value) for key, value in given.items()}
    kept = {OPTIONS[key]: texts[key] for key in OPTIONS if texts.get(key, "False") != "False"}
    sampler = given.get("sampler")
    made = [code(each) for each in [*names.assigned.get(dotted(sampler), []), sampler]]
    is_fixed = "shuffle=False" in " ".join(made) if sampler else texts.get("shuffle") == "False"
    if not is_training:
        kept.pop("drop_last", None)
    elif is_fixed or not ORDERS & given.keys():
        kept["shuffle"] = "False"
    return "".join(f", {key}={text}" for key, text in kept.items())


def total(size: ast.expr, names: Names) -> tuple[str, str]:
    """Return the global batch size in the script's own names, and a note about it.

    A size that the script divides by its workers was the global one; another one is that of a
    process, if the script has several. Steps of accumulation multiply it.
    """
    base, is_divided = _undivided(size, names)
    steps, are_divided = _accumulation(names)
    text = _factor(code(base)) if steps else code(base)
    if (
        isinstance(base, ast.BinOp)
        and isinstance(base.op, ast.FloorDiv)
        and code(base.right) == steps
    ):
        text = code(base.left)
    elif steps:
        text = f"{text} * {_factor(steps)}"
    if not names.has_workers or is_divided or are_divided:
        return text, ""
    return f"{text if steps else _factor(text)} * WORKERS", NOTE


def _factor(text: str) -> str:
    is_simple = text.replace(".", "").replace("_", "").isalnum()
    return text if is_simple else f"({text})"


def _undivided(size: ast.expr, names: Names) -> tuple[ast.expr, bool]:
    """Return a number before the script divides it by its workers, and whether it does."""
    in_place = [node for node in names.nodes if names.visit(node) in {"/= <world>", "//= <world>"}]
    for value in [size, *names.assigned.get(dotted(size), [])]:
        is_rounded = ROUNDED.fullmatch(names.visit(value)) and isinstance(value, ast.Call)
        inner = value.args[0] if is_rounded and isinstance(value, ast.Call) else value
        if names.visit(inner) in SHARES and isinstance(inner, ast.BinOp):
            return inner.left, True
    is_changed = any(code(getattr(node, "target", None)) == code(size) for node in in_place)
    return size, is_changed


def _accumulation(names: Names) -> tuple[str, bool]:
    """Return the number of micro-batches of an update, and whether workers divide it."""
    for node in names.nodes:
        if isinstance(node, ast.keyword) and node.arg in ACCUMULATION:
            return code(node.value), False
        by = [node.right] if isinstance(node, ast.BinOp) else []
        by += [node.value] if isinstance(node, ast.AugAssign) else []
        by += node.args if isinstance(node, ast.Call) and names.visit(node) == "range()" else []
        for number in by:
            if names.role(number) == "accumulation":
                divided = _undivided(number, names)
                return code(divided[0]), divided[1]
    return "", False
