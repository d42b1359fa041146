"""The state of a sharded model: each worker saves and loads its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.sharded.model import ShardedModel
from samestep.step.optimizer_state import DividedState


class ModelState(DividedState):
    """The `state_dict` of the whole model, with the names of the plain one."""

    def __init__(self, sharded: ShardedModel, *, is_main: bool) -> None:
        """With `is_main`, also save what all workers have, such as buffers."""
        self._sharded, self._is_main = sharded, is_main

    def state_dict(self) -> dict[str, Any]:
        state = self._sharded.model.state_dict(keep_vars=True)
        parts = self._sharded.by_id
        for name, value in list(state.items()):
            part = parts.get(id(value))
            if part is not None and part.size:
                state[name] = part.slice_of(part.segment)
            elif part is not None or not self._is_main:
                del state[name]
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self._sharded.model.state_dict(keep_vars=True)
        missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
        if missing or unexpected:
            raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")
        parts = self._sharded.by_id
        self._sharded.free()
        with torch.no_grad():
            for name, value in own.items():
                part = parts.get(id(value))
                if list(value.shape) != list(state[name].shape):
                    raise ValueError(f"{name!r} has shape {list(state[name].shape)}")
                if part is not None:
                    part.take(state[name])
                else:
                    value.copy_(state[name])
