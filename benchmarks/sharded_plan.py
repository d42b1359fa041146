"""A plan of a step of many workers with a sharded model, from what is measured on this machine.

It knows bytes and messages, which follow from the model, and measures what a worker computes and
copies per second here. It cannot know the network: that is an assumption, which it prints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

PER_HOST: Final = 8  # workers
MEASURED_SECONDS: Final = 0.5
ASSUMED_NETWORK: Final = 12.5e9  # bytes per second and host, in each direction: 100 Gbit/s
ASSUMED_LATENCY: Final = 20e-6  # seconds per message
UNKNOWN: Final = (
    "not known: waiting for the slowest worker of each gather; how links are shared by other hosts"
    " and jobs; what overlaps on GPUs; and whether the network carries this many messages at its"
    " full rate"
)


@dataclass(frozen=True)
class Machine:
    """What a worker does per second, and the network of a host. Bytes, seconds, FLOPs."""

    flops: float
    copied: float
    network: float = ASSUMED_NETWORK
    latency: float = ASSUMED_LATENCY


@dataclass(frozen=True)
class Plan:
    """One lane of each worker. `units` are the bytes of parameters of each unit."""

    units: Sequence[int]
    tokens: int  # of a lane
    workers: int
    lanes: int

    @property
    def parameters(self) -> int:
        """Bytes of all parameters."""
        return sum(self.units)

    @property
    def turns(self) -> int:
        """Lanes that a worker computes or serves in a step."""
        return math.ceil(self.lanes / self.workers)

    @property
    def from_others(self) -> float:
        """The part of all rows that is on other hosts."""
        return max(0, self.workers - PER_HOST) / self.workers

    def memory(self) -> dict[str, float]:
        """Return the bytes of a worker with AdamW."""
        share, largest = self.parameters / self.workers, max(self.units)
        sums = math.floor(math.log2(max(1, self.turns))) + 1
        return {
            "parameters and optimizer": 3 * share,
            f"{sums} sums of lanes": sums * share,
            "two gathered units and the gradients of one": 3 * largest,
            "squares for clipping": self.parameters / 4 / 64 * 8,
        }

    def seconds(self, machine: Machine) -> dict[str, float]:
        """Return the seconds of a lane, one phase after the other.

        A ring carries gathered rows into each host once. Gradients go from each worker to each
        other one, so a host receives those for all of its workers.
        """
        messages = len(self.units) * (self.workers - 1)
        into_host = 2 * self.parameters * self.from_others  # for forward and for backward
        sums = self.parameters * self.from_others * PER_HOST
        return {
            "computing": 6 * self.parameters / 4 * self.tokens / machine.flops,
            "copying in memory": 4 * self.parameters / machine.copied,
            "gathers between hosts": into_host / machine.network,
            "gradients between hosts": sums / machine.network,
            f"{3 * messages} messages": 3 * messages * machine.latency,
        }


def measure(width: int, tokens: int) -> Machine:
    """Return what one thread of this machine does, with matrices of the model's size."""
    values, weight = torch.randn(tokens, width), torch.randn(4 * width, width)
    source, target = torch.zeros(2, 16 << 20, dtype=torch.uint8).unbind()
    products = _per_second(lambda: torch.mm(values, weight.T))
    copies = _per_second(lambda: target.copy_(source))
    return Machine(products * 2 * tokens * width * 4 * width, copies * source.nbytes)


def _per_second(call: Callable[[], object]) -> float:
    call()
    calls, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        call()
        calls += 1
    return calls / seconds


def report(model: nn.Module, blocks: Sequence[nn.Module], tokens: int, workers: int) -> str:
    """Return the plan of a step in which each worker has one lane, and what is assumed."""
    torch.set_num_threads(1)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    machine = measure(next(blocks[0].parameters()).shape[0], tokens)
    plan = Plan([*sizes, rest], tokens, workers, lanes=workers)
    memory, seconds = plan.memory(), plan.seconds(machine)
    known = (
        f"{workers} workers in hosts of {PER_HOST}, {plan.parameters / 4 / 1e6:.1f} M parameters in"
        f" {len(plan.units)} units, one lane of {tokens} tokens each\n"
        f"measured here: {machine.flops / 1e9:.1f} GFLOP/s and {machine.copied / 1e9:.1f} GB/s"
        " copied, per worker of one thread\n"
        f"assumed: {machine.network / 1e9:.1f} GB/s per host, {machine.latency * 1e6:.0f} us per"
        " message"
    )
    rows = [f"| {name} | {nbytes / 2**20:.1f} |" for name, nbytes in memory.items()]
    times = [f"| {name} | {value:.3f} |" for name, value in seconds.items()]
    times.append(f"| all, one after the other | {sum(seconds.values()):.3f} |")
    tables = [
        "\n".join([f"| of a {what} | {unit} |", "|---|---|", *lines])
        for what, unit, lines in (("worker", "MiB", rows), ("lane", "seconds", times))
    ]
    return "\n\n".join([known, *tables, UNKNOWN])
