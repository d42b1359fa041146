"""The gradient is that of the mean over all items, at any number of items per lane."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from tests.workers import run_workers


def regress(model, batch):
    """Return the mean over the lane's items; NaN without items."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def items(lane, number):
    """Return inputs and targets of a lane; targets differ, which would reveal a mean of means."""
    generator = torch.Generator().manual_seed(lane)
    return torch.randn(number, 3, generator=generator), torch.randn(
        number, 1, generator=generator
    ) + 3 * lane


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def check(run, batch, inputs, targets, count):
    """Assert that loss and gradient equal those of the mean over all inputs, up to rounding."""
    reference = make_model().double()
    loss = regress(reference, (inputs.double(), targets.double()))
    loss.backward()
    model = run.replicate(make_model())
    means = run.backward(regress, model, batch, count=count)
    assert math.isclose(means["loss"], loss.item(), rel_tol=1e-5)
    found, expected = (
        torch.cat([parameter.grad.double().flatten() for parameter in some.parameters()])
        for some in (model, reference)
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()


def check_lanes(run, sizes, count):
    lanes = [items(lane, size) for lane, size in enumerate(sizes)]
    batch = next(iter(run.streams(lambda lane: iter([lanes[lane]]), name=f"{sizes} {count}")))
    check(run, batch, *map(torch.cat, zip(*lanes, strict=True)), count)


def count_items(batch):
    return len(batch[0])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
@settings(max_examples=50)
def test_gradient_with_count_is_that_of_the_mean_over_all_items(sizes):
    with ss.init(lanes=len(sizes)) as run:
        check_lanes(run, sizes, count_items)


@given(size=st.integers(1, 60), batch_size=st.integers(1, 70), lanes=st.integers(1, 9))
@settings(max_examples=50)
def test_gradient_of_a_short_batch_is_that_of_the_mean_over_its_samples(size, batch_size, lanes):
    inputs, targets = items(1, size)
    with ss.init(lanes=lanes) as run:
        for number, batch in enumerate(
            run.batches(TensorDataset(inputs, targets), batch_size, shuffle=False)
        ):
            samples = slice(number * batch_size, (number + 1) * batch_size)
            check(run, batch, inputs[samples], targets[samples], None)
    assert number == (size - 1) // batch_size


def test_count_works_across_workers():
    def body():
        with ss.init(lanes=7) as run:
            for sizes in (
                [0, 0, 0, 0, 0, 0, 2],
                [5, 0, 0, 3, 0, 0, 0],
                [1, 2, 3, 4, 5, 6, 7],
                [40, 0, 1, 1, 0, 33, 2],
            ):
                check_lanes(run, sizes, count_items)
                check_lanes(run, sizes, None)

    run_workers(body, 3)


def weigh(model, batch):
    """Return the sum of a loss over the lane's boxes and of one over its background."""
    inputs, boxes = batch
    outputs = model(inputs)
    return outputs.square().sum() + (outputs[:, 0] * boxes).sum(), {"boxes": boxes.sum()}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=9))
@settings(max_examples=50)
def test_sum_is_divided_by_the_items_of_all_lanes(boxes):
    inputs = [
        torch.randn(len(some), 3, generator=torch.Generator().manual_seed(lane))
        for lane, some in enumerate(boxes)
    ]
    lanes = [(some, torch.tensor(numbers)) for some, numbers in zip(inputs, boxes, strict=True)]
    total = max(1, sum(map(sum, boxes)))
    reference = make_model().double()
    loss = (
        weigh(
            reference, (torch.cat(inputs).double(), torch.cat([numbers for _, numbers in lanes]))
        )[0]
        / total
    )
    loss.backward()
    with ss.init(lanes=len(boxes)) as run:
        model = run.replicate(make_model())
        batch = next(iter(run.streams(lambda lane: iter([lanes[lane]]), name="boxes")))
        means = run.backward(
            weigh, model, batch, count=lambda batch: int(batch[1].sum()), reduction="sum"
        )
    assert math.isclose(means["loss"], loss.item(), rel_tol=1e-5)
    assert means["boxes"] == (1.0 if any(map(sum, boxes)) else 0.0)
    found, expected = (
        torch.cat([parameter.grad.double().flatten() for parameter in some.parameters()])
        for some in (model, reference)
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_a_sum_over_samples_is_divided_by_their_number():
    inputs, targets = items(1, 7)
    with ss.init(lanes=3) as run:
        (batch,) = run.batches(TensorDataset(inputs, targets), 7)
        model, reference = run.replicate(make_model()), run.replicate(make_model())
        sums = run.backward(
            lambda model, batch: regress(model, batch) * len(batch[0]),
            model,
            batch,
            reduction="sum",
        )
        means = run.backward(regress, reference, batch)
        assert math.isclose(sums["loss"], means["loss"], rel_tol=1e-6)
        assert torch.allclose(model[0].weight.grad, reference[0].weight.grad, rtol=1e-5)
        with pytest.raises(ss.ConfigError, match="reduction must be 'mean' or 'sum', got 'none'"):
            run.backward(regress, model, batch, reduction="none")


def test_batch_without_items_has_no_gradient():
    with ss.init(lanes=2) as run:
        model = run.replicate(make_model())
        means = run.backward(
            regress,
            model,
            next(iter(run.streams(lambda lane: iter([items(lane, 0)]), name="empty"))),
        )
    assert list(means) == []
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
