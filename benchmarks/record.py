"""Cost of a record per step: with sinks, images, histograms, settings, samples and alerts.

usage: python -m benchmarks.record [--rounds 5] [--steps 300] [--workers 1 2] [--ways WAY ...]

Ways take turns, and every ratio compares two runs of one round: the time of all steps after the
warm-up over that of "directory", a record without any of them. With as many workers as cores, the
process that writes has no separate core. In "image in the step", a step waits until its image is
written. Histograms are those of all parameters, in every tenth step; samples are taken ten times as
often as by default; there are 100 settings. The alert, of a value that is not finite, goes to a URL
that never responds, so it is sent again until the run has ended. Images are logged at every step.
"""

from __future__ import annotations

import argparse
import math
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks.measure import spread
from benchmarks.turns import in_turn
from samestep.record.images import copy_picture, write_picture

WARMUP_STEPS = 30
WIDTH, DEPTH, BATCH_SIZE = 512, 4, 64
IMAGE = 256  # pixels, height and width
HISTOGRAMS_EVERY = 10  # steps
WAYS = (
    "directory",
    "samples",
    "settings",
    "histograms",
    "alert",
    "file://",
    "tensorboard",
    "image",
    "image, file://",
    "image in the step",
)


def loss_fn(
    model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a lane's mean loss and accuracy."""
    inputs, labels = batch
    outputs = model(inputs)
    return F.cross_entropy(outputs, labels), {
        "accuracy": (outputs.argmax(1) == labels).float().mean()
    }


def picture(step: int) -> torch.Tensor:
    """Return an image, uint8 [IMAGE, IMAGE, 3], that is neither flat nor noise."""
    places = torch.arange(IMAGE)
    waves = (places[:, None] * places[None, :] + 7 * step) // 16
    return torch.stack([waves, waves + places, waves - places], dim=-1).to(torch.uint8)


def train(way: str, steps: int) -> float:
    """Train, and return the milliseconds of a step."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    ]
    data = TensorDataset(torch.randn(8 * BATCH_SIZE, WIDTH), torch.randint(10, (8 * BATCH_SIZE,)))
    settings = {f"setting {number}": number for number in range(100)} if way == "settings" else None
    with ss.init(settings=settings) as run:
        model = run.replicate(torch.nn.Sequential(*layers))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        started = 0.0
        for batch in run.batches(data, BATCH_SIZE, steps=steps):
            if run.step == WARMUP_STEPS:
                started = time.perf_counter()
            run.log(run.backward(loss_fn, model, batch))
            if way == "alert" and run.step == WARMUP_STEPS:
                run.log({"not finite": math.nan})
            optimizer.step()
            optimizer.zero_grad()
            if way == "histograms" and run.step % HISTOGRAMS_EVERY == 0:
                run.log_histogram("weights", model)
            if way == "image in the step":
                if run.is_main:
                    write_picture(
                        run.dir, copy_picture(run.step, "picture", picture(run.step).numpy())
                    )
            elif way.startswith("image"):
                run.log_image("picture", picture(run.step))
        return 1000 * (time.perf_counter() - started) / (steps - WARMUP_STEPS)


def measure(way: str, steps: int, workers: int) -> float:
    """Train with a record in a new directory; return the milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        sinks = {
            "file://": f"file://{folder}/far",
            "image, file://": f"file://{folder}/far",
            "tensorboard": "tensorboard",
        }
        options = {
            "dir": Path(folder, "run"),
            "lanes": 2,
            "snapshot_every": None,
            "sinks": sinks.get(way),
            "on_event": f"http://127.0.0.1:{silent.getsockname()[1]}/" if way == "alert" else None,
            "system_every": 0.5 if way == "samples" else None,
        }
        return ss.launch(train, way, steps, workers=workers, **options)


def main() -> None:
    """Print the milliseconds of a step and their ratios, by way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: 300)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    compared = f"compared with {WAYS[0]} (default: all)"
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help=compared)
    options = parser.parse_args()
    for workers in options.workers:
        ways = [WAYS[0], *options.ways]
        runs = {way: partial(measure, way, options.steps, workers) for way in ways}
        measurements = in_turn(runs, options.rounds)
        print(
            f"{workers} workers: ms per step, and relative to a record in its directory; "
            f"{options.rounds} rounds"
        )
        for way, milliseconds in measurements.items():
            ratios = [
                duration / base
                for duration, base in zip(milliseconds, measurements[WAYS[0]], strict=True)
            ]
            print(
                f"  {way:18} {spread(milliseconds)}  {statistics.median(ratios):5.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
