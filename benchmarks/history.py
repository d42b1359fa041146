"""What the chain of a run costs in a step of 100 layers: with it and without, in turn.

usage: python -m benchmarks.history [--rounds 7] [--steps 200] [--layers 100] [--mb 1000]

Prints a table for one and two workers with two lanes, whose runs have a directory: the CPU time per
step, that of all calls of `plugins/history.py` in a step of the worker that writes the chain, that
as a share of the step, and the bytes of the chain per step. One of `AHEAD` steps takes longer, and
has its share of these. Then the CPU time for the digest of a
snapshot of `--mb` megabytes, which a thread computes after its commit. Times per step are those
below which one of ten steps is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

import samestep as ss
from benchmarks import turns
from benchmarks.measure import figures
from benchmarks.narrow_layers import BATCH, loss_fn, network, samples
from samestep.plugins.history import AHEAD, History
from samestep.record.chain import FILE
from samestep.run.session import Session
from samestep.snapshot.digest import state_digest

CONTENDERS: Final = ("chain", "none")
CALLS: Final = ("begin_step", "end", "before_update", "end_step")
WARM_UP: Final = 20  # steps
ROWS: Final = {
    "cpu_ms": "CPU ms per step",
    "own_us": "of that the chain, us",
    "share": "the same, % of the step",
    "bytes": "bytes per step",
}


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a method whose seconds are added to a list."""

    @wraps(method)
    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        returned = method(*arguments)
        seconds.append(time.perf_counter() - started)
        return returned

    return call


def typical(seconds: Iterable[float]) -> float:
    """Return what a step takes that nothing disturbs: one of ten takes less."""
    return statistics.quantiles(seconds, n=10)[0]


def train(contender: str, steps: int, layers: int, folder: str) -> dict[str, float]:
    """Return the figures of a short training."""
    torch.set_num_threads(1)
    times, own = [0.0], list[float]()
    calls = {name: timed(getattr(History, name), own) for name in CALLS}
    without = patch.object(Session, "_make_history", lambda *_: None)
    with (
        patch.multiple(History, **calls),
        without if contender == "none" else nullcontext(),
        ss.init(lanes=2, system_every=None, dir=f"{folder}/run") as run,
    ):
        model = run.replicate(network(layers))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(samples(steps), BATCH, epochs=1):
            times.append(time.process_time())
            run.log(run.backward(loss_fn, model, batch))
            optimizer.step()
            optimizer.zero_grad()
    cpu = typical(after - before for before, after in pairwise(times[WARM_UP:]))
    result = {"cpu_ms": 1000 * cpu}
    if own:  # on the worker that writes the chain
        by_step = [sum(own[n : n + len(CALLS)]) for n in range(0, len(own), len(CALLS))]
        later = range(AHEAD * (1 + WARM_UP // AHEAD), len(by_step))
        long = typical(by_step[n] for n in later if n % AHEAD == 0)  # has the samples of all
        seconds = (long + (AHEAD - 1) * typical(by_step[n] for n in later if n % AHEAD)) / AHEAD
        size = (Path(folder) / "run" / FILE).stat().st_size
        result |= {"own_us": 1e6 * seconds, "share": 100 * seconds / cpu, "bytes": size / steps}
    return result


def measure(workers: int, contender: str, *size: int) -> dict[str, float]:
    """Return the figures of a training by several workers, as means over those that have them."""
    steps, layers = size
    with tempfile.TemporaryDirectory() as folder:
        job = [f"--job={contender}", f"--steps={steps}", f"--layers={layers}", f"--folder={folder}"]
        return figures([*turns.samestep(workers, "benchmarks.history"), *job])


def digest_seconds(megabytes: int) -> float:
    """Return the CPU seconds for the digest of a snapshot of so many megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        with ss.init(lanes=1, dir=folder) as run:
            model = run.replicate(nn.Linear(1000, megabytes * 250, bias=False))
            run.track(model=model)
        started = time.process_time()
        state_digest(Path(folder) / "step-00000000")
        return time.process_time() - started


def main() -> None:
    """Measure both in turn, or be one worker of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = options.steps, options.layers
    if options.job:
        figures_of_job = train(options.job, *size, options.folder)
        print(*(f"{name}={value:.3f}" for name, value in figures_of_job.items()))
        return
    for workers in (1, 2):
        contenders = {name: partial(measure, workers, name, *size) for name in CONTENDERS}
        measured = turns.in_turn(contenders, options.rounds)
        rows = {
            title: {
                contender: [run[name] for run in runs]
                for contender, runs in measured.items()
                if name in runs[0]
            }
            for name, title in ROWS.items()
        }
        table = turns.table(f"{workers} workers", {ROWS["cpu_ms"]: rows.pop(ROWS["cpu_ms"])})
        print(
            table,
            *(f"{title}: {values['chain']}" for title, values in rows.items()),
            sep="\n",
            flush=True,
        )
    print(f"digest of {options.mb} MB: {digest_seconds(options.mb):.2f} s", flush=True)


if __name__ == "__main__":
    main()
