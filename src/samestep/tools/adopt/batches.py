"""What a loader of a script becomes: its data set, the global batch size, and options that stay."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Final

from samestep.tools.adopt.roles import Names
from samestep.tools.adopt.syntax import code, dotted

# of which the parameters may be passed by position
LOADER: Final = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler")
BATCH_SAMPLER: Final = ("sampler", "batch_size", "drop_last")
OPTIONS: Final = {
    "collate_fn": "collate_fn",
    "drop_last": "drop_last",
    "num_workers": "loader_workers",
}
ORDERS: Final = {"sampler", "batch_sampler", "shuffle", None}  # None: `**options`
DATASET: Final = re.compile(r".*set(_(tr|val|test|eval)\w*)?")  # names of data sets
ACCUMULATION: Final = {"gradient_accumulation_steps", "accumulate_grad_batches"}
DIVIDED: Final = {
    f"{sign} <{role}>": role for role in ("world", "devices") for sign in ("/", "//", "/=", "//=")
}  # by the workers, or those of a host
NOTES: Final = {
    "": "",
    "WORKERS": "; WORKERS is the number of processes that started your old job, as a constant",
    "HOSTS": "; HOSTS is the number of hosts of your old job, as a constant: this script divides"
    " its batch size by the devices of one host",
}


@dataclass(frozen=True)
class Loader:
    """What a call that makes a loader shows of it; None is what it does not show."""

    is_known: bool  # a DataLoader of torch
    dataset: ast.expr | None
    size: ast.expr | None
    by_name: dict[str | None, ast.expr]
    has_fixed_order: bool

    def options(self, *, is_training: bool) -> str:
        """Return the options that stay, as `run.batches` or `run.evaluate` has them."""
        texts = {key: code(self.by_name[key]) for key in OPTIONS if key in self.by_name}
        kept = {OPTIONS[key]: text for key, text in texts.items() if text != "False"}
        if not is_training:
            kept.pop("drop_last", None)
        elif self.has_fixed_order:
            kept["shuffle"] = "False"
        return "".join(f", {key}={text}" for key, text in kept.items())


def arguments(
    call: ast.expr, parameters: tuple[str, ...], names: Names
) -> dict[str | None, ast.expr]:
    """Return the arguments of a call by name, with those of `**options` that the script shows."""
    if not isinstance(call, ast.Call):
        return {}
    by_name: dict[str | None, ast.expr] = dict(zip(parameters, call.args, strict=False))
    for keyword in call.keywords:
        by_name[keyword.arg] = keyword.value
        for value in names.expressions(keyword.value) if keyword.arg is None else ():
            if isinstance(value, ast.Dict):
                pairs = zip(map(code, value.keys), value.values, strict=True)
                by_name |= {key.strip("'"): option for key, option in pairs}
            elif names.visit(value) == "dict()":
                by_name |= arguments(value, (), names)
    return by_name


def loader_of(call: ast.expr, names: Names) -> Loader:
    """Return what a call shows of the loader that it makes."""
    is_known = names.visit(call).endswith("DataLoader()")
    by_name = arguments(call, LOADER if is_known else (), names)
    for sampler in names.expressions(by_name.get("batch_sampler")):
        of_sampler = arguments(sampler, BATCH_SAMPLER, names)
        by_name |= {key: of_sampler[key] for key in BATCH_SAMPLER[1:] if key in of_sampler}
    default = None if not is_known or {"batch_sampler", None} & by_name.keys() else ast.Constant(1)
    size = by_name.get("batch_size", default)
    sets = [part for part in getattr(call, "args", ()) if DATASET.fullmatch(dotted(part))]
    orders = " ".join(map(code, names.expressions(by_name.get("sampler"))))
    is_unshuffled = code(by_name.get("shuffle")) == "False"
    return Loader(
        is_known,
        by_name.get("dataset", next(iter(sets), None)),
        None if isinstance(size, ast.Constant) and size.value is None else size,
        by_name,
        "shuffle=False" in orders if orders else is_unshuffled or not ORDERS & by_name.keys(),
    )


def total(size: ast.expr, names: Names) -> tuple[str, str]:
    """Return the global batch size in the script's own names, and a note about it.

    A size that the script divides by its workers was the global one, and one that it divides by the
    devices of a host was that of a host; another one is that of a process, if the script has
    several. Steps of accumulation multiply it.
    """
    base, divisor = _undivided(size, names)
    steps, divisor_of_steps = _accumulation(names)
    match base:
        case ast.BinOp(left=whole, op=ast.FloorDiv(), right=parts) if code(parts) == steps:
            base, steps = whole, ""
    missing = _missing_factor({divisor, divisor_of_steps}, names)
    return _product(code(base), steps, missing), NOTES[missing]


def per_step(names: Names) -> str:
    """Return how many batches of its own code a script trains on in one step, as text."""
    steps, divisor = _accumulation(names)
    number = _product(steps, _missing_factor({divisor}, names))
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


def _product(*texts: str) -> str:
    factors = [text for text in texts if text]
    return " * ".join(map(factor, factors)) if factors[1:] else "".join(factors)


def _undivided(number: ast.expr, names: Names) -> tuple[ast.expr, str]:
    """Return a number before the script divides it by its workers, and the role of the divisor.

    The role is that of all workers, "world", or of those of one host, "devices"; "" without one.
    """
    for value in names.expressions(number):
        inner = value
        if isinstance(value, ast.Call) and value.args and names.is_for(value, "rounds"):
            inner = value.args[0]
        if isinstance(inner, ast.BinOp) and names.visit(inner) in DIVIDED:
            return inner.left, DIVIDED[names.visit(inner)]
    for node in names.nodes:
        is_changed = isinstance(node, ast.AugAssign) and code(node.target) == code(number)
        if is_changed and (role := DIVIDED.get(names.visit(node))):
            return number, role
    return number, ""


def _accumulation(names: Names) -> tuple[str, str]:
    """Return the number of micro-batches of an update, and the role of what divides it."""
    for node in names.nodes:
        match node:
            case ast.keyword(arg=name, value=value) if name in ACCUMULATION:
                return code(value), ""
            case ast.BinOp(right=value) | ast.AugAssign(value=value):
                numbers = [value]
            case ast.Call(args=numbers) if names.visit(node) == "range()":
                pass
            case _:
                continue
        for number in numbers:
            if names.role(number) == "accumulation":
                divided, role = _undivided(number, names)
                return code(divided), role
    return "", ""
