"""Means over other items than the samples of a lane are refused, and all other losses accepted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.errors import EvaluationError, LossError
from tests.workers import run_workers

SAMPLES = 30  # of which lanes get different numbers


def data():
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(SAMPLES, 6, generator=generator) < torch.linspace(0.1, 0.9, SAMPLES)[:, None]
    mask[:, 0] = True
    labels = torch.randint(0, 6, (SAMPLES,), generator=generator)
    return TensorDataset(*torch.randn(2, SAMPLES, 6, generator=generator).unbind(), labels, mask)


def each(loss_fn, *tensors):
    return [loss_fn(*sample) for sample in zip(*tensors, strict=True)]


def masked_each(out, y, mask):
    return each(lambda o, t, m: F.mse_loss(o[m], t[m]), out, y, mask)


def quotient_each(out, y, mask):
    return each(lambda o, t, m: ((o - t).abs() * m).sum() / m.sum(), out, y, mask)


def ignoring(k, mask):
    return k.where(mask[:, 1], -100)


# the predictions, targets, labels and mask of a lane -> a loss
REFUSED = {
    "mse": lambda out, y, k, m: F.mse_loss(out[m], y[m]),
    "second of two": lambda out, y, k, m: F.mse_loss(out, y) + 0.1 * F.l1_loss(out[m], y[m]),
    "stacked": lambda out, y, k, m: torch.stack([out.mean(), F.huber_loss(out[m], y[m])]).sum(),
    "averaged heads": lambda out, y, k, m: (F.mse_loss(out, y) + F.mse_loss(out[m], y[m])) / 2,
    "bce": lambda out, y, k, m: F.binary_cross_entropy_with_logits(out[m], (y[m] > 0).float()),
    "kl": lambda out, y, k, m: F.kl_div(out.log_softmax(1)[m], y[m].exp(), reduction="none").mean(),
    "root": lambda out, y, k, m: F.mse_loss(out[m], y[m]).sqrt(),
    "quotient": lambda out, y, k, m: ((out - y).abs() * m).sum() / m.sum().clamp(min=1),
    "reciprocal": lambda out, y, k, m: ((out - y).abs() * m).sum() * (1 / m.sum()),
    "divided before": lambda out, y, k, m: ((out - y).square() * m / m.sum()).sum(),
    "sum of a loss": lambda out, y, k, m: (
        F.smooth_l1_loss(out[m], y[m], reduction="sum") / max(1, int(m.sum()))
    ),
    "weights": lambda out, y, k, m: (
        (F.cross_entropy(out, k, reduction="none") * y[:, 0].exp()).sum() / y[:, 0].exp().sum()
    ),
    "gathered": lambda out, y, k, m: -out.log_softmax(1).gather(1, k[:, None])[m[:, 1]].mean(),
    "first of ten": lambda out, y, k, m: sum(
        [1e-3 * out[:, n % 6].square().mean() for n in range(9)],
        F.cross_entropy(out, ignoring(k, m)),
    ),
    "sum": lambda out, y, k, m: 0.01 * F.mse_loss(out, y, reduction="sum"),
    "sum of classes": lambda out, y, k, m: F.cross_entropy(out, k, reduction="sum"),
}
ACCEPTED = {
    "mse": lambda out, y, k, m: F.mse_loss(out, y) + 0.1 * F.l1_loss(out, y),
    "each": lambda out, y, k, m: sum(masked_each(out, y, m)) / len(out),
    "each, reciprocal": lambda out, y, k, m: 2 * (sum(quotient_each(out, y, m)) * (1 / len(out))),
    "each, stacked": lambda out, y, k, m: torch.stack(quotient_each(out, y, m)).mean(),
    "mean of rows": lambda out, y, k, m: (
        (((out - y).abs() * m).sum(1) / m.sum(1)).mean()
        + F.cross_entropy(out, k, label_smoothing=0.1)
    ),
    "parameters": lambda out, y, k, m: (
        F.mse_loss(out, y) + 1e-3 * weight.square().mean() + 1e-4 * weight.abs().sum()
    ),
    "pairs": lambda out, y, k, m: (out @ out.T).square().mean(),
    "other pairs": lambda out, y, k, m: torch.pdist(out).mean(),
    "divided sum": lambda out, y, k, m: F.mse_loss(out, y, reduction="sum") / len(out),
    "multiplied sum": lambda out, y, k, m: (
        (1 / len(out)) * F.cross_entropy(out, k, reduction="sum")
    ),
    "plain sum": lambda out, y, k, m: out.square().sum(),
    "batchmean": lambda out, y, k, m: F.kl_div(
        out.log_softmax(1), y.softmax(1), reduction="batchmean"
    ),
    "soft labels": lambda out, y, k, m: F.cross_entropy(out, y.softmax(1)),
    "dice": lambda out, y, k, m: (
        1 - 2 * (out.sigmoid() * m).sum() / (out.sigmoid().sum() + m.sum())
    ),
    "normalized": lambda out, y, k, m: F.mse_loss(out, y) / F.mse_loss(out, y).detach(),
    "uncertain": lambda out, y, k, m: F.mse_loss(out, y) / weight.exp()[0, 0] + weight[0, 0],
    "accumulated": lambda out, y, k, m: F.mse_loss(out, y) / 4,
    "only in some lanes": lambda out, y, k, m: (
        F.mse_loss(out, y) + (out[:4].mean() if len(out) > 7 else 0)
    ),
}
weight = torch.zeros(0)


def means_of(loss_of, reduction="mean", **options):
    global weight  # noqa: PLW0603  the model's
    with ss.init(lanes=4) as run:
        model = run.replicate(nn.Linear(6, 6))
        weight = model.weight
        (batch,) = run.batches(data(), SAMPLES, epochs=1, shuffle=False)

        def loss_fn(model, batch):
            return loss_of(model(batch[0]), *batch[1:])

        return run.backward(loss_fn, model, batch, reduction=reduction, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_a_mean_over_other_items_needs_a_count(name):
    is_sum = name in {"sum", "sum of classes"}
    message = r"is a sum over its 7 samples.*reduction='sum'" if is_sum else r"Pass count="
    with pytest.raises(LossError, match=message):
        means_of(REFUSED[name])


@pytest.mark.parametrize("name", ["mse", "quotient"])
def test_with_a_count_it_is_the_mean_of_the_batch(name):
    means = means_of(REFUSED[name], count=lambda batch: int(batch[3].sum()))
    x, *rest = data().tensors
    with torch.no_grad():
        expected = REFUSED[name](F.linear(x, *parameters()), *rest)
    torch.testing.assert_close(means["loss"], float(expected))


def test_a_mode_that_sees_operations_does_not_matter():
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    with Counting():
        means_of(lambda out, y, k, m: 0.5 * F.mse_loss(out, y) + (0.1 * out.square()).mean() / 2)
    assert "mse_loss" in names


def parameters():
    with ss.init(lanes=4) as run:
        return [parameter.detach() for parameter in run.replicate(nn.Linear(6, 6)).parameters()]


def test_a_sum_with_its_reduction_is_divided_by_all_samples():
    means = means_of(REFUSED["sum of classes"], "sum")
    expected = means_of(lambda out, y, k, m: F.cross_entropy(out, k))
    torch.testing.assert_close(means["loss"], expected["loss"])


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_losses_are_accepted(name):
    means_of(ACCEPTED[name])


@pytest.mark.parametrize("name", ["mse", "sum"])
def test_all_workers_refuse_it(name):
    def refused():
        with pytest.raises(LossError) as error:
            means_of(REFUSED[name])
        return str(error.value)

    assert len(set(run_workers(refused, 2))) == 1


def evaluate(loss_of):
    with ss.init() as run:
        return run.evaluate(
            lambda _, batch: (loss_of(batch[0], *batch[1:]), {"n": batch[1].mean()}),
            *(nn.Identity(), data(), 8),
        )


@pytest.mark.parametrize("name", ["mse", "bce"])
def test_blocks_of_an_evaluation_are_compared_as_well(name):
    with pytest.raises(EvaluationError, match=r"block 0 is a mean over .* count= to run\.evaluate"):
        evaluate(REFUSED[name])


@pytest.mark.parametrize("name", ["mse", "each", "soft labels", "divided sum"])
def test_other_losses_of_an_evaluation_are_accepted(name):
    evaluate(ACCEPTED[name])
