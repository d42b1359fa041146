"""The network of a run: the traffic of a step, and the latency and bandwidth of links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Final

import torch

from samestep.cluster import find_process
from samestep.comm.base import World
from samestep.comm.connect import connect
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import rendezvous
from samestep.config import merge
from samestep.launch import launch
from samestep.run.process import gpu_names, set_up_devices
from samestep.step.exchange import bucket_limit
from samestep.step.layout import Layout, lanes_of, subtrees
from samestep.tools import make_all_reduce

ELEMENT_BYTES: Final = 4
HOST_BARRIERS: Final = 3  # per step: with the losses, and before and after the gather
LOSS_BYTES: Final = 1024  # from each worker to all others; more with many lanes
MEASURED_WORKERS: Final = 2
ROUNDS: Final = 15
SMALL_CALLS: Final = 10  # per round: one small call is shorter than the scheduler's delays
LEAST_BYTES: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
VISIBLE_TRANSFER: Final = 0.1  # of a large message: smaller shares count as noise
ACTIVITY: Final = "measuring links"


@dataclass(frozen=True)
class LinkModel:
    """A connection with a `latency` in seconds per message and a `bandwidth` in bytes/second.

    `is_bound`: noise hid the transfer, and the bandwidth is the lowest that it may be.
    """

    latency: float
    bandwidth: float
    is_bound: bool = False


@dataclass(frozen=True)
class Network:
    """The link of a worker to its host's `memory`, and the link of a host to others (`between`)."""

    memory: LinkModel
    between: LinkModel
    workers_per_host: int

    def latency_share(self, traffic: Traffic) -> float:
        """Return the share of latency in the time between hosts; 0 without such traffic."""
        latency = self.between.latency * (traffic.rounds + traffic.messages)
        transfer = (traffic.sent_bytes + traffic.forwarded_bytes) / self.between.bandwidth
        return latency / (latency + transfer) if latency else 0.0


@dataclass(frozen=True)
class Traffic:
    """The traffic of a step, for the worker or host with the most of it.

    Between hosts: `rounds` are sequential, since each forwards what the one before received;
    `messages` leave for all partners at the same time, in `batches`. A host sends `sent_bytes` to
    its partners, and `forwarded_bytes` in rounds. Within a host: its workers send `host_messages`,
    and each reads or writes `moved_bytes` in memory.
    """

    rounds: int = 0
    messages: int = 0
    batches: int = 0
    sent_bytes: int = 0
    forwarded_bytes: int = 0
    host_messages: int = 0
    moved_bytes: int = 0


