"""What a snapshot needs of the objects that load it: names and shapes, parameter groups.

A start loads a snapshot into what the script has built until then. So none can load that of a model
that was pruned or has grown since the start, unless the script builds it by what was saved before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Module
from torch.optim import Optimizer

from samestep.torch_internals import adapts_to_states

SHOWN: Final = 3  # names in a line
OF_MODULES: Final = (
    "Give the model its final structure before run.replicate: masks that come later with"
    " torch.nn.utils.prune.identity(layer, 'weight'), or as buffers. If it grows, track its size"
    " first, as in sizes = {'points': 16} and run.track(sizes=sizes), which restores it; build the"
    " model with that size, then run.replicate and run.track it; and set sizes['points'] when it"
    " changes. Building it by run.step works as well"
)
OF_OPTIMIZERS: Final = (
    "Give the optimizer all groups before run.track, and freeze parameters that train later with"
    " requires_grad_(False)"
)


class Structure(NamedTuple):
    """What an object has in common with one that loads its state, by name.

    Modules whose names begin with one of `adapting` say themselves how they load a state.
    """

    parts: Mapping[str, Any]
    adapting: tuple[str, ...] = ()


def structure_of(item: Any) -> Structure:
    """Return the structure of a module or an optimizer; others have none."""
    adapting: tuple[str, ...] = ()
    if isinstance(item, Module):
        adapting = tuple(
            f"{name}." if name else ""
            for name, owner in item.named_modules()
            if adapts_to_states(owner)
            or (owner is item and type(item).load_state_dict is not Module.load_state_dict)
        )
    return Structure(_parts(item, None, adapting), adapting)


def _parts(item: Any, state: Any, adapting: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(item, Optimizer):
        sizes = [len(group["params"]) for group in item.param_groups]
        return {f"parameter group {number}": size for number, size in enumerate(sizes)}
    if not isinstance(item, Module):
        return {}
    return {
        name: list(value.shape)
        for name, value in (item.state_dict() if state is None else state).items()
        if not name.startswith(adapting) and isinstance(value, torch.Tensor)
    }


def changes_of(before: Structure, item: Any, state: Any = None) -> str:
    """Return what an object with this `state` has gained and lost, "" if nothing."""
    return ", ".join(_changes(before.parts, _parts(item, state, before.adapting)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if new := [name for name in now if name not in before]:
        yield f"has {_listed(new)}, which it did not have then"
    if lost := [name for name in before if name not in now]:
        yield f"has no {_listed(lost)} any more"
    for name in [name for name in now if before.get(name, now[name]) != now[name]][:SHOWN]:
        yield f"has {name!r} of {now[name]}, then of {before[name]}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return ", ".join(map(repr, names[:SHOWN])) + more


def numbers_of(value: Any) -> Any:
    """Return the numbers and texts of a tracked dict or list, by which a script may build."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: entry for key, entry in entries if isinstance(entry, (int, float, str))}
