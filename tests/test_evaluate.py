from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torchmetrics import classification, regression, wrappers

from samestep import check_metric
from samestep.comm.base import Alone
from samestep.config import Config
from samestep.data.agreement import DataCheck
from samestep.errors import ConfigError, DataError, EvaluationError
from samestep.evaluate import Evaluation, evaluating
from samestep.metrics import _plain
from samestep.step.lane_engine import LaneEngine
from tests.bits import bits
from tests.docs.blocks import ROOT, blocks_of
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
    check = DataCheck(0, world.rank, world.size, world.all_gather_json)
    return Evaluation(
        lanes, dataset, batch_size, check, collate_fn=collate_fn, loader_workers=loader_workers
    )


def means_of(fn, dataset, *, model=None, count=None, batch_size=8):
    return evaluation(Alone(), dataset, batch_size).means(fn, model, count)


def outputs_of(fn, dataset, batch_size=8):
    return evaluation(Alone(), dataset, batch_size).outputs(fn, None)


@pytest.mark.parametrize("returned", [(1.0, {}, {}), (1.0, 2.0), (1.0,)])
def test_results_are_a_loss_and_a_dict(returned):
    with pytest.raises(EvaluationError, match=r"got \(float.*\); put all values into the dict"):
        means_of(lambda model, batch: returned, Scores(3))


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


# from loader processes, since Python 3.12
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_means_have_the_same_bits_at_any_number_of_workers():
    def body(world):
        model = Model()
        means = []
        for size in SIZES:
            means.append(comparable(evaluation(world, Scores(size)).means(losses, model, None)))
            means.append(
                comparable(
                    evaluation(world, Scores(size)).means(
                        losses, model, lambda batch: batch[2].sum()
                    )
                )
            )
        assert (
            comparable(evaluation(world, Scores(size), loader_workers=2).means(losses, model, None))
            == means[-2]
        )
        assert [module.training for module in model.modules()] == [
            module.training for module in Model().modules()
        ]
        assert not model.net[1].num_batches_tracked
        assert bits(model.net[1].running_mean) == bits(torch.zeros(8))
        return means

    (expected,) = in_processes(1, body)
    for workers in (2, 3, 4):
        assert in_processes(workers, body) == [expected] * workers


@pytest.mark.parametrize("size", SIZES)
def test_means_are_over_samples_or_items_that_count_gives(size):
    dataset, model = Scores(size), Model().eval()
    with torch.no_grad():
        each = nn.functional.cross_entropy(
            model(dataset.logits), dataset.labels, reduction="none"
        ).double()
    means = means_of(losses, dataset, model=model)
    assert means["loss"] == pytest.approx(each.mean().item(), rel=1e-6)
    assert means["right"] == pytest.approx(
        (dataset.logits.argmax(1) == dataset.labels).double().mean().item(), abs=1e-7
    )
    assert list(means) == ["loss", "right", "noise"]

    def per_item(model, batch):
        return (batch[0].sum(1) * batch[2]).sum() / batch[2].sum()

    expected = (dataset.logits.sum(1).double() * dataset.items).sum() / dataset.items.sum()
    assert means_of(per_item, dataset, count=lambda batch: batch[2].sum())["loss"] == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_items_may_have_weights():
    dataset, weight = Scores(37), torch.linspace(0.001, 0.03, CLASSES)

    def fn(model, batch):
        return nn.functional.cross_entropy(batch[0], batch[1], weight=weight)

    means = means_of(fn, dataset, count=lambda batch: weight[batch[1]].sum())
    expected = fn(None, (dataset.logits, dataset.labels)).item()
    assert means["loss"] == pytest.approx(expected, rel=1e-5)