@cache
def count_traffic(
    workers: int, per_host: int, lanes: int, nbytes: int, gradient_bytes: int = ELEMENT_BYTES
) -> Traffic:
    """Return the traffic of `samestep.step.exchange` with `nbytes` of parameters in equal tensors.

    Parameters are float32, and `gradient_bytes` is the size of an element of the gradients that are
    exchanged. Workers of a host share memory. All hosts count as full.
    """
    if workers == 1:
        return Traffic()
    on_host = min(workers, per_host)
    hosts = -(-workers // on_host)
    elements = Layout((nbytes // ELEMENT_BYTES,), workers).slice_size
    slice_bytes = gradient_bytes * elements
    own_sums, host_sums, all_sums = _count_sums(workers, on_host, lanes)
    add_bytes = 3 * (all_sums - 1) * slice_bytes  # two are read and one is written
    moved = 2 * own_sums * slice_bytes * workers + add_bytes + 2 * (workers - 1) * slice_bytes
    if hosts == 1:
        return Traffic(host_messages=HOST_BARRIERS * (workers - 1), moved_bytes=moved)
    partners = hosts - 1
    exchanged = nbytes * gradient_bytes // ELEMENT_BYTES
    limit = bucket_limit(exchanged)
    buckets = -(-(exchanged + limit // 2) // limit)  # the first one takes half
    if hosts == 2 and host_sums == 1:  # hosts swap all that their workers hold
        batches, sent = buckets, hosts * slice_bytes
    else:  # sums go to the owners of slices, and from there to their partners
        batches, sent = 2 * buckets, partners * slice_bytes * (host_sums + 1)
    return Traffic(
        # losses: in each round, a host doubles the number of hosts whose losses it has
        rounds=partners.bit_length(),
        messages=batches * partners,
        batches=batches,
        sent_bytes=on_host * sent,
        forwarded_bytes=partners * on_host * LOSS_BYTES,
        # losses need two barriers: before and after the first worker fetches those of other hosts
        host_messages=(HOST_BARRIERS + 1) * (on_host - 1),
        moved_bytes=moved,
    )


def _count_sums(workers: int, on_host: int, lanes: int) -> tuple[int, int, int]:
    """Return the most sums of gradients of any worker and of any host, and those of all workers."""
    own = [len(subtrees(lanes_of(rank, workers, lanes), lanes)) for rank in range(workers)]
    of_host = []
    for first in range(0, workers, on_host):
        last = min(first + on_host, workers) - 1
        start, stop = lanes_of(first, workers, lanes).start, lanes_of(last, workers, lanes).stop
        of_host.append(len(subtrees(range(start, stop), lanes)))
    return max(own), max(of_host), sum(own)


def measure_links(nbytes: int) -> tuple[LinkModel, LinkModel]:
    """Return the links of two workers through this machine's memory and its loopback network.

    Small and large messages alternate; large ones have `nbytes`, within practical limits.
    """
    nbytes = min(max(nbytes, LEAST_BYTES), MOST_BYTES)
    rounds = launch(_measure, nbytes, workers=MEASURED_WORKERS, lanes=MEASURED_WORKERS)
    return fit_links(rounds, nbytes)


def fit_links(rounds: Sequence[Sequence[float]], nbytes: int) -> tuple[LinkModel, LinkModel]:
    """Return the memory and network links that explain the medians over rounds with `nbytes`.

    A round has the seconds of a barrier, an exchange, a small message and a large message. If noise
    hides a transfer, the link has the bandwidth as if the latency were zero.
    """
    barrier, exchange, small, large = map(median, zip(*rounds, strict=True))
    moved = count_traffic(MEASURED_WORKERS, MEASURED_WORKERS, MEASURED_WORKERS, nbytes).moved_bytes
    return (
        _fit_link(barrier, exchange, exchange - HOST_BARRIERS * barrier, moved),
        _fit_link(small, large, large - small, nbytes),
    )


def _fit_link(latency: float, total: float, transfer: float, nbytes: int) -> LinkModel:
    """Return the link that sends `nbytes` in the `transfer` seconds of a message's `total`."""
    if transfer < VISIBLE_TRANSFER * total:
        return LinkModel(latency, nbytes / total, is_bound=True)
    return LinkModel(latency, nbytes / transfer)


def _measure(nbytes: int) -> list[list[float]]:
    place, config = find_process(os.environ), merge({})
    devices = set_up_devices(config, place)
    network = world = connect(place, config, gpus=gpu_names(devices))
    if world.shares_memory:
        network = Distributed(rendezvous(place, config.timeout, share=False), cuda=False)
    try:
        return _time_calls(world, network, nbytes, devices[0])
    finally:
        if network is not world:
            network.close()
        world.close()


def _time_calls(
    world: World, network: World, nbytes: int, device: torch.device
) -> list[list[float]]:
    elements = nbytes // ELEMENT_BYTES
    parameter, own, received = (torch.zeros(elements, device=device) for _ in range(3))

    def send(count: int) -> None:
        sizes = [count * (rank != world.rank) for rank in range(network.size)]
        network.all_to_all(received[:count], sizes, own[:count], sizes, ACTIVITY)

    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: world.barrier(ACTIVITY), SMALL_CALLS),
        (make_all_reduce(world, parameter, ACTIVITY), 1),
        (lambda: send(1), SMALL_CALLS),
        (lambda: send(elements), 1),
    ]
    rounds = [[_seconds(call, count, device) for call, count in calls] for _ in range(ROUNDS + 1)]
    return rounds[1:]  # the first one allocates memory


def _seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / count
