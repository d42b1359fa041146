"""Time from the command to the end of the first step on 2 workers, compared to torchrun.

usage: python -m benchmarks.start [--rounds 5]

Contenders take turns, and every ratio compares runs of one round. Accelerate is started by torchrun
as well, because its own launcher starts several workers without GPUs only through MPI.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.measure import printed
from benchmarks.turns import figure, in_turn, samestep, table, torchrun

ONE_PROCESS = "one process, no launcher"
COMMANDS = {
    "samestep run": samestep(2, "benchmarks.start.with_samestep"),
    "torchrun, DDP": torchrun(2, "benchmarks.start.with_ddp"),
    "torchrun, Accelerate": torchrun(2, "benchmarks.start.with_accelerate"),
    ONE_PROCESS: [sys.executable, "-m", "benchmarks.start.with_plain"],
}


def first_step(command: Sequence[str]) -> dict[str, float]:
    """Return the seconds from the start of a command to the end of the last worker's first step."""
    started = time.monotonic()
    moments = printed(command)["first_step_at"]
    if not moments:
        raise SystemExit(f"{' '.join(command)} made no step; run it to see why")
    return {"seconds": max(moments) - started}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender (default: 5)")
    rounds = parser.parse_args().rounds
    measurements = in_turn(
        {name: partial(first_step, command) for name, command in COMMANDS.items()}, rounds
    )
    print(
        table(
            "seconds",
            {"start to first step, 2 workers": figure("seconds", measurements)},
            no_peers=[ONE_PROCESS],
        )
    )


if __name__ == "__main__":
    main()
