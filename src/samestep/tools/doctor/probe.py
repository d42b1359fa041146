"""Measurements in a separate process, because importing torch may fail or hang.

`python -m samestep.tools.doctor.probe DIRECTORY [--quick] [--gpus]` prints one line of JSON.
Functions import torch and its dependents, so that the import of torch can be timed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.cluster import GLOO_INTERFACE, LOOPBACK_INTERFACE, find_process
from samestep.config import merge
from samestep.errors import SamestepError
from samestep.host import no_garbage_collection
from samestep.launch.local import preload, start

if TYPE_CHECKING:  # it imports torch
    from samestep.comm.base import World

WORKERS: Final = 2
BACKENDS: Final = ("gloo", "nccl", "mpi", "ucc")
CUDA_SECONDS: Final = 8.0  # for the driver to respond
TIMEOUT_SECONDS: Final = 20.0
LABEL: Final = "measuring"

# bytes exchanged between workers, and how often
LARGE, SMALL, COPIED = 25_000_000, 4_000, 64_000_000
LARGE_TIMES, QUICK_LARGE_TIMES = 15, 4
SMALL_TIMES, QUICK_SMALL_TIMES = 200, 30

# bytes written to disk, and how often
LARGE_FILE: Final = 16 << 20
SMALL_FILE: Final = 4096
SEGMENT_BYTES: Final = 1 << 20
RESERVED_BYTES: Final = 1 << 30  # of the free space, never used
LARGE_FILES, QUICK_LARGE_FILES = 10, 3
SMALL_FILES, QUICK_SMALL_FILES = 50, 10
DISK_SECONDS, QUICK_DISK_SECONDS = 2.0, 0.4  # limit for each measurement, if the disk is slow

Timed = tuple[str, list[float], int]  # a name, seconds of each repetition, and bytes


def main() -> None:
    """Print the properties of torch and all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    with no_garbage_collection():  # as the launcher does
        import_module("torch")
    measured: list[Timed] = [("import of torch", [time.perf_counter() - began], 0)]
    report = {**describe_torch(), "cuda": query_cuda() if options.gpus else None}
    measured += measure_disk(options.directory, quick=options.quick)
    try:
        measured += measure_workers(quick=options.quick)
    except (SamestepError, OSError) as error:
        report["workers_error"] = str(error).strip().partition("\n")[0]
    keys = ("name", "seconds", "bytes")
    report["measured"] = [dict(zip(keys, timed, strict=True)) for timed in measured]
    print(json.dumps(report), flush=True)
    os._exit(0)  # an ordinary exit takes half a second to tear torch down


def describe_torch() -> dict[str, Any]:
    """Return the version and the backends of torch, without using a GPU."""
    import torch

    checks = {name: f"is_{name}_available" for name in BACKENDS if torch.distributed.is_available()}
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "backends": [name for name in checks if getattr(torch.distributed, checks[name], bool)()],
        "threads": torch.get_num_threads(),
    }


