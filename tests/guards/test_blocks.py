"""What a function of run.evaluate leaves from block to block is refused, or is no state."""

from __future__ import annotations

import sys
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.errors import EvaluationError
from tests.jobs import Net, images

seen, right = 0, []


class Meter:
    def __init__(self):
        self.total, self.hits, self.recent = 0.0, np.zeros(10, int), deque(maxlen=100)
        self.matrix, self.by_name = torch.zeros(10, 10), {"right": 0}


class Recurrent(Net):
    """Keeps a hidden state, and a table that it makes when it is first used."""

    def __init__(self):
        super().__init__()
        self.hidden, self.table, self.longest = torch.zeros(10), None, 0

    def forward(self, inputs):
        if self.table is None:
            self.table, self.longest = torch.arange(10.0), 10
        return super().forward(inputs) + self.table + self.hidden


def loss_of(logits, batch):
    return F.cross_entropy(logits, batch[1])


def appends(meter, predictions, logits):
    predictions.append(logits.argmax(1))


def counts_a_global(meter, predictions, logits):
    global seen  # noqa: PLW0603  as scripts do
    seen += len(logits)


def appends_to_a_global(meter, predictions, logits):
    right.extend(logits.argmax(1).tolist())


def adds_a_float(meter, predictions, logits):
    meter.total += logits.mean().item()


def adds_in_a_dict(meter, predictions, logits):
    meter.by_name["right"] += len(logits)


def fills_a_matrix(meter, predictions, logits):
    meter.matrix[0, logits.argmax(1)] += 1


def replaces_a_matrix(meter, predictions, logits):
    meter.matrix = meter.matrix + logits.T @ logits


def counts_in_an_array(meter, predictions, logits):
    np.add.at(meter.hits, logits.argmax(1).numpy(), 1)


def fills_a_queue(meter, predictions, logits):
    meter.recent.append(logits.mean())


LEFT = {
    "predictions": appends,
    "seen": counts_a_global,
    "right": appends_to_a_global,
    "meter.total": adds_a_float,
    "meter.by_name": adds_in_a_dict,
    "meter.matrix": fills_a_matrix,
    "matrix": replaces_a_matrix,
    "meter.hits": counts_in_an_array,
    "meter.recent": fills_a_queue,
}


def evaluated(keep, model=None, *, lanes=2, batch_size=8, **options):
    """Evaluate 16 images with a function that also calls `keep(meter, predictions, logits)`."""
    with ss.init(lanes=lanes) as run:
        model = run.replicate(model or Net())
        meter, predictions = Meter(), []

        def evaluate(model, batch):
            logits = model(batch[0])
            keep(meter, predictions, logits)
            return logits if options.get("gather") else loss_of(logits, batch)

        return run.evaluate(evaluate, model, images(16), batch_size, **options)


@pytest.mark.parametrize("name", LEFT)
def test_what_each_block_adds_to_is_refused(name):
    message = rf"changed \S*{name}\S* in each block: .*gather=True.*ss\.Metric"
    with pytest.raises(EvaluationError, match=message):
        evaluated(LEFT[name])


def test_a_state_that_the_model_changes_in_place_is_refused():
    def keep(meter, predictions, logits):
        model.hidden.add_(logits.mean(0))

    model = Recurrent()
    with pytest.raises(EvaluationError, match="hidden in each block"):
        evaluated(keep, model)


def test_what_a_model_sets_in_each_pass_is_accepted():
    def keep(meter, predictions, logits):
        model.last, model.size, model.layers = logits, len(logits), []
        model.layers.append(logits)

    model = Recurrent()
    evaluated(keep, model)


def test_a_method_and_a_partial_are_searched_as_well():
    class Validator:
        def __init__(self):
            self.losses = []

        def __call__(self, model, batch):
            loss = loss_of(model(batch[0]), batch)
            self.losses.append(loss)
            return loss

        def method(self, model, batch):
            return self(model, batch)

    def counted(losses, model, batch):
        losses.append(0)
        return loss_of(model(batch[0]), batch)

    for fn in Validator(), Validator().method, partial(counted, []):
        with ss.init(lanes=2) as run:
            model = run.replicate(Net())
            with pytest.raises(EvaluationError, match="in each block"):
                run.evaluate(fn, model, images(16), 8)


def nothing(meter, predictions, logits):
    """Keep nothing."""


def prints_and_draws(meter, predictions, logits):
    sys.stdout.write(f"{len(logits)} {torch.rand(())}")


def makes_its_own(meter, predictions, logits):
    own = []
    own.append(logits)
    Meter().total += 1


@pytest.mark.parametrize("keep", [nothing, prints_and_draws, makes_its_own])
@pytest.mark.parametrize("gather", [False, True])
def test_other_functions_are_accepted(keep, gather):
    evaluated(keep, gather=gather)


def test_a_metric_of_the_user_that_is_returned_is_accepted():
    class Right(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("right", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, logits, labels):
            self.right += (logits.argmax(1) == labels).sum()

        def compute(self):
            return self.right

    metric = Right()

    def evaluate(model, batch):
        metric.update(model(batch[0]), batch[1])
        return {"right": metric}

    with ss.init(lanes=2) as run:
        model = run.replicate(Net())
        with torch.no_grad():
            right = (model(images(16)[:][0]).argmax(1) == images(16)[:][1]).sum()
        assert run.evaluate(evaluate, model, images(16), 8)["right"] == right


def test_a_table_that_a_model_makes_once_is_accepted():
    evaluated(nothing, Recurrent())


def test_a_model_in_training_mode_changes_its_buffers_alone():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.net = nn.BatchNorm2d(1), Net()

        def forward(self, inputs):
            return self.net(self.norm(inputs))

    evaluated(nothing, Trained())


@pytest.mark.parametrize("options", [{"lanes": 1}, {"batch_size": 16}])
def test_one_worker_that_has_all_may_keep_it(options):
    evaluated(appends, **options)
