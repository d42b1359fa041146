"""samestep and its peers: four jobs, trained by every contender with two one-thread workers.

usage: python -m benchmarks.table [--rounds 3] [--jobs JOB] [--contenders NAME] [--picture FILE]

Contenders take turns, and each round starts with another one. Every ratio compares runs of one
round, and medians come with their range. At the end `samestep verify` compares one and two workers
on the same jobs; the exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.contenders import CONTENDERS, command
from benchmarks.jobs import JOBS
from benchmarks.measure import figures
from benchmarks.turns import in_turn
from benchmarks.verdict import REFERENCE, Results, describe, tables

OURS = "samestep"
VERIFIED_STEPS = 3


def main() -> int:
    """Measure, print, draw and verify; return the exit status."""
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [name for name in CONTENDERS if name in {REFERENCE, *options.contenders}]
    results: Results = {}
    for job in options.jobs:
        runs = {name: partial(figures, command(name, job)) for name in names}
        results[job] = in_turn(runs, options.rounds)
        print(describe(job, results[job]), end="\n\n", flush=True)
    print(tables(results), end="\n\n")
    if options.picture is not None:
        from benchmarks.picture import draw

        draw(results, options.picture)
    return max([verify(job) for job in options.jobs if OURS in names], default=0)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each contender on each job (default: 3)"
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="default: all")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=[name for name, contender in CONTENDERS.items() if contender.role != "bound"],
        default=[
            name
            for name, contender in CONTENDERS.items()
            if contender.role not in {"16-bit", "bound"}
        ],
        help="in addition to the plain loop (default: all that exchange at full precision)",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw the table, as .svg, .png or .pdf"
    )
    return parser.parse_args()


def verify(job: str) -> int:
    """Compare one and two workers on a job bit for bit; return the exit status."""
    what = [
        "verify",
        "-n",
        "1,2",
        "--steps",
        str(VERIFIED_STEPS),
        "--",
        "-m",
        "benchmarks.contenders",
        OURS,
        job,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *what], capture_output=True, text=True, check=False
    )
    same = (
        "the same bits at 1 and 2 workers"
        if done.returncode == 0
        else f"FAILED\n{done.stdout}{done.stderr}"
    )
    print(f"verify {job}, {VERIFIED_STEPS} steps: {same}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