def test_equal_accuracies_are_equal_numbers():
    class Right:
        def __len__(self):
            return 397

        def __getitem__(self, index):
            return torch.tensor(index >= 15)

    def accuracies(model, batch):
        return {"exact": batch, "rounded": batch.float().mean()}

    means = [means_of(accuracies, Right(), batch_size=size) for size in (64, 100, 397)]
    assert {each["exact"] for each in means} == {382 / 397}
    assert {each["rounded"] for each in means} != {382 / 397}  # floats are not changed


WEIGHT = torch.tensor([0.1, 0.2, 1.0, 3.0, 0.5])


def as_loss(logits, labels):
    return F.cross_entropy(logits, labels, WEIGHT)


def as_number(logits, labels):
    return {"other": logits.mean(), "loss": as_loss(logits, labels).item()}


def as_module(logits, labels):
    return nn.NLLLoss(ignore_index=2)(logits.log_softmax(1), labels), {"n": labels.float().mean()}


@pytest.mark.parametrize("result", [as_loss, as_number, as_module])
def test_a_mean_over_other_items_than_samples_needs_a_count(result):
    dataset = Scores(37)
    message = r"cross-entropy of block 0 is a mean over .* for 8 samples.* count= to run\.evaluate"
    with pytest.raises(EvaluationError, match=message):
        means_of(lambda _, batch: result(*batch[:2]), dataset)
    means_of(lambda _, batch: result(*batch[:2]), dataset, count=lambda batch: len(batch[0]))


def each_sample(logits, labels):
    losses = [as_loss(logits[n : n + 1], labels[n : n + 1]) for n in range(len(labels))]
    return torch.stack(losses).mean()


def equal_weights(logits, labels):
    return F.cross_entropy(logits, labels, torch.full([CLASSES], 0.3))


def sequences(logits, labels):
    """Two labels of each sample."""
    return F.cross_entropy(logits.repeat(2, 1), labels.repeat(2))


def probabilities(logits, labels):
    return F.cross_entropy(logits, F.one_hot(labels, CLASSES).float(), WEIGHT)


@pytest.mark.parametrize("result", [each_sample, equal_weights, sequences, probabilities])
def test_a_mean_over_samples_needs_no_count(result):
    dataset = Scores(37)
    expected = result(dataset.logits, dataset.labels).item()
    means = means_of(lambda _, batch: result(*batch[:2]), dataset)
    assert means["loss"] == pytest.approx(expected, rel=1e-5)


def test_blocks_without_items_do_not_count():
    dataset = Scores(37)

    def fn(model, batch):
        rare = batch[1] == 3
        return {"mean": batch[0][rare].mean()}  # NaN over nothing

    def count(batch):
        return int((batch[1] == 3).sum())

    expected = dataset.logits[dataset.labels == 3].double().mean().item()
    assert means_of(fn, dataset, count=count)["mean"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(
        EvaluationError, match="count must return at least 1 item over the data set, got 0"
    ):
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


def collection(prefix="macro_"):
    kinds = [
        classification.MulticlassPrecision(CLASSES),
        classification.MulticlassRecall(CLASSES),
        classification.MulticlassF1Score(CLASSES),
    ]
    return torchmetrics.MetricCollection(kinds, prefix=prefix)


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
        own_metrics, macro = metrics(), collection()

        def fn(model, batch):
            update(own_metrics, macro, batch)
            return {"plain": batch[0].mean(), **own_metrics, "macro": macro}

        twice = [evaluation(world, dataset).means(fn, None, None) for _ in range(2)]
        assert comparable(twice[0]) == comparable(twice[1])
        return twice[0]

    values_by_workers = {workers: in_processes(workers, body) for workers in (1, 2, 3)}
    first = values_by_workers[1][0]
    assert set(first) == {"plain", *expected}
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(first[name], dtype=value.dtype), value, rtol=1e-5, atol=1e-6
        )
    for name in ("accuracy", "largest"):
        assert first[name] == expected[name].item()
    assert torch.equal(first["counts"], expected["counts"])
    for workers, values_of_ranks in values_by_workers.items():
        assert [comparable(values) for values in values_of_ranks] == [comparable(first)] * workers


