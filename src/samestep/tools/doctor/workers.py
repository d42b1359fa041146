"""How fast two workers of this host start, and talk: through samestep's world, and by gloo's all-reduce beside it."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from samestep.cluster import find_process
from samestep.cluster.interfaces import GLOO_INTERFACE, LOOPBACK_INTERFACE
from samestep.comm.base import World
from samestep.comm.connect import connect
from samestep.config import merge
from samestep.launch.local import NEEDED, preload, start
from samestep.tools.exchanging import exchanging

if TYPE_CHECKING:
    from collections.abc import Callable

    Timed = tuple[str, list[float], int]

WORKERS: Final = 2
LARGE, SMALL = 25_000_000, 4_000  # bytes
LARGE_TIMES, QUICK_LARGE_TIMES = 15, 4
SMALL_TIMES, QUICK_SMALL_TIMES = 200, 30
COPIED_BYTES: Final = 64_000_000
TIMEOUT_SECONDS: Final = 20.0
MEASURING: Final = "measuring"


def measure(*, quick: bool) -> list[Timed]:
    """Return seconds by what two workers did, and of how many bytes. Raises `LaunchError` where they cannot start or talk."""
    needed = () if quick else NEEDED  # these two do not train
    began = time.perf_counter()
    preload(needed)
    imported = [] if quick else [time.perf_counter() - began]
    with TemporaryDirectory() as folder:
        body = partial(_work, time.monotonic(), Path(folder), quick=quick)
        found: list[Timed] = start(
            body,
            WORKERS,
            {"device": "cpu", "max_restarts": 0, "timeout": TIMEOUT_SECONDS},
            needed=needed,
        )
    return [("import of what training needs besides", imported, 0), *found]


def _work(begun: float, folder: Path, *, quick: bool) -> list[Timed]:
    """Be one of the workers. Those of one host talk through memory."""
    world = connect(find_process(os.environ), merge({}, os.environ), cuda=False)
    formed = time.monotonic() - begun
    times, many = (QUICK_LARGE_TIMES, QUICK_SMALL_TIMES) if quick else (LARGE_TIMES, SMALL_TIMES)
    found: list[Timed] = [("start of two workers, from fork to world", [formed], 0)]
    found += [
        ("memory copied by one worker", _timed(world, _copying(world.rank), times), COPIED_BYTES)
    ]
    found += [
        (
            "exchange of gradients",
            _timed(world, exchanging(world, torch.ones(size // 4), MEASURING), count),
            size,
        )
        for size, count in ((SMALL, many), (LARGE, times))
    ]
    found += [
        ("all-to-all", _timed(world, _all_to_all(world, size), count), size)
        for size, count in ((SMALL, many), (LARGE, times))
    ]
    os.environ[GLOO_INTERFACE] = LOOPBACK_INTERFACE  # both are here
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size
    )
    found += [
        ("all-reduce by gloo", _timed(world, _reducing(size), count), size)
        for size, count in ((SMALL, many), (LARGE, times))
    ]
    distributed.destroy_process_group()
    world.close()
    return found


def _timed(world: World, action: Callable[[], Any], times: int) -> list[float]:
    """Return this worker's seconds of each time; all begin together, once everything that is made once has been made."""
    found = []
    for _ in range(times + 1):
        world.barrier(MEASURING)
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return found[1:]


def _copying(rank: int) -> Callable[[], Any]:
    if rank > 0:  # it waits, so that one has the memory to itself
        return lambda: None
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    return partial(torch.empty_like(source).copy_, source)


def _all_to_all(world: World, nbytes: int) -> Callable[[], Any]:
    sizes = [nbytes // world.size] * world.size
    own = torch.ones(sum(sizes), dtype=torch.uint8)
    return partial(world.all_to_all, torch.empty_like(own), sizes, own, sizes, MEASURING)


def _reducing(nbytes: int) -> Callable[[], Any]:
    return partial(distributed.all_reduce, torch.ones(nbytes // 4))
