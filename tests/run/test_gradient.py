"""The gradient is that of the mean over all items, at any number of items per lane."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset, default_collate

import samestep as ss
from samestep.errors import LossError
from tests.bits import bits
from tests.workers import run_workers, try_workers


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
    assert math.isclose(means["loss"], loss.item(), rel_tol=1e-5, abs_tol=1e-6)
    gradient, expected = (
        torch.cat([parameter.grad.double().flatten() for parameter in net.parameters()])
        for net in (model, reference)
    )
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


def check_lanes(run, sizes, count):
    lanes = [items(lane, size) for lane, size in enumerate(sizes)]
    batch = next(iter(run.streams(lambda lane: iter([lanes[lane]]), name=f"{sizes} {count}")))
    check(run, batch, *map(torch.cat, zip(*lanes, strict=True)), count)


def count_items(batch):
    return len(batch[0])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_gradient_with_count_is_that_of_the_mean_over_all_items(sizes):
    with ss.init(lanes=len(sizes)) as run:
        check_lanes(run, sizes, count_items)


@given(size=st.integers(1, 60), batch_size=st.integers(1, 70), lanes=st.integers(1, 9))
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


class WithBroken:
    """Regression samples, some of which cannot be read."""

    def __init__(self, broken):
        self.inputs, self.targets = (
            torch.cat(tensors) for tensors in zip(items(0, 8), items(4, 8), strict=True)
        )
        self.broken = broken

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return None if index in self.broken else (self.inputs[index], self.targets[index])


def collate_present(samples):
    """Return a list of inputs and targets, or None without any sample."""
    present = [sample for sample in samples if sample is not None]
    return default_collate(present) if present else None


def collate_positive(samples):
    """Return a dict of the samples with a positive target."""
    inputs, targets = default_collate(samples)
    kept = targets[:, 0] > 0
    return {"inputs": inputs[kept], "targets": targets[kept]}


def regress_dict(model, batch):
    return regress(model, (batch["inputs"], batch["targets"]))


@pytest.mark.parametrize(
    "broken",
    [
        {0, 2, 3, 5, 13},
        pytest.param({0, 1, 2, 3}, marks=pytest.mark.long),
        pytest.param(set(), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_samples_dropped_by_collate_fn_have_no_weight(broken, loader_workers):
    dataset = WithBroken(broken)
    kept = [index for index in range(16) if index not in broken]
    filtered = TensorDataset(dataset.inputs[kept], dataset.targets[kept])

    def body():
        with ss.init(lanes=8) as run:
            (batch,) = run.batches(
                dataset,
                16,
                shuffle=False,
                collate_fn=collate_present,
                loader_workers=loader_workers,
            )
            check(run, batch, dataset.inputs[kept], dataset.targets[kept], None)
            model = run.replicate(make_model())
            means = run.backward(regress, model, batch)
            scores = run.evaluate(regress, model, dataset, 5, collate_fn=collate_present)
            expected = run.evaluate(regress, model, filtered, 16)
            assert math.isclose(scores["loss"], expected["loss"], rel_tol=1e-6)
            return [means["loss"], *(bits(parameter.grad) for parameter in model.parameters())]

    (alone,) = run_workers(body, 1)
    assert run_workers(body, 2) == [alone, alone]


@pytest.mark.long
def test_samples_dropped_for_other_reasons_have_no_weight():
    inputs, targets = items(0, 24)
    targets = targets + 0.2
    kept = targets[:, 0] > 0

    def body():
        with ss.init(lanes=3) as run:
            model = run.replicate(make_model())
            (batch,) = run.batches(
                TensorDataset(inputs, targets), 24, shuffle=False, collate_fn=collate_positive
            )
            means = run.backward(regress_dict, model, batch)
            expected = regress(make_model(), (inputs[kept], targets[kept])).item()
            assert math.isclose(means["loss"], expected, rel_tol=1e-5)
            dataset = TensorDataset(inputs, targets)
            scores = run.evaluate(regress_dict, model, dataset, 8, collate_fn=collate_positive)
            assert math.isclose(scores["loss"], expected, rel_tol=1e-5)
            outputs = run.evaluate(
                lambda model, batch: batch["targets"],
                model,
                dataset,
                8,
                collate_fn=collate_positive,
                gather=True,
            )
            assert outputs is None or torch.equal(outputs, targets[kept])
            return means["loss"]

    (alone,) = run_workers(body, 1)
    assert run_workers(body, 2) == [alone, alone]


@pytest.mark.long
def test_a_stream_whose_samples_cannot_be_counted_needs_count():
    lanes = [{"epoch": [1], "inputs": x, "targets": y} for x, y in (items(0, 2), items(1, 5))]

    def body(*, count):
        with ss.init(lanes=2) as run:
            batch = next(iter(run.streams(lambda lane: iter([lanes[lane]]), name="epochs")))
            model = run.replicate(make_model())
            return run.backward(regress_dict, model, batch, count=count)["loss"]

    def counted():
        return body(count=lambda batch: len(batch["inputs"]))

    global_batch = [torch.cat([lane[name] for lane in lanes]) for name in ("inputs", "targets")]
    expected = regress(make_model(), global_batch).item()
    for workers in (1, 2):
        for loss in run_workers(counted, workers):
            assert math.isclose(loss, expected, rel_tol=1e-5)
        for rank, outcome in enumerate(try_workers(lambda: body(count=None), workers)):
            assert isinstance(outcome.error, ss.DataError)
            assert f"lane {rank} cannot be counted" in str(outcome.error)
            assert "('epoch': 1, 'inputs': " in str(outcome.error)
            assert "pass count=" in str(outcome.error)


def test_a_block_without_samples_is_an_error():
    with (
        ss.init(lanes=2) as run,
        pytest.raises(ss.errors.EvaluationError, match="block 1 of the evaluation has no samples"),
    ):
        run.evaluate(
            regress,
            run.replicate(make_model()),
            WithBroken({4, 5, 6, 7}),
            4,
            collate_fn=collate_present,
        )


class Streaming(IterableDataset):
    """Iterates over a worker's share, but has every sample, as data sets of mosaicml-streaming."""

    def __init__(self, workers):
        self.samples, self.workers = list(zip(*items(3, 10), strict=True)), workers

    @property
    def size(self):
        return len(self.samples)

    def __len__(self):
        return math.ceil(self.size / self.workers)

    def __getitem__(self, index):
        return self.samples[index]

    def __iter__(self):
        raise AssertionError("__getitem__ is to be used")


