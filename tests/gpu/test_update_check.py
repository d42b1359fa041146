"""Updates of sharded optimizers that other workers repeat on their own GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import samestep as ss
from tests.jobs import Net, classify, images
from tests.plugins.test_update_check import noted

MAKE = (
    torch.optim.AdamW,  # keeps the number of steps on the host, and with `fused` on the GPU
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.SGD, momentum=0.9),
)


def trained(devices):
    """Train with a check in every step; return whether all workers had equal hashes of updates."""
    with noted() as compared:
        for make in MAKE:
            with ss.init(lanes=4, timeout=60, recheck_every=1, devices=devices) as run:
                model = run.replicate(Net())
                optimizer = run.shard(make(model.parameters(), lr=0.01))
                run.track(model=model, optimizer=optimizer)
                for batch in run.batches(images(32), 16, steps=2):
                    run.backward(classify, model, batch)
                    optimizer.step()
                    optimizer.zero_grad()
    return compared


@pytest.mark.long
def test_other_gpus_repeat_updates(gpus):
    assert gpus.workers(2, trained, 1) == [[True] * 2 * len(MAKE)] * 2
