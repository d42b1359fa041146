"""What the checks for silent errors cost, as a share of a step of the four benchmark jobs.

usage: python -m benchmarks.checks [--steps 60]

Two workers train each job once with a sharded and once with a replicated optimizer. The functions
that check are timed while they train, so the shares need no comparison of noisy runs:

- gradients: whether `run.backward` made every gradient of the step
- workers: whether their models are equal, a hash of all state every `check_every` steps
- data: whether their samples are equal, one compared sample for each 300 others
- losses: whether a loss is unusual

Times of a function include its waits for the other worker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final

import torch

import samestep as ss
from benchmarks.jobs import JOBS
from benchmarks.jobs.job import LEARNING_RATE, Job
from benchmarks.measure import printed
from benchmarks.turns import samestep
from samestep.config import Config
from samestep.data.agreement import SHARE, DataCheck, digest
from samestep.plugins.divergence import DivergenceCheck
from samestep.run.alerts import LossAlerts
from samestep.step.guards import Contents, GradientSeal, ManualGradients, OptimizerGuard

WORKERS: Final = 2
EVERY: Final = Config.check_every or 0  # steps between two comparisons of the workers
EVERY_STEP: Final[dict[str, list[tuple[Any, str]]]] = {
    "gradients": [
        (ManualGradients, "forget_cleared"),
        (OptimizerGuard, "before_step"),
        (GradientSeal, "check"),
        (GradientSeal, "seal"),
        (Contents, "open"),
        (Contents, "close"),
    ],
    "workers": [(DivergenceCheck, "expire")],
    "data": [(DataCheck, "note"), (DataCheck, "compare_notes")],
    "losses": [(LossAlerts, "look")],
}
CALLS: Final = 20_000  # of one function, to measure what timing it costs
SAMPLES: Final = 100  # to measure what the digest of one costs


class Timer:
    """The seconds and calls of functions by name, less what timing them costs."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._overhead = 0.0
        nothing = self.timed("overhead", lambda: None)
        for _ in range(CALLS):
            nothing()
        self._overhead = self.clear()["overhead"] / CALLS

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed under `name`."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - started
                self._calls[name] += 1

        return timed

    def clear(self) -> dict[str, float]:
        """Return the seconds of each function since the last call of this method."""
        totals = {
            name: seconds - self._calls[name] * self._overhead
            for name, seconds in self._seconds.items()
        }
        self._seconds.clear()
        self._calls.clear()
        return totals


def train(job: Job, steps: int, *, shards: bool) -> dict[str, float]:
    """Train, and return the milliseconds of a step, and those of each kind of check."""
    timer = Timer()
    for name, methods in EVERY_STEP.items():
        for kind, method in methods:
            setattr(kind, method, timer.timed(name, getattr(kind, method)))
    DivergenceCheck.compare = timer.timed("comparison", DivergenceCheck.compare)  # type: ignore[method-assign]
    with ss.init() as run:
        model, dataset, loss_fn = job.build()
        model = run.replicate(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        if shards:
            optimizer = run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        loop = run.batches(dataset, job.batch_size, steps=job.warmup_steps + steps)
        first: dict[str, float] = {}
        for number, batch in enumerate(loop):
            if number == job.warmup_steps:
                first, started = timer.clear(), time.perf_counter()
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        seconds = (time.perf_counter() - started) / steps
        per_step = {name: value / steps for name, value in timer.clear().items()}
    per_step["gradients"] += _pass_seconds() * run.lanes / WORKERS
    per_step["workers"] += first["comparison"] / EVERY
    per_step["data"] += _digest_seconds(dataset) * job.batch_size / WORKERS / SHARE
    checks = {name: 1e3 * per_step[name] for name in EVERY_STEP}
    return {"step": 1e3 * seconds, **checks}


def _digest_seconds(dataset: Any) -> float:
    """Return what it costs to load and digest one more sample."""
    digest(dataset[0])
    started = time.perf_counter()
    for index in range(SAMPLES):
        digest(dataset[index])
    return (time.perf_counter() - started) / SAMPLES


def _pass_seconds() -> float:
    """Return what it costs to know of each backward pass who started it."""
    root = torch.ones((), requires_grad=True)
    manual = ManualGradients()

    def seconds(*, is_watched: bool) -> float:
        root.grad = None
        started = time.perf_counter()
        with manual.backward([], 0) if is_watched else nullcontext():
            root.backward()
        return time.perf_counter() - started

    without = [seconds(is_watched=False) for _ in range(CALLS)]
    manual.watch(torch.nn.Linear(1, 1))
    watched = [seconds(is_watched=True) for _ in range(CALLS)]
    manual.close()
    return statistics.median(watched) - statistics.median(without)


def main() -> None:
    """Train all jobs and print the shares; with --job, train it as one worker."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a job (default: 60)")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        milliseconds = train(JOBS[options.job], options.steps, shards=options.shards)
        text = " ".join(f"{name}={value:.5f}" for name, value in milliseconds.items())
        sys.stdout.write(f"{text}\n")
        return
    print("| job | optimizer | step | gradients | workers | data | losses | share of a step |")
    print("|---|---|---|---|---|---|---|---|")
    for job in JOBS:
        for kind in ("sharded", "replicated"):
            arguments = ["--job", job, "--steps", str(options.steps)]
            arguments += ["--shards"] if kind == "sharded" else []
            values = printed(samestep(WORKERS, "benchmarks.checks", *arguments))
            step, *checks = [max(values[name]) for name in ("step", *EVERY_STEP)]
            costs = " | ".join(f"{1e3 * value:.0f} us" for value in checks)
            print(f"| {job} | {kind} | {step:.1f} ms | {costs} | {sum(checks) / step:.2%} |")


if __name__ == "__main__":
    main()