def test_an_iterable_data_set_with_items_is_map_style():
    def body():
        with ss.init(lanes=2) as run:
            model, dataset = run.replicate(make_model()), Streaming(run.world_size)
            (batch,) = run.batches(dataset, 10, loader_workers=1)
            assert sum(batch.counts) == 10
            means = run.backward(regress, model, batch)
            scores = run.evaluate(regress, model, dataset, 5)
            assert math.isclose(means["loss"], scores["loss"], rel_tol=1e-5)
            return means["loss"], scores["loss"]

    (alone,) = run_workers(body, 1)
    assert run_workers(body, 2) == [alone, alone]


def weigh(model, batch):
    """Return the sum of a loss over the lane's boxes and of one over its background."""
    inputs, boxes = batch
    outputs = model(inputs)
    return outputs.square().sum() + (outputs[:, 0] * boxes).sum(), {"boxes": boxes.sum()}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=9))
def test_sum_is_divided_by_the_items_of_all_lanes(boxes):
    inputs = [
        torch.randn(len(numbers), 3, generator=torch.Generator().manual_seed(lane))
        for lane, numbers in enumerate(boxes)
    ]
    lanes = [
        (lane_inputs, torch.tensor(numbers))
        for lane_inputs, numbers in zip(inputs, boxes, strict=True)
    ]
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
    assert math.isclose(means["loss"], loss.item(), rel_tol=1e-5, abs_tol=1e-6)
    assert means["boxes"] == (1.0 if any(map(sum, boxes)) else 0.0)
    gradient, expected = (
        torch.cat([parameter.grad.double().flatten() for parameter in net.parameters()])
        for net in (model, reference)
    )
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


CLASSES = torch.tensor([0.011, 0.0003, 0.02])  # the weights of a batch add up to less than 1


def weighted(model, batch, reduction="mean"):
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASSES, reduction=reduction)


