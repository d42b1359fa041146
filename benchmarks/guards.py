"""What guards cost in a step of 100 layers: all of them against none, in turn.

usage: python -m benchmarks.guards [--rounds 7] [--steps 70] [--layers 100]

Prints tables for one and two workers with two lanes: the calls of Python functions per step, which
are exact, and of the CPU time per step medians with their range. Both are means over all steps
after the first, with the searches in them. The pause is how much longer the longest of these steps
took than those around it. "guards + record" also has a directory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Final
from unittest.mock import patch

import torch

import samestep as ss
from benchmarks import turns
from benchmarks.measure import figures
from benchmarks.narrow_layers import BATCH, loss_fn, network, samples
from samestep.run import session

CONTENDERS: Final = ("guards", "guards + record", "none")
NEIGHBORS: Final = 3  # steps on each side of one
ROWS: Final = {"calls": "calls per step", "cpu_ms": "CPU ms per step", "pause_ms": "pause, ms"}


class Calls:
    """Counts calls of Python functions."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Be the profile function of a thread."""
        self.number += event == "call"


def train(contender: str, what: str, steps: int, layers: int, folder: str) -> dict[str, float]:
    """Return the figures of a short training: "calls" or "time", because counting takes time."""
    torch.set_num_threads(1)
    calls, times = Calls(), [0.0]
    directory = f"{folder}/run" if contender == "guards + record" else None
    with (
        patch.object(session, "plugins_of", lambda _: []) if contender == "none" else nullcontext(),
        ss.init(lanes=2, system_every=None, dir=directory) as run,
    ):
        model = run.replicate(network(layers))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(samples(steps), BATCH, epochs=1):
            times.append(time.process_time())
            if len(times) == NEIGHBORS and what == "calls":
                sys.setprofile(calls.note)
            run.log(run.backward(loss_fn, model, batch))
            optimizer.step()
            optimizer.zero_grad()
        sys.setprofile(None)
    seconds = [after - before for before, after in pairwise(times[NEIGHBORS - 1 :])]
    if what == "calls":
        return {"calls": calls.number / len(seconds)}
    return {"cpu_ms": 1000 * statistics.fmean(seconds), "pause_ms": 1000 * longest_pause(seconds)}


def longest_pause(seconds: list[float]) -> float:
    """Return how much longer a step took at most than the median of those around it."""
    around = [
        [*seconds[max(0, n - NEIGHBORS) : n], *seconds[n + 1 : n + 1 + NEIGHBORS]]
        for n in range(len(seconds))
    ]
    pauses = [own - statistics.median(near) for own, near in zip(seconds, around, strict=True)]
    return max(0.0, *pauses)


def measure(workers: int, contender: str, what: str, steps: int, layers: int) -> dict[str, float]:
    """Return the figures of a training by several workers, as means over them."""
    job = [f"--job={contender}", f"--what={what}", f"--steps={steps}", f"--layers={layers}"]
    with tempfile.TemporaryDirectory() as folder:
        job.append(f"--folder={folder}")
        return figures([*turns.samestep(workers, "benchmarks.guards"), *job])


def main() -> None:
    """Measure all contenders in turn, or be one worker of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = options.steps, options.layers
    if options.job:
        figures_of_job = train(options.job, options.what, *size, options.folder)
        print(*(f"{name}={value:.3f}" for name, value in figures_of_job.items()))
        return
    for workers in (1, 2):
        counted = {name: [measure(workers, name, "calls", *size)] for name in CONTENDERS}
        contenders = {name: partial(measure, workers, name, "time", *size) for name in CONTENDERS}
        timed = turns.in_turn(contenders, options.rounds)
        rows = {
            title: turns.figure(name, counted if name == "calls" else timed)
            for name, title in ROWS.items()
        }
        print(turns.table(f"{workers} workers", rows), flush=True)


if __name__ == "__main__":
    main()
