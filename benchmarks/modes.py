"""One worker per device or one worker with two devices: speed and memory of the ViT job.

usage: python -m benchmarks.modes [--rounds 5]

Runs take turns, and every ratio compares runs of one round. Devices are CPU devices. Memory is that
of all workers together, at the end of training.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.measure import figures, spread
from benchmarks.turns import in_turn

JOB = ["-m", "benchmarks.contenders", "samestep", "vit"]
MODES = {  # the number of workers of each mode, and its options
    "--mode ddp": (2, ["-n", "2"]),
    "--mode dp": (1, ["-n", "2", "--mode", "dp"]),
    "one device": (1, ["-n", "1", "--lanes", "2"]),
}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.modes", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each mode (default: 5)")
    rounds = parser.parse_args().rounds
    measurements = in_turn({mode: partial(measure, mode) for mode in MODES}, rounds)
    print(f"ViT-Ti/8, global batch 64, AdamW, 2 lanes, {rounds} rounds")
    first = measurements[next(iter(MODES))]
    for mode, runs in measurements.items():
        for figure, unit in (("samples_a_second", "samples/s"), ("memory_megabytes", "MB")):
            ratios = [run[figure] / beside[figure] for run, beside in zip(runs, first, strict=True)]
            print(
                f"  {mode:11} {spread([run[figure] for run in runs])} {unit},",
                f"ratio {spread(ratios)}",
            )


def measure(mode: str) -> dict[str, float]:
    """Run the job once; return its figures, with the memory of all workers."""
    workers, options = MODES[mode]
    means = figures([sys.executable, "-m", "samestep", "run", *options, *JOB])
    return {**means, "memory_megabytes": workers * means["memory_megabytes"]}


if __name__ == "__main__":
    main()