def composed():
    def accuracy(average="micro"):
        return classification.MulticlassAccuracy(CLASSES, average=average)

    twice = accuracy()
    return {
        "error": 1 - accuracy(),
        "twice": twice + twice,
        "classes": wrappers.ClasswiseWrapper(accuracy(None)),
        "transformed": wrappers.LambdaInputTransformer(accuracy(), lambda scores: -scores),
        "several": torchmetrics.MetricCollection({"rest": 1 - accuracy(), "right": accuracy()}),
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_composed_torchmetrics_are_merged_as_one_pass_in_one_process(workers):
    dataset, single = Scores(37), composed()
    for metric in single.values():
        metric.update(dataset.logits, dataset.labels)
    expected = _plain({name: metric.compute() for name, metric in single.items()})
    expected |= expected.pop("several")
    right = (dataset.logits.argmax(1) == dataset.labels).float().mean().item()
    assert expected["error"] == pytest.approx(1 - right)
    assert expected["twice"] == pytest.approx(2 * right)

    def body(world):
        own_metrics = composed()

        def fn(model, batch):
            for metric in own_metrics.values():
                metric.update(*batch[:2])
            return own_metrics

        return [evaluation(world, dataset).means(fn, None, None) for _ in range(2)]

    for evaluations in in_processes(workers, body):
        for values in evaluations:
            assert values.keys() == expected.keys()
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


class Extremes:
    """The sum of logits, and the labels of the two samples with the highest logits."""

    def __init__(self):
        self.total = torch.zeros(())
        self.highest = []

    def update(self, logits, labels):
        self.total = self.total + logits.sum()
        self.highest += [
            (float(row.max()), int(label)) for row, label in zip(logits, labels, strict=True)
        ]
        self.highest = sorted(self.highest)[-2:]

    def merge(self, other):
        self.total = self.total + other.total
        self.highest = sorted(self.highest + other.highest)[-2:]

    def compute(self):
        return {"total": self.total, "labels": [label for _, label in self.highest]}


def test_metrics_of_users_follow_the_laws():
    dataset = Scores(37)
    parts = list(zip(dataset.logits.split(10), dataset.labels.split(10), strict=True))
    check_metric(Extremes, parts, atol=1e-4)


def test_metrics_of_users_have_the_same_bits_at_any_number_of_workers():
    def body(world):
        def fn(model, batch):
            extremes = Extremes()
            extremes.update(*batch[:2])
            return {"mean": batch[0].mean(), "extremes": extremes}

        return [evaluation(world, Scores(size)).means(fn, None, None) for size in SIZES]

    (expected,) = in_processes(1, body)
    for size, values in zip(SIZES, expected, strict=True):
        dataset = Scores(size)
        assert values["extremes"]["total"] == pytest.approx(dataset.logits.sum().item(), rel=1e-4)
        highest = dataset.logits.max(1).values.argsort()[-2:]
        assert values["extremes"]["labels"] == dataset.labels[highest].tolist()
    for workers in (2, 3, 5):
        assert in_processes(workers, body) == [expected] * workers


def documented_confusion():
    """Return the class of docs/evaluation.md."""
    page = ROOT / "docs" / "evaluation.md"
    (text,) = (block.text for block in blocks_of(page) if "class Confusion" in block.text)
    names = {"torch": torch, "__name__": __name__}
    exec(text, names)
    return names["Confusion"]


Confusion = documented_confusion()  # where pickle finds it


def test_a_confusion_matrix_and_scores_take_one_pass():
    dataset = Scores(37)
    predictions = dataset.logits.argmax(1)
    parts = list(zip(predictions.split(10), dataset.labels.split(10), strict=True))
    check_metric(lambda: Confusion(CLASSES), parts)
    rows = []

    def fn(model, batch):
        logits, labels, _ = batch
        rows.extend(labels.tolist())
        confusion = Confusion(CLASSES)
        confusion.update(logits.argmax(1), labels)
        right = (logits.argmax(1) == labels).float()
        return {"accuracy": right.mean(), "confusion": confusion}

    scores = means_of(fn, dataset)
    assert rows == dataset.labels.tolist()
    counts = scores["confusion"]["counts"]
    assert counts.tolist() == [
        [
            ((dataset.labels == label) & (predictions == other)).sum().item()
            for other in range(CLASSES)
        ]
        for label in range(CLASSES)
    ]
    assert scores["accuracy"] == pytest.approx(counts.diag().sum().item() / len(dataset))
    f1 = torchmetrics.functional.f1_score(
        predictions, dataset.labels, "multiclass", num_classes=CLASSES, average="macro"
    )
    assert scores["confusion"]["macro_f1"] == pytest.approx(f1.item())
    iou = torchmetrics.functional.jaccard_index(
        predictions, dataset.labels, "multiclass", num_classes=CLASSES, average="none"
    )
    torch.testing.assert_close(scores["confusion"]["iou"].float(), iou)


def test_a_metric_without_weak_references_is_refused():
    class Slotted:
        __slots__ = ("total",)

        def update(self, value):
            self.total = value

        def merge(self, other):
            self.total += other.total

        def compute(self):
            return self.total

    def fn(model, batch):
        metric = Slotted()
        metric.update(1.0)
        return {"slotted": metric}

    with pytest.raises(EvaluationError, match="Slotted must support weak references"):
        means_of(fn, Scores(3))


def test_a_metric_that_is_returned_twice_is_refused():
    extremes = Extremes()

    def fn(model, batch):
        extremes.update(*batch[:2])
        return {"extremes": extremes}

    means_of(fn, Scores(3))
    for size in (3, 37):
        with pytest.raises(EvaluationError, match="'extremes' was returned before; create a new"):
            means_of(fn, Scores(size))


def test_metrics_that_share_a_state_are_both_merged():
    accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
    both = {"accuracy": accuracy, "error": 1 - accuracy}

    def fn(model, batch):
        accuracy.update(batch[0], batch[1])
        return both

    dataset = Scores(37)
    right = (dataset.logits.argmax(1) == dataset.labels).float().mean().item()
    means = means_of(fn, dataset)
    assert means == pytest.approx({"accuracy": right, "error": 1 - right})


@pytest.mark.parametrize("workers", [1, 3])
def test_results_of_one_name_are_refused(workers):
    def body(world, *prefixes):
        collections = {prefix: collection(prefix) for prefix in prefixes}

        def fn(model, batch):
            for metrics in collections.values():
                metrics.update(batch[0], batch[1])
            return {
                "mean": batch[0].mean(),
                "macro_MulticlassRecall": batch[0].mean(),
                **{f"c{number}": metrics for number, metrics in enumerate(collections.values())},
            }

        try:
            return list(evaluation(world, Scores(37)).means(fn, None, None))
        except EvaluationError as error:
            return str(error)

    for names in in_processes(workers, body, "a_", "b_"):
        assert len(names) == 2 + 3 + 3
        assert {"a_MulticlassRecall", "b_MulticlassRecall"} < set(names)
    for message in in_processes(workers, body, "a_", "macro_"):
        assert message.startswith("two results are named 'macro_MulticlassRecall'; rename one")


def test_a_loss_and_a_result_of_that_name_are_refused():
    with pytest.raises(EvaluationError, match="two results are named 'loss'"):
        means_of(lambda model, batch: (1.0, {"loss": 2.0}), Scores(3))


@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_that_some_blocks_lack_are_refused(workers):
    def body(world):
        def fn(model, batch):
            last = len(batch[0]) == 5
            return {"mean": 1.0} if last else {"largest": torchmetrics.MaxMetric()}

        try:
            evaluation(world, Scores(37)).means(fn, None, None)
        except EvaluationError as error:
            return str(error)

    for message in in_processes(workers, body):
        assert message.endswith(r"got ['largest'] for block 0 and [] for block 4")


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
def test_outputs_are_returned_in_data_set_order(workers):
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
    ("output", "message"),
    [
        (
            lambda model, batch: batch[0][:1],
            r"must have one entry per sample \(8\), got Tensor of length 1",
        ),
        (lambda model, batch: batch[0].mean(), "got Tensor of length None"),
        (lambda model, batch: {"a": batch[0], "b": [1]}, "got list of length 1"),
        (lambda model, batch: (batch[0], 7), "got int of length None"),
    ],
)
def test_outputs_without_one_entry_per_sample_are_refused(output, message):
    with pytest.raises(EvaluationError, match=message):
        outputs_of(output, Scores(37))


