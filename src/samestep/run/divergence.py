"""Find workers whose copies of the state are no longer the same bits."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from samestep.comm.base import World
from samestep.errors import DivergenceError
from samestep.snapshot.files import checksum
from samestep.snapshot.manager import Tracked


class DivergenceCheck:
    """Compares checksums of what all workers hold alike: tensors that are tracked, unless they are sharded, and replicated `modules`.

    Checksums are taken every so many steps, between two of them. Their digest travels in the next
    step's note, so that no exchange is made for it unless digests differ. Bytes are compared: a NaN
    is equal to itself, and 0.0 differs from -0.0.
    """

    def __init__(self, every: int | None, world: World, tracked: Tracked) -> None:
        self.modules: list[torch.nn.Module] = []
        self.digest: str | None = None  # of checksums that the others have not seen yet
        self._every, self._world, self._tracked = every, world, tracked
        self._checksums: dict[str, str] = {}
        self._step = 0
        self._equal_step: int | None = None

    def take(self, step: int) -> None:
        """Take the checksums after so many steps, if they are due."""
        if self._every is None or step % self._every or self._world.size == 1:
            return
        states, _ = self._tracked.states()
        others = {
            f"module {number} ({type(module).__name__})": module.state_dict()
            for number, module in enumerate(self.modules)
        }
        self._checksums = checksums({**states, **others})
        self.digest = checksum(repr(self._checksums).encode())
        self._step = step

    def compare(self, digests: Sequence[str | None]) -> None:
        """Compare the digests of all workers, by rank. Raises `DivergenceError` on all of them when one differs."""
        if len(set(digests)) > 1:
            told = self._world.all_gather_json(
                [socket.gethostname(), self._checksums], "comparing checksums"
            )
            raise DivergenceError(
                self._words([host for host, _ in told], [sums for _, sums in told])
            )
        if self.digest is not None:
            self.digest, self._equal_step = None, self._step

    def _words(self, hosts: Sequence[str], everyone: Sequence[Mapping[str, str]]) -> str:
        names = dict.fromkeys(name for sums in everyone for name in sums)
        differing = [name for name in names if len({sums.get(name) for sums in everyone}) > 1]
        which = (
            "is" if len(differing) == 1 else f"is the first of {len(differing)} tensors that are"
        )
        resume = "nothing was compared before since this start: resume from a snapshot that you trust, or start anew"
        if self._equal_step is not None:
            resume = f"after step {self._equal_step} all was equal: resume from a snapshot of that step or before, not of a later one"
        return (
            f"workers differ after step {self._step}: {differing[0]!r} {which} not the same on all of them; "
            f"{_who([sums.get(differing[0]) for sums in everyone], hosts)}; expected the same bits everywhere. Usual causes: code that "
            "changes the model or the optimizer on some workers only (a condition on the rank, random numbers or data of a worker's own), "
            "an optimizer whose step is not deterministic or, where it is always the same host, defective memory. samestep verify finds "
            f"the first step that differs; {resume}"
        )


def checksums(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of the tensors in nested state by their paths; of several at one place in memory, that of the first."""
    found: dict[str, str] = {}
    places = set()
    for path, tensor in _tensors(state):
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in places:
            places.add(place)
            found[path] = _checksum(tensor)
    return found


def _tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, list, tuple)):
        parts: Iterable[tuple[Any, Any]] = (
            state.items() if isinstance(state, dict) else enumerate(state)
        )
        for name, part in parts:
            yield from _tensors(part, f"{path}/{name}" if path else str(name))


def _checksum(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {checksum(values.numpy().data)}"


def _who(sums: Sequence[str | None], hosts: Sequence[str]) -> str:
    """Say which workers differ from most others, by the checksums of one tensor."""
    alike: dict[str | None, list[int]] = {}
    for rank, value in enumerate(sums):
        alike.setdefault(value, []).append(rank)
    most, *others = sorted(alike.values(), key=len, reverse=True)
    if len(most) == len(others[0]):
        return f"there is no majority: {' and '.join(_named(ranks, hosts) for ranks in alike.values())} differ from each other"
    ranks = sorted(rank for some in others for rank in some)
    return f"{_named(ranks, hosts)} differ{'s' * (len(ranks) == 1)} from the majority"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return f"worker {', '.join(f'{rank} ({hosts[rank]})' for rank in ranks)}"
