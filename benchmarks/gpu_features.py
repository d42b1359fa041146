"""A job for `samestep verify` with what the GPU benchmark's other job lacks.

BatchNorm, clipping, and one of: a loss scaler for float16, a loss of the whole batch, streams.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep as ss

STEPS = 100  # at most


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a lane's mean loss."""
    return F.cross_entropy(model(batch[0]), batch[1])


def embedded(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the embeddings of a lane."""
    return F.normalize(model(batch[0]), dim=1)


def contrasted(_: nn.Module, embeddings: Tensor) -> Tensor:
    """Return a loss that compares all samples of the batch."""
    return (5 * embeddings @ embeddings.T).logsumexp(1).mean()


def stream(lane: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a lane, which are not in pinned memory."""
    generator = torch.Generator().manual_seed(lane)
    while True:
        pictures = torch.randn(8, 3, 32, 32, generator=generator)
        yield pictures, torch.randint(10, (8,), generator=generator)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--feature", choices=("float16", "embed", "streams"), required=True)
    options, _ = parser.parse_known_args()
    is_float16 = options.feature == "float16"
    precision = "float16" if is_float16 else "float32"
    with ss.init(device=options.device, precision=precision) as run:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Conv2d(width, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU())
            for width in (3, 32, 32)
        ]
        model = run.replicate(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(288, 10)))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), fused=True))
        scaler = run.grad_scaler(enabled=is_float16)
        run.track(model=model, optimizer=optimizer, scaler=scaler)

        def scaled(model: nn.Module, batch: Any) -> Tensor:
            return scaler.scale(classified(model, batch))

        dataset = torch.utils.data.TensorDataset(
            torch.randn(512, 3, 32, 32), torch.arange(512) % 10
        )
        batches = (
            run.streams(stream, steps=STEPS, name="pictures")
            if options.feature == "streams"
            else run.batches(dataset, 32, steps=STEPS)
        )
        for batch in batches:
            if options.feature == "embed":
                run.backward(contrasted, model, batch, embed=embedded)
            else:
                run.backward(scaled, model, batch)
            scaler.unscale_(optimizer)
            run.clip_grad_norm(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
