"""Cost of a step as workers, parameters and samples grow, compared to the best peer.

usage: python -m benchmarks.growth [workers] [parameters] [samples] [--rounds 3]

Contenders take turns, and every ratio compares runs of one round. The pure step is forward,
backward and update of one worker's samples in one process that loads nothing. If there are more
workers than cores, it counts once per worker of a core.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.measure import figures
from benchmarks.turns import Row, figure, in_turn, samestep, table, torchrun

STEPS, SAMPLES = "benchmarks.growth_steps", "benchmarks.growth_samples"
FEW_PARAMETERS = 100_000
PARAMETERS = (100_000, 1_000_000, 25_000_000, 100_000_000)
WORKERS = (1, 2, 4, 8)
SIZES = (10**3, 10**5, 10**7, 10**9)
MOST_LISTED = 10**8

PURE = "pure step"
PEERS = {"DDP": "ddp", "DDP, ZeroRedundancyOptimizer": "zero"}
Runs = dict[str, list[dict[str, float]]]


def steps(workers: int, parameters: int, peers: Sequence[str], rounds: int) -> Runs:
    """Return the figures of steps with samestep, with peers, and of the pure step."""
    commands = {
        "samestep": samestep(workers, STEPS, "samestep", str(parameters)),
        **{peer: torchrun(workers, STEPS, PEERS[peer], str(parameters)) for peer in peers},
        PURE: [sys.executable, "-m", STEPS, "pure", str(parameters)],
    }
    return in_turn({name: partial(figures, command) for name, command in commands.items()}, rounds)


def grow_workers(rounds: int) -> None:
    """Print the time of a small network's step by the number of workers."""
    measurements = {workers: steps(workers, FEW_PARAMETERS, ["DDP"], rounds) for workers in WORKERS}
    milliseconds = {
        f"{workers}": figure("step_milliseconds", runs) for workers, runs in measurements.items()
    }
    over = {f"{workers}": beyond(runs, workers) for workers, runs in measurements.items()}
    print(table("workers: ms per step", milliseconds, no_peers=[PURE]), end="\n\n")
    print(table("workers: ms beyond the pure step", over, no_peers=["DDP"]))


def grow_parameters(rounds: int) -> None:
    """Print the time of a step and a worker's memory by the size of the network."""
    measurements = {f"{size:,}": steps(2, size, list(PEERS), rounds) for size in PARAMETERS}
    for title, name in (("ms a step", "step_milliseconds"), ("MB a worker", "memory_megabytes")):
        print(
            table(
                f"parameters: {title}",
                {size: figure(name, runs) for size, runs in measurements.items()},
                no_peers=[PURE],
            ),
            end="\n\n",
        )
    print(
        table(
            "parameters: ms beyond the pure step",
            {size: beyond(runs, 2) for size, runs in measurements.items()},
            no_peers=list(PEERS),
        )
    )


def beyond(runs: Runs, workers: int) -> Row:
    """Return the milliseconds of a step beyond the pure step.

    They are negative if dividing the update among workers saves more.
    """
    turns = max(1.0, workers / (os.cpu_count() or 1))
    milliseconds = figure("step_milliseconds", runs)
    pure = milliseconds.pop(PURE)
    return {
        name: [step - turns * floor for step, floor in zip(values, pure, strict=True)]
        for name, values in milliseconds.items()
    }


def grow_samples(rounds: int) -> None:
    """Print the cost of batches in random order by the size of the data set."""
    measurements = {}
    for size in SIZES:
        ways = {"samestep": "samestep", "DistributedSampler": "sampler"}
        if size > MOST_LISTED:
            del ways["DistributedSampler"]
            print(
                f"DistributedSampler is not run with {size:,} samples: "
                f"its list takes 40 bytes per sample, {40 * size / 1e9:.0f} GB"
            )
        commands = {
            name: [sys.executable, "-m", SAMPLES, way, str(size)] for name, way in ways.items()
        }
        measurements[f"{size:,}"] = in_turn(
            {name: partial(figures, command) for name, command in commands.items()}, rounds
        )
    for title, name in (
        ("ms until the first batch", "first_milliseconds"),
        ("us a batch of 256", "batch_microseconds"),
        ("MB of the process", "memory_megabytes"),
    ):
        print(
            table(
                f"samples: {title}",
                {size: figure(name, runs) for size, runs in measurements.items()},
            ),
            end="\n\n",
        )


def main() -> None:
    """Run the requested comparisons."""
    everything = {"workers": grow_workers, "parameters": grow_parameters, "samples": grow_samples}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "what",
        nargs="*",
        metavar="what",
        help="what grows: workers, parameters, samples (default: each in turn)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - everything.keys():
        parser.error(
            f"{', '.join(sorted(unknown))} was given; expected some of {', '.join(everything)}"
        )
    for name in arguments.what or everything:
        everything[name](arguments.rounds)
        print(flush=True)


if __name__ == "__main__":
    main()