def query_cuda() -> dict[str, Any] | None:
    """Return the GPUs that torch sees, or None if the driver does not respond.

    A child process queries them, because a process that has used CUDA cannot fork workers.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_send_cuda, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    report: dict[str, Any] | None = None
    with suppress(EOFError):  # the driver may crash the process
        report = ours.recv() if ours.poll(CUDA_SECONDS) else None
    process.kill()
    process.join()
    return report


def _send_cuda(connection: Connection) -> None:
    import torch

    cuda = torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    devices = [cuda.get_device_properties(index) for index in range(count)]
    has_nccl = count and torch.distributed.is_nccl_available()
    report = {
        "devices": [{"name": each.name, "memory_bytes": each.total_memory} for each in devices],
        "peers": [
            [one == other or cuda.can_device_access_peer(one, other) for other in range(count)]
            for one in range(count)
        ],
        "nccl": ".".join(map(str, cuda.nccl.version())) if has_nccl else None,
    }
    connection.send(report)


def measure_disk(directory: Path, *, quick: bool) -> list[Timed]:
    """Return the time to write and read files as snapshots do; nothing if that is not possible."""
    with suppress(OSError):
        if shutil.disk_usage(directory).free > RESERVED_BYTES:
            with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=directory) as folder:
                return _measure_files(Path(folder), quick=quick)
    return []


def _measure_files(folder: Path, *, quick: bool) -> list[Timed]:
    from samestep.snapshot.files import write_durably

    buffer = mmap.mmap(-1, LARGE_FILE)  # page-aligned, like the memory of snapshots
    buffer.write(os.urandom(LARGE_FILE))  # so that no file system can compress it
    path = folder / "large"
    write = partial(write_durably, path, memoryview(buffer), SEGMENT_BYTES, lambda: None)
    large, small = (QUICK_LARGE_FILES, QUICK_SMALL_FILES) if quick else (LARGE_FILES, SMALL_FILES)
    seconds = QUICK_DISK_SECONDS if quick else DISK_SECONDS
    write_small = partial(_write_small, folder / "small")
    return [
        ("file written and synced", _repeat(write, large, seconds), LARGE_FILE),
        ("file read, not cached", _repeat(partial(_read, path), large, seconds), LARGE_FILE),
        ("small file written and synced", _repeat(write_small, small, seconds), SMALL_FILE),
    ]


def _repeat(action: Callable[[], object], times: int, most_seconds: float) -> list[float]:
    """Return the seconds of each repetition: at least one, and no new one after the limit."""
    begun = time.perf_counter()
    found: list[float] = []
    while len(found) < times and (not found or time.perf_counter() - begun < most_seconds):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return found


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(SEGMENT_BYTES):
            pass


def _write_small(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(bytes(SMALL_FILE))
        os.fsync(file.fileno())


def measure_workers(*, quick: bool) -> list[Timed]:
    """Return the times of two workers to start and communicate. Raises `LaunchError`."""
    began = time.perf_counter()
    if not quick:  # otherwise these workers do not train
        preload()
    imported = [] if quick else [time.perf_counter() - began]
    with tempfile.TemporaryDirectory() as folder:
        body = partial(_work, time.monotonic(), Path(folder), quick=quick)
        options = {"device": "cpu", "max_restarts": 0, "timeout": TIMEOUT_SECONDS}
        found: list[Timed] = start(body, WORKERS, options, preloads=not quick)
    return [("import of further modules for training", imported, 0), *found]


def _work(begun: float, folder: Path, *, quick: bool) -> list[Timed]:
    """Measure in one of the workers; both communicate through shared memory."""
    import torch
    from torch import distributed

    from samestep.comm.connect import connect
    from samestep.tools import make_all_reduce

    world = connect(find_process(os.environ), merge({}, os.environ))
    found: list[Timed] = [("start of two workers", [time.monotonic() - begun], 0)]
    large, small = (QUICK_LARGE_TIMES, QUICK_SMALL_TIMES) if quick else (LARGE_TIMES, SMALL_TIMES)

    def measure(name: str, action: Callable[[], object], nbytes: int) -> None:
        found.append((name, _timed(world, action, small if nbytes == SMALL else large), nbytes))

    measure("memory copied by one worker", _copying(world.rank), COPIED)
    for nbytes in (SMALL, LARGE):
        exchange = make_all_reduce(world, torch.ones(nbytes // 4), LABEL)
        measure("exchange of gradients", exchange, nbytes)
    for nbytes in (SMALL, LARGE):
        sizes = [nbytes // world.size] * world.size
        own = torch.ones(sum(sizes), dtype=torch.uint8)
        send = partial(world.all_to_all, torch.empty_like(own), sizes, own, sizes, LABEL)
        measure("all-to-all", send, nbytes)
    os.environ[GLOO_INTERFACE] = LOOPBACK_INTERFACE  # both workers are on this host
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size
    )
    for nbytes in (SMALL, LARGE):
        reduce = partial(distributed.all_reduce, torch.ones(nbytes // 4))
        measure("all-reduce by gloo", reduce, nbytes)
    distributed.destroy_process_group()
    world.close()
    return found


def _copying(rank: int) -> Callable[[], object]:
    import torch

    if rank > 0:  # rank 0 gets the whole memory bandwidth
        return lambda: None
    source = torch.ones(COPIED, dtype=torch.uint8)
    return partial(torch.empty_like(source).copy_, source)


def _timed(world: World, action: Callable[[], object], times: int) -> list[float]:
    """Return this worker's seconds of each repetition, which all workers begin together."""
    found = []
    for _ in range(times + 1):
        world.barrier(LABEL)
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return found[1:]  # the first one allocates memory


if __name__ == "__main__":
    main()
