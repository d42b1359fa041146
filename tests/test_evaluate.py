from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification, regression

from samestep.comm.base import Alone
from samestep.config import Config
from samestep.errors import ConfigError, DataError, EvaluationError
from samestep.evaluate import Evaluation, evaluating
from samestep.step.lane_engine import LaneEngine
from tests.bits import bits
from tests.worlds import in_processes

LANES = 4
CLASSES = 5
SIZES = [1, 3, 37, 101]


class Scores:
    """Samples of logits and a label, and items of different numbers."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.logits = torch.randn(size, CLASSES, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.items = torch.randint(1, 9, (size,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.logits[index], self.labels[index], self.items[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(CLASSES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        self.net[3].eval()

    def forward(self, x):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.modules())
        return self.net(x)


def evaluation(world, dataset, batch_size=8, *, collate_fn=None, loader_workers=0, **options):
    lanes = LaneEngine(world, Config(**options), LANES, [torch.device("cpu")])
    return Evaluation(
        lanes, dataset, batch_size, collate_fn=collate_fn, loader_workers=loader_workers
    )


def means_of(fn, dataset, *, model=None, count=None, batch_size=8):
    return evaluation(Alone(), dataset, batch_size).means(fn, model, count)


def outputs_of(fn, dataset, batch_size=8):
    return evaluation(Alone(), dataset, batch_size).outputs(fn, None)


def losses(model, batch):
    logits, labels, _ = batch
    return nn.functional.cross_entropy(model(logits), labels), {
        "right": (logits.argmax(1) == labels).float().mean(),
        "noise": torch.rand(()),
    }


def comparable(values):
    return {
        name: bits(value) if isinstance(value, torch.Tensor) else float(value).hex()
        for name, value in values.items()
    }


# that of loader processes, from Python 3.12 on
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_means_have_the_same_bits_at_any_number_of_workers():
    def body(world):
        model = Model()
        found = []
        for size in SIZES:
            found.append(comparable(evaluation(world, Scores(size)).means(losses, model, None)))
            found.append(
                comparable(
                    evaluation(world, Scores(size)).means(
                        losses, model, lambda batch: batch[2].sum()
                    )
                )
            )
        assert (
            comparable(evaluation(world, Scores(size), loader_workers=2).means(losses, model, None))
            == found[-2]
        )
        assert [module.training for module in model.modules()] == [
            module.training for module in Model().modules()
        ]
        assert not model.net[1].num_batches_tracked
        assert bits(model.net[1].running_mean) == bits(torch.zeros(8))
        return found

    (expected,) = in_processes(1, body)
    for workers in (2, 3, 4):
        assert in_processes(workers, body) == [expected] * workers


@pytest.mark.parametrize("size", SIZES)
def test_means_are_over_samples_or_what_count_says(size):
    dataset, model = Scores(size), Model().eval()
    with torch.no_grad():
        each = nn.functional.cross_entropy(
            model(dataset.logits), dataset.labels, reduction="none"
        ).double()
    found = means_of(losses, dataset, model=model)
    assert found["loss"] == pytest.approx(each.mean().item(), rel=1e-6)
    assert found["right"] == pytest.approx(
        (dataset.logits.argmax(1) == dataset.labels).double().mean().item(), abs=1e-7
    )
    assert list(found) == ["loss", "right", "noise"]

    def per_item(model, batch):
        return (batch[0].sum(1) * batch[2]).sum() / batch[2].sum()

    expected = (dataset.logits.sum(1).double() * dataset.items).sum() / dataset.items.sum()
    assert means_of(per_item, dataset, count=lambda batch: batch[2].sum())["loss"] == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_blocks_without_items_do_not_count():
    dataset = Scores(37)

    def fn(model, batch):
        rare = batch[1] == 3
        return {"mean": batch[0][rare].mean()}  # NaN over nothing

    def count(batch):
        return int((batch[1] == 3).sum())

    expected = dataset.logits[dataset.labels == 3].double().mean().item()
    assert means_of(fn, dataset, count=count)["mean"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(EvaluationError, match="count gave 0 items for all of the data set"):
        means_of(fn, dataset, count=lambda batch: 0)


def metrics():
    return {
        "accuracy": classification.MulticlassAccuracy(CLASSES, average="micro"),
        "counts": classification.MulticlassConfusionMatrix(CLASSES),
        "area": classification.MulticlassAUROC(CLASSES),
        "mean": torchmetrics.MeanMetric(),
        "largest": torchmetrics.MaxMetric(),
        "error": torchmetrics.MeanSquaredError(),
        "correlation": regression.PearsonCorrCoef(),
    }


def collection():
    kinds = [
        classification.MulticlassPrecision(CLASSES),
        classification.MulticlassRecall(CLASSES),
        classification.MulticlassF1Score(CLASSES),
    ]
    return torchmetrics.MetricCollection(kinds, prefix="macro_")


def update(single, many, batch):
    logits, labels, items = batch
    single["accuracy"].update(logits, labels)
    single["counts"].update(logits, labels)
    single["area"].update(logits.softmax(1), labels)
    single["mean"].update(logits.sum(1), items)
    single["largest"].update(logits)
    single["error"].update(logits[:, 0].contiguous(), logits[:, 1].contiguous())
    single["correlation"].update(logits[:, 0].contiguous(), items.float())
    many.update(logits, labels)


@pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero")
def test_torchmetrics_are_merged_as_one_pass_in_one_process():
    dataset = Scores(101)
    single, many = metrics(), collection()
    update(single, many, (dataset.logits, dataset.labels, dataset.items))
    expected = {name: metric.compute() for name, metric in single.items()} | many.compute()

    def body(world):
        mine, macro = metrics(), collection()

        def fn(model, batch):
            update(mine, macro, batch)
            return {"plain": batch[0].mean(), **mine, "macro": macro}

        twice = [evaluation(world, dataset).means(fn, None, None) for _ in range(2)]
        assert comparable(twice[0]) == comparable(twice[1])
        return twice[0]

    everyone = {workers: in_processes(workers, body) for workers in (1, 2, 3)}
    first = everyone[1][0]
    assert set(first) == {"plain", *expected}
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(first[name], dtype=value.dtype), value, rtol=1e-5, atol=1e-6
        )
    for name in ("accuracy", "largest"):
        assert first[name] == expected[name].item()
    assert torch.equal(first["counts"], expected["counts"])
    for workers, found in everyone.items():
        assert [comparable(values) for values in found] == [comparable(first)] * workers


class Pair(NamedTuple):
    label: object
    words: object


def forms(model, batch):
    logits, labels, _ = batch
    words = [f"class {label}" for label in labels.tolist()]
    return {
        "tensor": logits,
        "list": words,
        "dict": {"logits": logits, "words": words},
        "tuple": (labels, words),
        "pair": Pair(labels, words),
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_outputs_come_back_in_the_order_of_the_data_set(workers):
    def body(world):
        return [
            [
                evaluation(world, Scores(size)).outputs(
                    lambda model, batch, form=form: forms(model, batch)[form], None
                )
                for size in SIZES
            ]
            for form in ("tensor", "list", "dict", "tuple", "pair")
        ]

    first, *others = in_processes(workers, body)
    assert others == [[[None] * len(SIZES)] * 5] * (workers - 1)
    for number, size in enumerate(SIZES):
        dataset = Scores(size)
        words = [f"class {label}" for label in dataset.labels.tolist()]
        tensor, listed, by_name, pair, named = (form[number] for form in first)
        assert bits(tensor) == bits(by_name["logits"]) == bits(dataset.logits)
        assert listed == by_name["words"] == pair[1] == named[1] == words
        assert torch.equal(pair[0], dataset.labels)
        assert torch.equal(named[0], dataset.labels)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (
            lambda model, batch: batch[0][:1],
            "got Tensor of length 1 for 8 samples; expected one entry each",
        ),
        (lambda model, batch: batch[0].mean(), "got Tensor of length None for 8 samples"),
        (lambda model, batch: {"a": batch[0], "b": [1]}, "got list of length 1 for 8 samples"),
        (lambda model, batch: (batch[0], 7), "got int of length None for 8 samples"),
    ],
)
def test_outputs_that_are_not_one_a_sample_are_refused(output, told):
    with pytest.raises(EvaluationError, match=told):
        outputs_of(output, Scores(37))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda model, batch: batch[0], r"'loss' is a tensor of shape \(8, 5\); expected a scalar"),
        (
            lambda model, batch: {"words": "many"},
            "'words' is str; expected a scalar or a torchmetrics object",
        ),
        (lambda model, batch: None, "'loss' is NoneType; expected a scalar"),
    ],
)
def test_results_that_are_no_scalars_are_refused(returned, told):
    with pytest.raises(EvaluationError, match=told):
        means_of(returned, Scores(37))


def test_what_cannot_be_evaluated_is_refused():
    for batch_size in (0, -1, True, 2.5):
        with pytest.raises(ConfigError, match=f"batch_size={batch_size} was given"):
            evaluation(Alone(), Scores(3), batch_size)
    with pytest.raises(DataError, match="the data set to evaluate has no samples"):
        evaluation(Alone(), Scores(0))


def test_values_that_are_not_finite_are_told_as_they_are():
    def fn(model, batch):
        return {"infinite": math.inf, "nan": math.nan}

    found = means_of(fn, Scores(3))
    assert found["infinite"] == math.inf
    assert math.isnan(found["nan"])


def test_modes_are_put_back_after_an_error():
    model = Model()
    with suppress(KeyError), evaluating(model):
        assert not model.net[1].training
        raise KeyError
    assert [module.training for module in model.modules()] == [
        module.training for module in Model().modules()
    ]
    assert not model.net[3].training


def test_bfloat16_is_asked_for_as_in_training():
    seen = []

    def fn(model, batch):
        seen.append((model(batch[0]) @ torch.ones(CLASSES, 1)).dtype)
        return 0.0

    for precision in ("float32", "bfloat16"):
        evaluation(Alone(), Scores(3), precision=precision).means(fn, Model(), None)
    assert {torch.float32, torch.bfloat16} == set(seen)
