"""A process of its own, which imports torch, tells of it, and measures: the command itself must be able to say that torch is missing.

`python -m samestep.tools.doctor.probe DIRECTORY [--quick] [--gpus]` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from samestep.errors import SamestepError
from samestep.host import no_garbage_collection


def main() -> None:
    """Tell of torch, and what was measured: seconds by the name of what was done, and how many bytes it was about."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    with no_garbage_collection():  # as whoever forks workers imports it
        import_module("torch")
    measured = [_figure("import of torch", [time.perf_counter() - began])]

    # they import torch, which was to be timed
    from samestep.tools.doctor import disk, torches, workers

    told: dict[str, Any] = {
        **torches.describe(),
        "cuda": torches.cuda_in_child() if options.gpus else None,
    }
    measured += [_figure(*timed) for timed in disk.measure(options.directory, quick=options.quick)]
    try:
        measured += [_figure(*timed) for timed in workers.measure(quick=options.quick)]
    except (SamestepError, OSError) as error:
        told["workers_error"] = str(error).strip().partition("\n")[0]
    # to whoever started it
    print(json.dumps({**told, "measured": measured}), flush=True)
    os._exit(0)  # taking torch apart, as Python does at its end, takes half a second


def _figure(name: str, seconds: list[float], nbytes: int = 0) -> dict[str, Any]:
    return {"name": name, "seconds": seconds, "bytes": nbytes}


if __name__ == "__main__":
    main()
