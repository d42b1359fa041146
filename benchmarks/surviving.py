"""Cost of fault tolerance without faults: in-memory copies, checksums, worker status.

usage: python -m benchmarks.surviving [--rounds 5] [--workers 2]

The state is the 1.0 GB of benchmarks.snapshots. A job makes a copy or a comparison after each step,
or neither. Jobs take turns, and a cost is the difference between two jobs' median steps of one
round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import timeit
from itertools import pairwise

import torch
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks.measure import figures, spread
from benchmarks.snapshot_jobs import BATCH_SIZE, WIDTH, loss_fn, mlp
from benchmarks.turns import in_turn
from samestep.comm.status import WorkerStatus

WARMUP_STEPS, STEPS = 3, 8
# hot_every, check_every
JOBS = {"neither": ("none", "none"), "hot copy": ("1", "none"), "checksums": ("none", "1")}
CALLS = 100_000


def train() -> None:
    """Train with the options of the environment; print the median time of a step."""
    data = TensorDataset(torch.randn(BATCH_SIZE, WIDTH), torch.randint(WIDTH, (BATCH_SIZE,)))
    model, optimizer = mlp()
    with ss.init() as run:
        run.replicate(model)
        run.track(model=model, optimizer=optimizer)
        starts = []
        for batch in run.batches(data, BATCH_SIZE, steps=WARMUP_STEPS + STEPS):
            starts.append(time.perf_counter())
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        steps = [later - earlier for earlier, later in pairwise(starts)]
        print(f"step_ms={1000 * statistics.median(steps[WARMUP_STEPS:]):.3f}", flush=True)


def measure(workers: int, rounds: int) -> None:
    """Run the jobs in turn; print the cost of each."""

    def job(hot_every: str, check_every: str) -> float:
        flags = ["-n", str(workers), "--hot-every", hot_every, "--check-every", check_every]
        return figures(
            [sys.executable, "-m", "samestep", "run", *flags, "-m", "benchmarks.surviving", "--job"]
        )["step_ms"]

    measurements = in_turn(
        {name: lambda options=options: job(*options) for name, options in JOBS.items()}, rounds
    )
    print(f"1.0 GB of state, {workers} workers, {rounds} rounds")
    print(f"  one step {spread(measurements['neither'])} ms")
    for name in list(JOBS)[1:]:
        more = [
            step - without
            for step, without in zip(measurements[name], measurements["neither"], strict=True)
        ]
        print(f"  {name:10} {spread(more)} ms more")


def measure_status(rounds: int) -> None:
    """Print the cost of reporting a worker's status."""
    status = WorkerStatus()

    def wait() -> None:
        with status.waiting("measuring"):
            pass

    for name, call in (
        ("a change", lambda: status.set_activity("measuring")),
        ("around a wait", wait),
    ):
        seconds = timeit.repeat(call, repeat=rounds, number=CALLS)
        print(f"status, {name}: {spread([1e6 * each / CALLS for each in seconds])} microseconds")


def main() -> None:
    """Run one job, or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each job (default: 2)")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        torch.set_num_threads(1)
        train()
    else:
        measure_status(options.rounds)
        measure(options.workers, options.rounds)


if __name__ == "__main__":
    main()
