"""Train a small model with a snapshot after every step, an image, and copies at a remote URL."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo  # now, because the first optimizer imports it, which takes seconds
from torch.nn import functional as F

import samestep as ss
from samestep.snapshot import owner

STEPS = 4
KEPT = 2
COPY_SECONDS = 30.0
LOST_SECONDS = 1.0  # no other process writes to the remote, so each start need not wait for long


def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a lane's points."""
    return F.mse_loss(model(batch[0]), batch[1])


def train(folder: Path) -> str:
    """Train in `folder`/run, or resume there, and return a hash of model and optimizer."""
    torch.set_num_threads(1)
    directory, remote = folder / "run", folder / "remote"
    generator = torch.Generator().manual_seed(0)
    points, targets = (torch.randn(8 * STEPS, 24, generator=generator) for _ in range(2))
    options = {"snapshot_every": str(1), "keep_last": KEPT, "keep_best": 0, "system_every": None}
    with (
        patch.object(owner, "LOST_SECONDS", LOST_SECONDS),
        ss.init(lanes=2, dir=directory, remote=f"file://{remote}", **options) as run,
    ):
        model = run.replicate(torch.nn.Linear(24, 24))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
        run.track(model=model, optimizer=optimizer)
        samples = torch.utils.data.TensorDataset(points, targets)
        for batch in run.batches(samples, batch_size=8, epochs=1):
            if run.step:
                _wait_for_copy(folder, f"step-{run.step:08d}/manifest.json")
            means = run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means)
            if run.step == 1:
                run.log_image("weights", model.weight.detach().clamp(0, 1))
        digest = hashlib.sha256()
        # a sharded optimizer itself returns no state that can be read
        saved = run._session.snapshots.tracked.objects["optimizer"].state_dict()  # noqa: SLF001
        for state in (model.state_dict(), *saved["state"].values()):
            for name, tensor in sorted(state.items()):
                digest.update(f"{name} {tensor.tolist()}".encode())
    return digest.hexdigest()


def _wait_for_copy(folder: Path, manifest: str) -> None:
    """Wait until a snapshot is copied or has failed, so that all runs make the same copies."""
    deadline = time.monotonic() + COPY_SECONDS
    while not (folder / "remote" / manifest).exists() and time.monotonic() < deadline:
        is_writing = any(thread.name.startswith("write step") for thread in threading.enumerate())
        if not is_writing and not (folder / "run" / manifest).exists():
            return
        time.sleep(0.002)
