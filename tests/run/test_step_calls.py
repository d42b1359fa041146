"""How many calls of Python a step makes, of which time tells nothing on a busy machine."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.host import no_garbage_collection
from samestep.torch_internals import GRAPH_TREES
from tests.workers import run_workers

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
    # garbage of other tests may call functions when it is collected
    with no_garbage_collection(), ss.init(lanes=lanes) as run:
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


@pytest.fixture
def _without_compiled_graphs(monkeypatch):
    """Forget the module of the compiler's CUDA graphs, which other tests may have imported.

    Each lane then asks it whether there are any.
    """
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)


@pytest.mark.usefixtures("_without_compiled_graphs")
@pytest.mark.parametrize("inline", [False, True])
def test_a_lane_makes_few_calls(inline):
    per_lane = (calls_of_a_step(8, inline=inline) - calls_of_a_step(4, inline=inline)) / 4
    assert 50 < per_lane < 150


@pytest.mark.usefixtures("_without_compiled_graphs")
def test_a_step_of_one_lane_makes_few_calls():
    assert 200 < calls_of_a_step(1) < 350


def calls_of_checks(every):
    """Return the calls of the modules that find faulty hardware, in the last step."""
    calls = Counter()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(COUNTED):
            calls[Path(frame.f_code.co_filename).name] += 1

    data = TensorDataset(torch.ones(64, 8), torch.zeros(64, dtype=torch.int64))
    with ss.init(lanes=2, recheck_every=every) as run:
        model = run.replicate(nn.Linear(8, 3))
        optimizer = run.shard(torch.optim.SGD(model.parameters()))
        former = sys.getprofile()
        for batch in run.batches(data, 32, steps=STEPS):
            if run.step == STEPS - 1:
                sys.setprofile(profile)
            run.backward(losses_of, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        sys.setprofile(former)
    return [calls[name] for name in ("recheck.py", "update_check.py", "shard.py")]


def test_without_recheck_every_a_step_calls_nothing_for_it():
    def body():
        return [calls_of_checks(every) for every in (None, 1, 1000)]

    for off, due, not_due in run_workers(body, 2):
        assert off[:2] == [0, 0]
        assert not_due[:2] == [4, 1]  # each method of the plugin asks whether the step is due
        assert min(due[:2]) > 10
        assert off[2] == not_due[2] > 0


def test_a_loop_over_lanes_makes_few_more_calls_than_backward():
    assert calls_of_a_step(4, inline=True) < 1.15 * calls_of_a_step(4)
