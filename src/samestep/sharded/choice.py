"""The units of a model: the modules whose parameters are gathered at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from torch.nn import Module, ModuleList, Sequential

from samestep.errors import ModelError

Units = Sequence[type[Module]] | Callable[[str, Module], bool]
LEAST_BYTES: Final = 1 << 20  # of a repeated block
COMPILED: Final = "_orig_mod"  # the name of a module in the one that torch.compile returns
MOST_ROOT_BYTES: Final = 64 << 20  # of a model without units


def units_of(model: Module, units: Units | None) -> list[tuple[str, Module]]:
    """Return the modules whose parameters are gathered at once, by name, the inner ones first.

    `units` has their classes, or tells which ones they are. By default, they are the repeated
    blocks: members of a `ModuleList` or `Sequential` of one class that have at least 1 MiB. The
    last one is the model itself. Raises `ModelError` if a parameter is in several units.
    """
    is_unit: Callable[[str, Module], bool]
    if units is None:
        blocks = {id(block) for owner in model.modules() for block in _blocks_of(owner)}
        is_unit = lambda _, module: id(module) in blocks  # noqa: E731
    elif isinstance(units, Sequence):
        kinds = tuple(units)
        is_unit = lambda name, module: _is_one(name, module, kinds)  # noqa: E731
    else:
        is_unit = units
    named = [(name, module) for name, module in model.named_modules() if name]
    chosen = [(name, module) for name, module in named if is_unit(name, module)]
    if not chosen and (units is not None or _bytes(model) > MOST_ROOT_BYTES):
        raise ModelError(
            f"shard='full' found no units in {type(model).__name__}: pass the classes of its"
            " blocks, as in units=(Block,), whose parameters are gathered at once"
        )
    _refuse_divided(model, [name for name, _ in chosen])
    return [*chosen[::-1], (type(model).__name__, model)]


def _is_one(name: str, module: Module, kinds: tuple[type[Module], ...]) -> bool:
    """Return whether a module is of these classes; one that torch.compile wrapped is its wrapper.

    So hooks are outside of what is compiled.
    """
    is_inside = name.endswith(f".{COMPILED}")
    return isinstance(getattr(module, COMPILED, module), kinds) and not is_inside


def _refuse_divided(model: Module, units: Sequence[str]) -> None:
    """Raise `ModelError` if one parameter is in two units: each would have its own."""

    def unit_of(name: str) -> str:
        inside = [unit for unit in units if name.startswith(f"{unit}.")]
        return repr(max(inside, key=len)) if inside else "no unit"

    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if unit_of(before) != unit_of(name):
            raise ModelError(
                f"{before!r} and {name!r} are one parameter, of which the first name is in"
                f" {unit_of(before)} and the second in {unit_of(name)}: choose units= so that one"
                " unit has both names, or none does"
            )


def _blocks_of(owner: Module) -> list[Module]:
    """Return the large members of a list of modules whose class has several of them."""
    members = [*owner.children()] if isinstance(owner, (ModuleList, Sequential)) else []
    numbers = Counter(map(type, members))
    return [m for m in members if numbers[type(m)] > 1 and _bytes(m) >= LEAST_BYTES]


def _bytes(module: Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
