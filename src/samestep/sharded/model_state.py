"""The state of a module with sharded parameters: each worker saves and loads its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from samestep.sharded.parts import Part
from samestep.step.optimizer_state import DividedState


class ModelState(DividedState):
    """The `state_dict` of the whole module, with the names of the plain one.

    `parts` are those of all models by id of the sharded parameter. `await_readers` frees what all
    workers have gathered. They all save buffers, of which a snapshot keeps one copy.
    """

    def __init__(
        self, module: Module, parts: Mapping[int, Part], await_readers: Callable[[], None]
    ) -> None:
        self._module, self._parts, self._await_readers = module, parts, await_readers

    def state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict(keep_vars=True)
        for name, value in state.items():
            if (part := self._parts.get(id(value))) is not None:
                state[name] = part.slice_of(part.segment)
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        present = self._module.state_dict(keep_vars=True)
        missing, unexpected = present.keys() - state.keys(), state.keys() - present.keys()
        if missing or unexpected:
            raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")
        self._await_readers()
        with torch.no_grad():
            for name, value in present.items():
                part = self._parts.get(id(value))
                if list(value.shape) != list(state[name].shape):
                    raise ValueError(f"{name!r} has shape {list(state[name].shape)}")
                if part is not None:
                    part.take(state[name])
                else:
                    value.copy_(state[name])
