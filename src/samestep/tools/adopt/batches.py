"""What a DataLoader of a script becomes: the global batch size, and options of `run.batches`."""

from __future__ import annotations

import ast
from typing import Final

from samestep.tools.adopt.roles import Names, code, dotted
from samestep.tools.adopt.rules import calls

OPTIONS: Final = {
    "collate_fn": "collate_fn",
    "drop_last": "drop_last",
    "num_workers": "loader_workers",
}
ORDERS: Final = {"sampler", "batch_sampler", "shuffle", None}  # None: `**options`
ACCUMULATION: Final = {"gradient_accumulation_steps", "accumulate_grad_batches"}
DIVIDED: Final = ("/ <{}>", "// <{}>", "/= <{}>", "//= <{}>")  # by the workers, or those of a host
NOTES: Final = {
    "WORKERS": "; WORKERS is the number of processes that started your old job, as a constant",
    "HOSTS": "; HOSTS is the number of hosts of your old job, as a constant: this script divides"
    " its batch size by the devices of one host",
}


def keywords_of(call: ast.expr, names: Names) -> dict[str | None, ast.expr]:
    """Return the keywords of a call, with those of `**options` if the script shows them."""
    keywords: dict[str | None, ast.expr] = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        keywords[keyword.arg] = keyword.value
        for value in names.assigned.get(dotted(keyword.value), []) if keyword.arg is None else ():
            if isinstance(value, ast.Dict):
                pairs = zip(map(code, value.keys), value.values, strict=True)
                keywords |= {key.strip("'"): option for key, option in pairs}
    return keywords


def arguments_of(loader: ast.expr, names: Names) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the data set and the batch size of a call of DataLoader, None if unknown."""
    keywords = keywords_of(loader, names)
    positional = [*getattr(loader, "args", []), None, None]
    size = keywords.get("batch_size", positional[1])
    sampler = keywords.get("batch_sampler")
    for call in [*names.assigned.get(dotted(sampler), []), sampler]:
        if isinstance(call, ast.Call):
            second = call.args[1] if len(call.args) > 1 else size
            size = keywords_of(call, names).get("batch_size", second)
    if size is None and not {"batch_sampler", None} & keywords.keys():
        size = ast.Constant(1)  # torch's default
    is_none = isinstance(size, ast.Constant) and size.value is None
    return keywords.get("dataset", positional[0]), None if is_none else size


def options_of(loader: ast.expr, names: Names, *, is_training: bool) -> str:
    """Return the options of a DataLoader that stay, as `run.batches` or `run.evaluate` has them."""
    keywords = keywords_of(loader, names)
    batch_sampler = keywords.get("batch_sampler")
    for call in [*names.assigned.get(dotted(batch_sampler), []), batch_sampler]:
        if call and (drop_last := keywords_of(call, names).get("drop_last")):
            keywords["drop_last"] = drop_last
    texts = {key: code(value) for key, value in keywords.items()}
    kept = {OPTIONS[key]: texts[key] for key in OPTIONS if texts.get(key, "False") != "False"}
    sampler = keywords.get("sampler")
    made = [code(value) for value in [*names.assigned.get(dotted(sampler), []), sampler]]
    is_fixed = "shuffle=False" in " ".join(made) if sampler else texts.get("shuffle") == "False"
    if not is_training:
        kept.pop("drop_last", None)
    elif is_fixed or not ORDERS & keywords.keys():
        kept["shuffle"] = "False"
    return "".join(f", {key}={text}" for key, text in kept.items())


def total(size: ast.expr, names: Names) -> tuple[str, str]:
    """Return the global batch size in the script's own names, and a note about it.

    A size that the script divides by its workers was the global one, and one that it divides by the
    devices of a host was that of a host; another one is that of a process, if the script has
    several. Steps of accumulation multiply it.
    """
    base, divisor = _undivided(size, names)
    steps, divisor_of_steps = _accumulation(names)
    text = factor(code(base)) if steps else code(base)
    if (
        isinstance(base, ast.BinOp)
        and isinstance(base.op, ast.FloorDiv)
        and code(base.right) == steps
    ):
        text = code(base.left)
    elif steps:
        text = f"{text} * {factor(steps)}"
    missing = _missing_factor({divisor, divisor_of_steps}, names)
    if not missing:
        return text, ""
    return f"{text if steps else factor(text)} * {missing}", NOTES[missing]


def per_step(names: Names) -> str:
    """Return how many batches of its own code a script trains on in one step, as text."""
    steps, divisor = _accumulation(names)
    factors = [factor(steps), _missing_factor({divisor}, names)]
    number = " * ".join(filter(None, factors)) if steps else factors[1]
    return f"{number} of these batches" if number else "one of these batches"


def _missing_factor(divisors: set[str], names: Names) -> str:
    """Return what a number has to be multiplied by to be that of all workers, "" if it is that."""
    if "world" in divisors or not names.has_workers:
        return ""
    return "HOSTS" if "devices" in divisors else "WORKERS"


def factor(text: str) -> str:
    """Return a number as the factor of a product."""
    is_simple = text.replace(".", "").replace("_", "").isalnum()
    return text if is_simple or not text else f"({text})"


def _undivided(number: ast.expr, names: Names) -> tuple[ast.expr, str]:
    """Return a number before the script divides it by its workers, and the role of the divisor.

    The role is that of all workers, "world", or of those of one host, "devices"; "" without one.
    """
    divided = {form.format(role): role for role in ("world", "devices") for form in DIVIDED}
    for value in [number, *names.assigned.get(dotted(number), [])]:
        inner = value
        if isinstance(value, ast.Call) and calls("rounds").fullmatch(names.visit(value)):
            inner = value.args[0]
        if isinstance(inner, ast.BinOp) and names.visit(inner) in divided:
            return inner.left, divided[names.visit(inner)]
    for node in names.nodes:
        is_changed = isinstance(node, ast.AugAssign) and code(node.target) == code(number)
        if is_changed and (role := divided.get(names.visit(node))):
            return number, role
    return number, ""


def _accumulation(names: Names) -> tuple[str, str]:
    """Return the number of micro-batches of an update, and the role of what divides it."""
    for node in names.nodes:
        if isinstance(node, ast.keyword) and node.arg in ACCUMULATION:
            return code(node.value), ""
        factors = [node.right] if isinstance(node, ast.BinOp) else []
        factors += [node.value] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Call) and names.visit(node) == "range()":
            factors += node.args
        for number in factors:
            if names.role(number) == "accumulation":
                divided, role = _undivided(number, names)
                return code(divided), role
    return "", ""
