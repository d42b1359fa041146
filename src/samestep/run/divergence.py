"""Detection of workers whose copies of the state no longer have the same bits."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from samestep.comm.base import World
from samestep.errors import DivergenceError
from samestep.snapshot.files import checksum
from samestep.snapshot.manager import Tracked


class DivergenceCheck:
    """Compares checksums of tracked tensors that are not sharded, and of replicated `modules`.

    Checksums are computed between two steps, once every `every` steps. Their digest is sent in the
    next step's note, so no exchange is needed unless digests differ. Bytes are compared: a NaN is
    equal to itself, and 0.0 differs from -0.0.
    """

    def __init__(self, every: int | None, world: World, tracked: Tracked) -> None:
        self.modules: list[torch.nn.Module] = []
        self.digest: str | None = None  # of checksums that are not compared yet
        self._every, self._world, self._tracked = every, world, tracked
        self._checksums: dict[str, str] = {}
        self._step = 0
        self._equal_step: int | None = None

    def compute(self, step: int) -> None:
        """Compute the checksums after this step, if they are due."""
        if self._every is None or step % self._every or self._world.size == 1:
            return
        states, _ = self._tracked.states()
        for number, module in enumerate(self.modules):
            states[f"module {number} ({type(module).__name__})"] = module.state_dict()
        self._checksums = checksums(states)
        self.digest = checksum(repr(self._checksums).encode())
        self._step = step

    def compare(self, digests: Sequence[str | None]) -> None:
        """Compare the digests of all workers, by rank. Raises `DivergenceError` on all of them."""
        if len(set(digests)) > 1:
            own = [socket.gethostname(), self._checksums]
            gathered = self._world.all_gather_json(own, "comparing checksums")
            hosts, everyone = zip(*gathered, strict=True)
            raise DivergenceError(self._message(hosts, everyone))
        if self.digest is not None:
            self.digest, self._equal_step = None, self._step

    def _message(self, hosts: Sequence[str], everyone: Sequence[Mapping[str, str]]) -> str:
        names = dict.fromkeys(name for sums in everyone for name in sums)
        differing = [name for name in names if len({sums.get(name) for sums in everyone}) > 1]
        first = differing[0]
        which = f" (the first of {len(differing)} tensors that differ)" if differing[1:] else ""
        if self._equal_step is None:
            resume = (
                "nothing was compared earlier in this attempt: "
                "resume from a snapshot that you trust, or start over"
            )
        else:
            resume = (
                f"all workers were equal after step {self._equal_step}: "
                "resume from a snapshot of that step or an earlier one"
            )
        return (
            f"workers differ after step {self._step} in {first!r}{which}: "
            f"{_describe([sums.get(first) for sums in everyone], hosts)}; "
            "expected the same bits on all workers. Likely causes: code that changes the model or "
            "the optimizer on some workers only (a condition on the rank, or random numbers or "
            "data that differ between workers), an optimizer whose step is not deterministic, or, "
            "if it is always the same host, faulty memory. samestep verify finds the first step "
            f"that differs; {resume}"
        )


def checksums(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of the tensors in a nested state, by path; skip aliases."""
    found: dict[str, str] = {}
    seen = set()
    for path, tensor in _tensors(state):
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in seen:
            seen.add(memory)
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found[path] = f"{tensor.dtype} {tuple(tensor.shape)} {checksum(values.numpy().data)}"
    return found


def _tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, list, tuple)):
        for name, part in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors(part, f"{path}/{name}" if path else str(name))


def _describe(sums: Sequence[str | None], hosts: Sequence[str]) -> str:
    """Describe which workers differ from the majority in the checksum of one tensor."""
    ranks_by_sum: dict[str | None, list[int]] = {}
    for rank, value in enumerate(sums):
        ranks_by_sum.setdefault(value, []).append(rank)

    def named(ranks: Sequence[int]) -> str:
        return f"worker {', '.join(f'{rank} ({hosts[rank]})' for rank in ranks)}"

    most, *others = sorted(ranks_by_sum.values(), key=len, reverse=True)
    if len(most) == len(others[0]):
        groups = " and ".join(map(named, ranks_by_sum.values()))
        return f"there is no majority: {groups} differ from each other"
    ranks = sorted(rank for group in others for rank in group)
    return f"{named(ranks)} differ{'s' * (len(ranks) == 1)} from the majority"
