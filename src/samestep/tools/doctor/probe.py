"""Measurements in a separate process, because importing torch may fail or hang.

`python -m samestep.tools.doctor.probe DIRECTORY [--quick] [--gpus]` prints one line of JSON.
Functions import torch and its dependents, so that the import of torch can be timed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from samestep.cluster import find_process
from samestep.config import merge
from samestep.errors import SamestepError
from samestep.host import no_garbage_collection
from samestep.launch.local import count_gpus, start

WORKERS: Final = 2
TIMEOUT_SECONDS: Final = 20.0
FILE_BYTES: Final = 16 << 20
SEGMENT_BYTES: Final = 1 << 20
RESERVED_BYTES: Final = 1 << 30  # of the free space, never used
TIMES: Final = 10
DISK_SECONDS: Final = 2.0  # no file is begun later, if the disk is slow


def main() -> None:
    """Print the properties of torch and all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    report = describe_torch()
    if not options.quick:
        report["write_bytes_per_second"] = measure_disk(options.directory)
        try:
            connect_workers()
        except (SamestepError, OSError) as error:
            report["workers_error"] = str(error).strip().partition("\n")[0]
    report["gpus"] = count_gpus() if options.gpus else None
    print(json.dumps(report), flush=True)
    os._exit(0)  # an ordinary exit takes half a second to tear torch down


def describe_torch() -> dict[str, Any]:
    """Import torch and return how long that takes, its version and the CUDA it is built for."""
    began = time.perf_counter()
    with no_garbage_collection():  # as the launcher does
        torch = import_module("torch")
    seconds = time.perf_counter() - began
    build = torch.version.cuda
    return {"import_seconds": seconds, "version": torch.__version__, "cuda_build": build}


def measure_disk(directory: Path) -> float | None:
    """Return the median speed of files written as snapshots are, None if that is not possible."""
    from samestep.snapshot.files import write_durably

    seconds: list[float] = []
    with suppress(OSError):
        if shutil.disk_usage(directory).free < RESERVED_BYTES:
            return None
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=directory) as folder:
            buffer = mmap.mmap(-1, FILE_BYTES)  # page-aligned, like the memory of snapshots
            buffer.write(os.urandom(FILE_BYTES))  # so that no file system can compress it
            while len(seconds) < TIMES and sum(seconds) < DISK_SECONDS:
                began = time.perf_counter()
                data = memoryview(buffer)
                write_durably(Path(folder) / "file", data, SEGMENT_BYTES, lambda: None)
                seconds.append(time.perf_counter() - began)
    return FILE_BYTES / statistics.median(seconds) if seconds else None


def connect_workers() -> None:
    """Let two workers exchange tensors through shared memory. Raises `LaunchError`."""
    options = {"device": "cpu", "max_restarts": 0, "timeout": TIMEOUT_SECONDS}
    start(_all_to_all, WORKERS, options, preloads=False)  # these workers do not train


def _all_to_all() -> None:
    import torch

    from samestep.comm.connect import connect

    world = connect(find_process(os.environ), merge({}, os.environ))
    sent, sizes = torch.ones(WORKERS), [1] * WORKERS  # one element for each worker
    world.all_to_all(torch.empty_like(sent), sizes, sent, sizes, "connecting")
    world.close()


if __name__ == "__main__":
    main()
