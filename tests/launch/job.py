"""A small job for tests on several hosts: `job.py DIRECTORY [FAULT]`, with `Fault` as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

import samestep as ss
from tests.jobs import image_job

PAUSE_SECONDS = 0.5  # for a test to cause something meanwhile


@dataclass
class Fault:
    """An action of a rank at a step with a number of workers; writes a file `fault` first.

    The rank -1 is all of them.
    """

    workers: int
    rank: int
    step: int
    does: str

    def happen(self, run: ss.Run) -> None:
        """Act if the run is at that step."""
        if (run.world_size, run.step) != (self.workers, self.step):
            return
        if self.rank not in {run.rank, -1}:
            return
        (run.dir / f"fault-{run.rank}").write_text(str(os.getpid()))
        (run.dir / f"fault-{run.rank}").rename(run.dir / "fault")
        is_first = os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0"
        waits = self.does == "wait" or (self.does == "wait once" and is_first)
        while waits and not run._session.stop.signal:
            time.sleep(0.01)
        if self.does == "pause":
            time.sleep(PAUSE_SECONDS)
        if self.does == "kill" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "raise":
            raise ValueError("the data is wrong")
        if self.does == "flip":  # a bit of each gradient from now on
            parameter = next(run._lanes.models.modules[0].parameters())
            parameter.register_hook(lambda gradient: flipped(gradient.clone()))
        if self.does == "flip parameter":  # once, after the update
            flipped(next(run._lanes.models.modules[0].parameters()).detach())


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.int32)[0] ^= 1
    return tensor


def main(directory, fault='{"workers": 0, "rank": 0, "step": 0, "does": ""}'):
    with ss.init(dir=directory, lanes=8, snapshot_every=1) as run:
        hook = Fault(**json.loads(fault)).happen

        def after_step(_):
            hook(run)
            sys.stdout.write(f"made step {run.step}\n")

        image_job(run, hook=after_step)
        sys.stdout.write(f"trained at {run.world_size} workers\n")


main(*sys.argv[1:])
