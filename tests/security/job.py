"""A job that stops in each phase until it is told to go on: `job.py DIRECTORY`.

It uses only what every version of samestep has, so that earlier ones can be attacked, too.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import samestep as ss

STEPS = 6
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def hold(directory: Path, phase: str) -> None:
    """Report a phase and wait until the test allows the next one."""
    (directory / f"{phase}.reached").touch()
    while not (directory / f"{phase}.go").exists():
        time.sleep(0.01)


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a lane."""
    return model(batch[0]).square().mean()


def main(directory: Path) -> None:
    """Train, killed once after the phase `running` unless the file `lasts` exists."""
    rank = next(int(os.environ[name]) for name in RANKS if name in os.environ)
    (directory / f"pid-{os.getpid()}").touch()
    phase = "resuming" if (directory / "killed").exists() else "forming"
    if rank == 1:
        hold(directory, phase)
    with ss.init(dir=directory / "run", lanes=2, snapshot_every="1") as run:
        torch.manual_seed(7)
        data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 4))
        model = run.replicate(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(data, 8, epochs=1):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            if phase == "forming" and run.step == 3:
                if rank == 1:
                    hold(directory, "running")
                    time.sleep(
                        3.5
                    )  # for heartbeats, and for a worker that believes a failure to exit
                run.all_gather(rank)
            may_end = phase == "forming" and not (directory / "lasts").exists()
            if may_end and run.step == 4 and rank == 1:
                (directory / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            (directory / "result").write_text(digest(model))


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the parameters' bits."""
    content = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