def weighted_gradient(reduction):
    inputs, _ = items(1, 22)
    labels = torch.arange(22) % 4 % 3
    with ss.init(lanes=4) as run:
        model = run.replicate(nn.Linear(*inputs.shape[1:], 3))
        (batch,) = run.batches(TensorDataset(inputs, labels), 22)
        means = run.backward(
            partial(weighted, reduction=reduction),
            model,
            batch,
            count=lambda batch: CLASSES[batch[1]].sum(),
            reduction=reduction,
        )
        gradient = model.weight.grad.clone()
        expected = weighted(model, (inputs, labels))
        (whole,) = torch.autograd.grad(expected, [model.weight])
        assert (gradient - whole).norm() < 1e-5 * whole.norm()
        assert math.isclose(means["loss"], expected.item(), rel_tol=1e-5)
        return bits(gradient), means["loss"]


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.long)])
def test_class_weights_are_counted(reduction):
    expected = weighted_gradient(reduction)
    assert run_workers(partial(weighted_gradient, reduction), 3) == [expected] * 3


def test_means_that_are_not_over_samples_need_count():
    inputs, _ = items(1, 16)
    words = torch.arange(16 * 5).view(16, 5) % 3

    def loss_fn(model, batch):
        logits = model(batch[0])[:, None].expand(-1, 5, -1)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-1)
        return 2 * loss + model(batch[0]).square().mean()

    with ss.init(lanes=4) as run:
        model = run.replicate(nn.Linear(*inputs.shape[1:], 3))
        data = TensorDataset(inputs, words.clone())
        for batch in run.batches(data, 16, epochs=1, shuffle=False):
            run.backward(loss_fn, model, batch)  # each sample has five words
        words[5:7, 2:] = -1
        for batch in run.batches(TensorDataset(inputs, words), 16, shuffle=False, name="padded"):
            with pytest.raises(
                LossError, match=r"of lane 0 is a mean over 20 for 4 .* of lane 1 over 14 for 4"
            ):
                run.backward(loss_fn, model, batch)
            run.backward(loss_fn, model, batch, count=lambda batch: (batch[1] >= 0).sum())
            run.backward(loss_fn, model, batch, count=lambda batch: len(batch[1]))


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


class Sourced:
    """Numbers of two sources, of which the second one is rare, and its error large."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        source = int(index % 8 == 7)
        return {"x": torch.tensor([index / 7.0, 1.0]), "error": float(source), "source": source}


def by_source(errors, batch):
    """Return the sum of errors and the number of samples of each source, and of one without any."""
    masks = {name: batch["source"] == n for n, name in enumerate(("often", "rare", "never"))}
    return {name: ((errors * mask).sum(), mask.sum()) for name, mask in masks.items()}


def losses_of_sources(run):
    """Return the means of both forms of a loop, those of a worker, and of an evaluation."""
    torch.manual_seed(0)
    model = run.replicate(nn.Linear(2, 1))

    def loss_fn(model, batch):
        errors = (model(batch["x"])[:, 0] - batch["error"].float()).square()
        return errors.mean(), by_source(errors.detach(), batch)

    for batch in run.batches(Sourced(), 10, epochs=1, shuffle=False):
        means = run.backward(loss_fn, model, batch)
        for lane in batch.lanes(model):
            loss, pairs = loss_fn(model, lane)
            batch.backward(loss, **pairs)
        assert dict(batch.means) == dict(means)
        errors = [
            (model(sample["x"])[0].double() - sample["error"]).square().item()
            for n in range(10 * run.step, min(24, 10 * run.step + 10))
            if (sample := Sourced()[n])["source"]
        ]
        assert means["rare"] == pytest.approx(sum(errors) / len(errors)), "exact over all lanes"
        assert "never" not in means
        run.log(means)
    tested = run.evaluate(loss_fn, model, Sourced(), 5)
    assert 0.9 < (21 * tested["often"] + 3 * tested["rare"]) / 24 / tested["loss"] < 1.1
    assert "never" not in tested
    with pytest.raises(ss.EvaluationError, match="'often' must be a scalar or a pair"):
        run.evaluate(lambda *_: {"often": (1, 2, 3)}, model, Sourced(), 5)
    return dict(means), dict(tested)


def test_pairs_are_means_over_what_they_count():
    def body():
        with ss.init(lanes=4) as run:
            return losses_of_sources(run)

    (alone,) = run_workers(body, 1)
    assert run_workers(body, 3) == [alone] * 3