def padded(model, batch):
    lengths = batch[1] + 1
    return {"ids": torch.zeros(len(lengths), int(lengths.max())), "length": lengths}


@pytest.mark.parametrize("workers", [1, 2])
def test_outputs_of_unequal_widths_are_refused_at_their_first_block(workers):
    def body(world):
        blocks = []

        def fn(model, batch):
            blocks.append(len(batch[0]))
            return padded(model, batch)

        dataset = Scores(64)
        dataset.labels = torch.arange(64) // 8 if world.size == 1 else torch.arange(64) // 32
        with pytest.raises(EvaluationError) as raised:
            evaluation(world, dataset).outputs(fn, None)
        return len(blocks), str(raised.value)

    # the device has its next block; two workers differ only from each other
    expected_blocks, other = (3, 1) if workers == 1 else (4, 4)
    for count, message in in_processes(workers, body):
        assert count == expected_blocks
        assert re.search(
            r"got \{'ids': tensor \[samples, 1\], 'length': tensor \[samples\]\} in block 0 and"
            rf" \{{'ids': tensor \[samples, 2\], .* in block {other}; .* return a list",
            message,
        )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda model, batch: batch[0],
            r"'loss' must be a scalar .* or a metric, got Tensor of shape \(8, 5\)",
        ),
        (
            lambda model, batch: {"words": "many"},
            "'words' must be a scalar .*, got str",
        ),
        (lambda model, batch: None, "'loss' must be a scalar .*, got NoneType"),
    ],
)
def test_results_that_are_neither_scalars_nor_metrics_are_refused(returned, message):
    with pytest.raises(EvaluationError, match=message):
        means_of(returned, Scores(37))


