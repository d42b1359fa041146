"""How long messages between workers take on this machine: measured through the world that a run would form here."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from samestep.cluster import find_process
from samestep.comm.connect import connect
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import rendezvous
from samestep.config import merge
from samestep.launch import launch
from samestep.run.start import set_up_devices, share_gpus
from samestep.tools.exchanging import exchanging
from samestep.tools.scale.model import MEASURED_WORKERS, Link
from samestep.tools.scale.traffic import ELEMENT_BYTES, MEETINGS, traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from samestep.comm.base import World

ROUNDS: Final = 15
# of which one round's time is a mean: a single one is shorter than what the scheduler does
SMALL_CALLS: Final = 10
LEAST_BYTES: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
DOING: Final = "measuring links"


@dataclass(frozen=True)
class Seconds:
    """How long each round took: a meeting and an exchange of workers on one host, and a small and a large message over the network."""

    meeting: list[float]
    exchange: list[float]
    small: list[float]
    large: list[float]


def measure_links(nbytes: int) -> tuple[Link, Link]:
    """Return the link of two workers through the memory of this machine, and that over its loopback network.

    They exchange `nbytes`, or as many as can be had without much ado, small and large in turns.
    """
    size = min(max(nbytes, LEAST_BYTES), MOST_BYTES)
    return links_of(launch(_measure, size, workers=MEASURED_WORKERS, lanes=MEASURED_WORKERS), size)


def links_of(seconds: Seconds, nbytes: int) -> tuple[Link, Link]:
    """Return the links that explain the medians of what was measured with `nbytes`."""
    meeting, small = median(seconds.meeting), median(seconds.small)
    moved = traffic(MEASURED_WORKERS, MEASURED_WORKERS, MEASURED_WORKERS, nbytes).moved_bytes
    memory = Link(meeting, _rate(moved, median(seconds.exchange) - MEETINGS * meeting))
    return memory, Link(small, _rate(nbytes, median(seconds.large) - small))


def _rate(nbytes: int, seconds: float) -> float:
    # what is lost in the noise of the latency is as good as free
    return nbytes / max(seconds, 1e-9)


def _measure(nbytes: int) -> Seconds:
    place, config = find_process(os.environ), merge({})
    devices = set_up_devices(config, place)
    world = connect(
        place, config, cuda=devices[0].type == "cuda", gpus_are_shared=share_gpus(devices, place)
    )
    network = (
        Distributed(rendezvous(place, config.timeout, share=False), cuda=False)
        if world.shares_memory
        else world
    )
    try:
        return _in_turns(world, network, nbytes, devices[0])
    finally:
        if network is not world:
            network.close()
        world.close()


def _in_turns(world: World, network: World, nbytes: int, device: torch.device) -> Seconds:
    parameter, own, received = (
        torch.zeros(nbytes // ELEMENT_BYTES, device=device) for _ in range(3)
    )
    other = 1 - world.rank

    def sent(elements: int) -> None:
        sizes = [elements * (rank == other) for rank in range(network.size)]
        network.all_to_all(received[:elements], sizes, own[:elements], sizes, DOING)

    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: world.barrier(DOING), SMALL_CALLS),
        (exchanging(world, parameter, DOING), 1),
        (lambda: sent(1), SMALL_CALLS),
        (lambda: sent(len(own)), 1),
    ]
    rounds = [[_seconds(call, times, device) for call, times in calls] for _ in range(ROUNDS + 1)]
    return Seconds(*(list(column) for column in zip(*rounds[1:], strict=True)))


def _seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / times
