"""Tracked objects that a resumed script changes again, as by loading a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import SnapshotError
from samestep.plugin import RunPlugin
from samestep.snapshot.manager import Stateful
from samestep.snapshot.state import canonical, flatten
from samestep.step.hashing import hashes_of
from samestep.step.layout import TensorSlice

CHANGED: Final = (
    "{} changed after run.track, which had restored the snapshot of step {}: the run goes on with"
    " that, and not with the snapshot. If the script loads a checkpoint of its own, remove that, as"
    " the snapshot holds all of it; or load it before run.track, or only if run.step == 0"
)


class RestoredCheck(RunPlugin):
    """Looks in a resumed run whether what was restored is the same when the next loop begins.

    Tensors, and the positions of learning-rate schedules, say so. A script may set options, such as
    the learning rates of an optimizer or an entry of a dict, and change what it likes in a loop.
    """

    def __init__(self, step: int, say: Callable[[str], object]) -> None:
        self._step, self._say = step, say
        self._restored: dict[str, tuple[Any, Stateful, _Marks]] = {}

    def keep(self, name: str, item: Any, tracked: Stateful) -> None:
        """Note the state of an object that was restored, which `tracked` returns."""
        with suppress(SnapshotError):  # the next snapshot refuses it
            self._restored[name] = item, tracked, _Marks(item, tracked)

    def begin_loop(self, name: str, planned: Mapping[str, int | None]) -> None:
        """Say what has changed since it was restored."""
        restored, self._restored = self._restored, {}
        changed, has_values = list[str](), False
        for tracked_name, (item, tracked, before) in restored.items():
            now = _Marks(item, tracked)
            has_values |= before.values_differ(now)
            if before.differ(now):
                changed.append(tracked_name)
        if has_values:
            self._say(CHANGED.format(" and ".join(changed), self._step))


class _Marks:
    """What an object's state was: hashes of its tensors by path, and the text of all else."""

    def __init__(self, item: Any, tracked: Stateful) -> None:
        state = tracked.state_dict()
        if isinstance(item, torch.optim.Optimizer):
            state = state["state"]  # options are often set at each start
        plain, tensors = flatten(state)
        self._plain = canonical(plain)
        # on the host, as GPUs hash in another way
        values = [
            (tensor.values if isinstance(tensor, TensorSlice) else tensor).cpu()
            for tensor in tensors.values()
        ]
        self._hashes = dict(zip(tensors, hashes_of(values), strict=True))
        # positions are the only numbers of a schedule that a script has no reason to set
        self._position = item.last_epoch if isinstance(item, LRScheduler) else None

    def values_differ(self, other: _Marks) -> bool:
        """Return whether tensors, or the position of a schedule, are others."""
        return self._position != other._position or any(
            value != other._hashes.get(path, value) for path, value in self._hashes.items()
        )

    def differ(self, other: _Marks) -> bool:
        """Return whether anything is another one."""
        return self._plain != other._plain or self.values_differ(other)
