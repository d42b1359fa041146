"""Histograms: exact counts in fixed bins, the same at any number of workers and in slices."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import samestep as ss
from samestep.errors import RecordError
from samestep.run.mixins import bin_counts
from tests.bits import bits
from tests.jobs import Net, classify, images
from tests.jobs import events as events_in
from tests.workers import WorkerFailedError, run_workers

FLOATS = {
    torch.float64: st.floats(),
    torch.float32: st.floats(width=32),
    torch.float16: st.floats(width=16),
    torch.bfloat16: st.floats(width=16, min_value=-1, max_value=1),
}
SUBNORMAL = {torch.float64: -1022, torch.float32: -126}  # below 2 to this power


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(list(FLOATS)))
    return torch.tensor(draw(st.lists(FLOATS[dtype], max_size=20)), dtype=dtype)


@given(tensors())
def test_each_element_is_in_the_bin_that_contains_it(values):
    counts = bin_counts([values])
    assert sum(counts.values()) == values.numel()
    smallest = SUBNORMAL.get(values.dtype, SUBNORMAL[torch.float32])
    for value in values.double().tolist():
        if not math.isfinite(value):
            key = str(abs(value) if math.isnan(value) else value)
        else:
            mantissa, exponent = math.frexp(value)
            digits = min(3, 3 + exponent - 1 - smallest)
            edge = math.ldexp(math.trunc(math.ldexp(mantissa, digits)), exponent - digits)
            key = str(edge + 0.0)
        counts[key] -= 1
    assert not any(counts.values())


@given(tensors(), st.lists(st.integers(0, 20), max_size=3))
def test_counts_of_any_split_add_up_to_those_of_the_whole(values, cuts):
    parts = values.tensor_split(sorted(cuts))
    added = sum((bin_counts([part]) for part in parts), Counter())
    assert added == bin_counts([values]) == bin_counts(parts)


class Odd(nn.Module):
    """Parameters that do not divide evenly, in another storage order, unused and frozen."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        kernel = torch.linspace(-1, 1, 3 * 5 * 2 * 2).view(3, 5, 2, 2)
        self.last = nn.Parameter(kernel.contiguous(memory_format=torch.channels_last))
        values = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf])
        self.register_parameter("unused", nn.Parameter(values))
        self.frozen = nn.Parameter(torch.ones(0), requires_grad=False)


def penalized(model, batch):
    loss, extra = classify(model.net, batch)
    return loss + (model.last * model.last).sum(), extra


def job(directory, shard):
    """Log histograms of parameters and gradients in two steps; return the gradients' bits."""
    gradients = []
    with ss.init(lanes=4, dir=directory, seed=3) as run:
        model = run.replicate(Odd())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if shard:
            run.shard(optimizer)
        run.log_histogram("before", model.last)
        for batch in run.batches(images(16), 8, epochs=1):
            run.backward(penalized, model, batch)
            run.log_histogram("gradients", model, grad=True)
            if not shard:
                named = model.named_parameters()
                gradients += [(name, p.grad.clone()) for name, p in named if p.grad is not None]
            run.clip_grad_norm(model, 0.01)
            run.log_histogram("clipped", model.net.head, grad=True)
            optimizer.step()
            optimizer.zero_grad()
            run.log_histogram("parameters", model)
    return gradients


def histograms(directory):
    """Return the histograms of a run without their times, in order."""
    return [{**event, "time": 0} for event in events_in(directory, "histogram")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the histograms and the gradients of the job on one worker, not sharded."""
    directory = tmp_path_factory.mktemp("alone")
    gradients = job(directory, False)
    return histograms(directory), gradients


@pytest.mark.parametrize(("workers", "shard"), [(1, True), (2, False), (2, True)])
def test_events_are_the_same_at_any_number_of_workers_and_sharded(tmp_path, alone, workers, shard):
    run_workers(job, workers, tmp_path, shard)
    assert histograms(tmp_path) == alone[0]


def test_events_hold_the_counts_of_parameters_and_gradients(alone):
    events, gradients = alone
    first = events[0]
    assert (first["name"], first["step"], first["between"]) == ("before", 0, True)
    assert sum(count for _, count in first["bins"]) == 60
    assert [low for low, _ in first["bins"]] == sorted(low for low, _ in first["bins"])
    (last,) = (e for e in events if e["name"] == "parameters/unused" and e["step"] == 1)
    assert (last["bins"], last["nan"], last["inf"], last["-inf"]) == ([[0.0, 2]], 1, 1, 1)
    assert "between" not in last
    (empty,) = (e for e in events if e["name"] == "parameters/frozen" and e["step"] == 1)
    assert empty["bins"] == []
    logged = [event for event in events if event["name"].startswith("gradients/")]
    assert [event["name"] for event in logged] == [f"gradients/{name}" for name, _ in gradients]
    for event, (_, gradient) in zip(logged, gradients, strict=True):
        expected = bin_counts([gradient.reshape(-1)])
        assert {str(low): count for low, count in event["bins"]} == expected


def test_tensors_are_counted_without_a_change(tmp_path):
    values = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    before = bits(values)
    with ss.init(lanes=1, dir=tmp_path) as run:
        run.log_histogram("values", values)
        run.log_histogram("negative", nn.Parameter(-values[0]))
    assert bits(values) == before
    first, second = histograms(tmp_path)
    assert sum(count for _, count in first["bins"]) == 24
    assert second["bins"] == [[-20.0, 1], [-16.0, 1], [-12.0, 1], [-8.0, 1], [-4.0, 1], [0.0, 1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (1.0, "a module for 'h', got float"),
        ([torch.ones(2)], "got list"),
        (torch.ones(2, dtype=torch.int64), "got a tensor of torch.int64"),
        (torch.ones(2, dtype=torch.complex64), "got a tensor of torch.complex64"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_other_values_are_refused(values, words):
    with ss.init() as run, pytest.raises(RecordError, match=words):
        run.log_histogram("h", values)


def test_missing_gradients_are_refused():
    with ss.init() as run, pytest.raises(RecordError, match="expected gradients for 'h', got none"):
        run.log_histogram("h", nn.Linear(2, 2), grad=True)


def test_a_module_without_parameters_is_refused():
    with ss.init() as run, pytest.raises(RecordError, match="expected parameters for 'h', got no"):
        run.log_histogram("h", nn.ReLU())


def misuse(kind, directory):
    with ss.init(lanes=2, dir=directory) as run:
        if kind == "shapes":
            run.log_histogram("h", torch.ones(2 + run.rank))
        model = run.replicate(nn.Linear(2, 2))
        run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(torch.ones(2, 2), 2, epochs=1):
            run.backward(lambda model, batch: model(batch).sum(), model, batch)
            run.log_histogram("h", model.weight.grad)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("shapes", r"\[2\].* on worker 0 and .*\[3\].* on worker 1"), ("slices", "with grad=True")],
)
def test_workers_that_differ_and_slices_are_refused(tmp_path, kind, words):
    with pytest.raises(WorkerFailedError, match=words):
        run_workers(misuse, 2, kind, tmp_path)
