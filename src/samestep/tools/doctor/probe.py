"""Measurements in a separate process, because importing torch may fail or hang.

`python -m samestep.tools.doctor.probe [--quick] [--gpus]` prints one line of JSON.
Functions import torch and its dependents, so that the import of torch can be timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import import_module
from typing import Any, Final

from samestep.cluster import find_process
from samestep.config import merge
from samestep.errors import SamestepError
from samestep.host import no_garbage_collection
from samestep.launch.local import count_gpus, start

WORKERS: Final = 2
TIMEOUT_SECONDS: Final = 20.0


def main() -> None:
    """Print the properties of torch and all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    report = describe_torch()
    if not options.quick:
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


def connect_workers() -> None:
    """Let two workers exchange tensors through shared memory. Raises `LaunchError`."""
    options = {"device": "cpu", "max_restarts": 0, "timeout": TIMEOUT_SECONDS}
    start(_all_to_all, WORKERS, options)


def _all_to_all() -> None:
    import torch

    from samestep.comm.connect import connect

    world = connect(find_process(os.environ), merge({}, os.environ))
    sent, sizes = torch.ones(WORKERS), [1] * WORKERS  # one element for each worker
    world.all_to_all(torch.empty_like(sent), sizes, sent, sizes, "connecting")
    world.close()


if __name__ == "__main__":
    main()
