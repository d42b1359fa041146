"""Small jobs for tests of complete runs, and hashes of everything that a run leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first step of an optimizer: once here, not in every worker
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.record import read_events
from tests.workers import TIMEOUT_SECONDS, run_workers

# Builds, tracks and trains with the public interface; returns the tracked objects by name.
Job = Callable[[ss.Run], dict[str, Any]]
STEPS = 8  # of `image_job`


def images(size: int) -> TensorDataset:
    """Return `size` random images [1, 8, 8] of ten classes, always the same."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(size, 1, 8, 8, generator=generator),
        torch.randint(10, (size,), generator=generator),
    )


class Net(nn.Module):
    """A small classifier with BatchNorm, dropout and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
        )
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.head = nn.Linear(36, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(F.gelu(self.first(self.features(pictures)))))


def classify(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the accuracy of a classifier."""
    pictures, labels = batch
    logits = model(pictures)
    return F.cross_entropy(logits, labels), {
        "accuracy": (logits.argmax(1) == labels).float().mean()
    }


def fit(
    run: ss.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] = classify,
    batch_size: int | None = 32,
    epochs: int = 2,
    max_norm: float | None = None,
    count: Callable[[Any], int] | None = None,
    embed: Callable[[Any, Any], Any] | None = None,
    after_step: Callable[[ss.Means], object] = lambda means: None,
    tracked: dict[str, Any] | None = None,
    **batches: Any,
) -> dict[str, Any]:
    """Train with the usual loop; `batches` are further options of `run.batches`."""
    tracked = {"model": model, "optimizer": optimizer, **(tracked or {})}
    run.track(**tracked)
    for batch in run.batches(dataset, batch_size, epochs=epochs, **batches):
        means = run.backward(loss_fn, model, batch, count=count, embed=embed)
        if max_norm is not None:
            means = {**means, "norm": float(run.clip_grad_norm(model, max_norm))}
        optimizer.step()
        optimizer.zero_grad()
        after_step(means)
        run.log(means)
    return tracked


def image_job(
    run: ss.Run,
    *,
    hook: Callable[[int], object] = lambda step: None,
    size: int = 101,
    **options: Any,
) -> dict[str, Any]:
    """Train `Net` for 8 steps on 101 images in batches of 32; call `hook` in each step."""
    model = run.replicate(Net())
    optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def after_step(_: ss.Means) -> None:
        schedule.step()
        hook(run.step)

    tracked = {"schedule": schedule}
    return fit(
        run, model, optimizer, images(size), tracked=tracked, after_step=after_step, **options
    )


def train(job: Job, directory: Path | None, options: dict[str, Any] | None = None) -> None:
    """Run a job as a worker, with a snapshot after every step."""
    with ss.init(dir=directory, **{"lanes": 8, "snapshot_every": 1, **(options or {})}) as run:
        job(run)


def left_by(
    job: Job, directory: Path, workers: int, *, timeout: float = TIMEOUT_SECONDS, **options: Any
) -> dict[str, str]:
    """Run a job to its end; return hashes of its metrics at each step and of all tracked state."""
    modules = run_workers(_modules_left_by, workers, job, directory, options, timeout=timeout)
    left = left_in(job, directory, **{**options, "resume": "auto"})
    assert all(other == modules[0] for other in modules)
    assert modules[0].items() <= left.items()
    return left


def left_in(job: Job, directory: Path, **options: Any) -> dict[str, str]:
    """Return the same hashes of a finished job; one worker loads its last snapshot."""
    with ss.init(dir=directory, **options) as run:
        steps = run.step
        tracked = job(run)
        assert run.step == steps > 0
        # a sharded optimizer itself returns no state that can be read
        objects = run._session.snapshots.tracked.objects
        states = {name: objects.get(name, item).state_dict() for name, item in tracked.items()}
    return {**fingerprint(states), **logged(directory)}


def _modules_left_by(job: Job, directory: Path, options: dict[str, Any]) -> dict[str, str]:
    with ss.init(dir=directory, **options) as run:
        tracked = job(run).items()
        modules = {name: item for name, item in tracked if isinstance(item, nn.Module)}
        return fingerprint({name: module.state_dict() for name, module in modules.items()})


def logged(directory: Path) -> dict[str, str]:
    """Return a run's scalars by name and step; for a repeated step, both values if they differ."""
    scalars: dict[str, list[str]] = {}
    for event in events(directory, "scalars"):
        for name, value in event["values"].items():
            values = scalars.setdefault(f"{name} at step {event['step']}", [])
            values += [] if str(value) in values else [str(value)]
    return {name: " or ".join(values) for name, values in scalars.items()}


def events(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run's record, or of one kind. Ignores a torn line at the end."""
    return [event for event in read_events(directory) if kind in {None, event["event"]}]


def snapshots(directory: Path) -> list[str]:
    """Return the names of the snapshots in a run's directory."""
    return sorted(path.name for path in directory.glob("step-*"))


def steps_of(*numbers: int) -> list[str]:
    """Return the names of the snapshots of some steps."""
    return [f"step-{number:08d}" for number in numbers]


def fingerprint(state: Any, path: str = "") -> dict[str, str]:
    """Return nested state as a flat dict by path: hashes of tensors, texts of other values."""
    return dict(_leaves(state, path))


def _leaves(state: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(state, torch.Tensor):
        bits = state.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{state.dtype} {tuple(state.shape)} {hashlib.sha256(bits).hexdigest()[:16]}"
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from _leaves(value, f"{path}/{name}")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, repr(state)
