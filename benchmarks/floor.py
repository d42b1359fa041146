"""Time of each job's step, compared to its floor: what two workers must compute and move.

usage: python -m benchmarks.floor [--rounds 5] [--jobs vit mlp …]

Two processes of one thread each run only the parts of a step at the same time, with torch's own
operations: forward and backward of half a batch; then, for P bytes of parameters, copy the
gradients to shared memory (2 P of memory traffic), add half of both workers' (1.5 P), run fused
AdamW on that half (3.5 P), and copy the other half of the parameters (P).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

import samestep as ss
from benchmarks.contenders import command
from benchmarks.jobs import JOBS
from benchmarks.measure import figures, spread
from benchmarks.turns import in_turn

WORKERS = 2
REPEATS = 30
TRAFFIC = 2 + 1.5 + 3.5 + 1  # bytes moved for each byte of parameters


def main() -> None:
    """Measure the floor and the step of each job in turn, and print both."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="default: all")
    options = parser.parse_args()
    print(
        "| job | parameters MB | moved MB | computing ms | moving ms | floor ms | step ms "
        "| step / floor |"
    )
    print("|" + "---|" * 8)
    for job in options.jobs:
        measurements: dict[str, list[Any]] = in_turn(
            {
                "floor": lambda job=job: ss.launch(floor, job, workers=WORKERS),
                "step": lambda job=job: step_seconds(job),
            },  # type: ignore[misc]
            options.rounds,
        )
        floors = [computing + moving for computing, moving in measurements["floor"]]
        ratios = [step / least for step, least in zip(measurements["step"], floors, strict=True)]
        megabytes = (
            sum(parameter.nbytes for parameter in JOBS[job].build().model.parameters()) / 1e6
        )
        columns = [*zip(*measurements["floor"], strict=True), floors, measurements["step"]]
        middles = " | ".join(f"{1000 * statistics.median(column):.1f}" for column in columns)
        print(
            f"| {JOBS[job].title} | {megabytes:.1f} | {TRAFFIC * megabytes:.0f} | {middles} "
            f"| {spread(ratios).strip()} |",
            flush=True,
        )


def step_seconds(job: str) -> float:
    """Return the seconds of a step of the job with samestep on two workers."""
    return JOBS[job].batch_size / figures(command("samestep", job))["samples_a_second"]


def floor(job: str) -> tuple[float, float]:
    """Return the seconds that a worker computes and moves, while the other one does the same."""
    with ss.init() as run:
        model, dataset, loss_fn = JOBS[job].build()
        parameters = list(model.parameters())
        batch = default_collate(
            [dataset[index] for index in range(JOBS[job].batch_size // WORKERS)]
        )
        computing = median_seconds(lambda: torch.autograd.grad(loss_fn(model, batch), parameters))
        moving = median_seconds(moves(sum(parameter.numel() for parameter in parameters)))
        seconds = run.reduce_dict({"computing": computing, "moving": moving})
        return seconds["computing"], seconds["moving"]


def moves(size: int) -> Callable[[], None]:
    """Return a function that moves all data of a step with `size` float32 parameters."""
    gradients, seen, half = torch.ones(size), torch.zeros(size), -(-size // WORKERS)
    other, values = torch.ones(half), torch.nn.Parameter(torch.ones(half))
    values.grad = seen[:half]
    optimizer = torch.optim.AdamW([values], fused=True)

    def move() -> None:
        seen.copy_(gradients)
        torch.add(seen[:half], other, out=seen[:half])
        optimizer.step()
        other.copy_(values.detach())

    return move


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of a function, after a few warm-up runs."""
    seconds = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


if __name__ == "__main__":
    main()
