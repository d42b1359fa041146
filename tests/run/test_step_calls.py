"""How many calls of Python a step makes, of which time tells nothing on a busy machine."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss

COUNTED = str(Path(ss.__file__).parent), contextlib.__file__
STEPS = 6  # the first ones search what lanes reach


def losses_of(model, batch):
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), {"mean": logits.mean()}


def calls_of_a_step(lanes, *, inline=False):
    """Return how often functions of samestep begin or go on in the last step."""
    calls = 0

    def profile(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(COUNTED)

    data = TensorDataset(torch.ones(64, 8), torch.zeros(64, dtype=torch.int64))
    with ss.init(lanes=lanes) as run:
        model = run.replicate(nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(data, 32, steps=STEPS):
            former = sys.getprofile()
            if run.step == STEPS - 1:
                sys.setprofile(profile)
            try:
                if inline:
                    for lane_batch in batch.lanes(model):
                        loss, metrics = losses_of(model, lane_batch)
                        batch.backward(loss, **metrics)
                else:
                    run.backward(losses_of, model, batch)
            finally:
                sys.setprofile(former)
            optimizer.step()
            optimizer.zero_grad()
    return calls


@pytest.mark.parametrize("inline", [False, True])
def test_a_lane_makes_few_calls(inline):
    per_lane = (calls_of_a_step(8, inline=inline) - calls_of_a_step(4, inline=inline)) / 4
    assert 50 < per_lane < 140


def test_a_step_of_one_lane_makes_few_calls():
    assert 200 < calls_of_a_step(1) < 350


def test_a_loop_over_lanes_makes_few_more_calls_than_backward():
    assert calls_of_a_step(4, inline=True) < 1.15 * calls_of_a_step(4)
