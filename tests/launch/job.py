"""A small job for tests on several hosts: `job.py DIRECTORY [FAULT]`, with `Fault` as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass

import samestep as ss
from tests.jobs import image_job


@dataclass
class Fault:
    """An action of a rank at a step with a number of workers; writes a file `fault` first."""

    workers: int
    rank: int
    step: int
    does: str

    def happen(self, run: ss.Run) -> None:
        """Act if the run is at that step."""
        if (run.world_size, run.rank, run.step) != (self.workers, self.rank, self.step):
            return
        (run.dir / "fault").write_text(str(os.getpid()))
        while self.does == "wait" and not run._session.stop.signal:
            time.sleep(0.01)
        if self.does == "kill" and os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "raise":
            raise ValueError("the data is wrong")


def main(directory, fault='{"workers": 0, "rank": 0, "step": 0, "does": ""}'):
    with ss.init(dir=directory, lanes=8, snapshot_every=1) as run:
        hook = Fault(**json.loads(fault)).happen
        image_job(run, hook=lambda _: hook(run))
        sys.stdout.write(f"trained at {run.world_size} workers\n")


main(*sys.argv[1:])