def test_wrong_batch_sizes_and_empty_data_sets_are_refused():
    for batch_size in (0, -1, True, 2.5):
        with pytest.raises(
            ConfigError, match=f"batch_size must be an integer of at least 1, got {batch_size}"
        ):
            evaluation(Alone(), Scores(3), batch_size)
    with pytest.raises(DataError, match="the data set to evaluate has no samples"):
        evaluation(Alone(), Scores(0))


def test_values_that_are_not_finite_are_returned():
    def fn(model, batch):
        return {"infinite": math.inf, "nan": math.nan}

    means = means_of(fn, Scores(3))
    assert means["infinite"] == math.inf
    assert math.isnan(means["nan"])


def test_modes_are_restored_after_an_error():
    model = Model()
    with suppress(KeyError), evaluating(model):
        assert not model.net[1].training
        raise KeyError
    assert [module.training for module in model.modules()] == [
        module.training for module in Model().modules()
    ]
    assert not model.net[3].training


def test_precision_is_that_of_training():
    seen = []

    def fn(model, batch):
        seen.append((model(batch[0]) @ torch.ones(CLASSES, 1)).dtype)
        return 0.0

    for precision in ("float32", "bfloat16"):
        evaluation(Alone(), Scores(3), precision=precision).means(fn, Model(), None)
    assert {torch.float32, torch.bfloat16} == set(seen)
