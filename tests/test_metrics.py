from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
import torchmetrics
from torchmetrics import classification, regression, wrappers

from samestep import Metric, check_metric
from samestep.errors import ConfigError, EvaluationError
from samestep.metrics import as_metric, copied
from samestep.torchmetrics import TorchMetrics

CLASSES = 4
SIZES = (5, 1, 8, 3)


def classified(sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, CLASSES, generator=generator).softmax(1),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def measured():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, generator=generator), torch.randn(size, generator=generator))
        for size in SIZES
    ]


class Total:
    """A correct metric, which the metrics below break."""

    def __init__(self):
        self.values = []

    def update(self, *values):
        self.values += values

    def merge(self, other):
        self.values += other.values

    def compute(self):
        return {"sum": sum(self.values), "words": (str(len(self.values)), [max(self.values)])}


class Spread:
    """Variance by the parallel algorithm: its merge rounds."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, torch.zeros(())

    def update(self, *values):
        for value in values:
            part = Spread()
            part.count, part.mean = 1, value
            self.merge(part)

    def merge(self, other):
        count = self.count + other.count
        if not count:
            return
        difference = other.mean - self.mean
        self.squares = (
            self.squares + other.squares + difference**2 * self.count * other.count / count
        )
        self.mean += difference * other.count / count
        self.count = count

    def compute(self):
        return self.squares / self.count


class WrongSum(Total):
    def merge(self, other):
        self.values = [max(self.values + other.values)]


class Ungrouped(Total):
    def __init__(self):
        super().__init__()
        self.merges = 0

    def merge(self, other):
        self.merges += 1
        self.values += other.values
        if other.merges:
            self.values.append(1)


class Ordered(Total):
    def compute(self):
        return self.values[0] - self.values[-1] + 2 * self.values[1]


class NeedsSamples(Total):
    def merge(self, other):
        self.values += other.values or [7]


class Forgets(Total):
    def __getstate__(self):
        return {"values": self.values[:1]}


class Consumes(Total):
    def compute(self):
        total = sum(self.values)
        self.values = self.values[:1]
        return total


class Takes(Total):
    def merge(self, other):
        self.values += other.values
        other.values = [1]


class Aliases(Total):
    def merge(self, other):
        if self.values:
            self.values += other.values
        else:
            self.values = other.values


class Shared(Total):
    values: ClassVar = []

    def __init__(self):
        pass


class Both(torchmetrics.Metric):
    """A metric that holds others, and whose `reset` leaves them out, as torchmetrics' own does."""

    def __init__(self):
        super().__init__()
        self.accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
        self.recall = classification.MulticlassRecall(CLASSES)
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, *batch):
        self.samples += len(batch[1])
        for metric in self.parts():
            metric.update(*batch)

    def compute(self):
        return self.samples + sum(metric.compute() for metric in self.parts())

    def parts(self):
        return [self.accuracy, self.recall]


class InList(Both):
    """Torch does not see the metrics that it holds."""

    def __init__(self):
        super().__init__()
        self.held = {"all": [self.accuracy, 1 - self.recall]}
        del self.accuracy, self.recall

    def parts(self):
        return self.held["all"][:1]

    def compute(self):
        return super().compute() + self.held["all"][1].compute()

    def update(self, *batch):
        super().update(*batch)
        self.held["all"][1].update(*batch)


class Wrapper(wrappers.abstract.WrapperMetric):
    def __init__(self, metric):
        super().__init__()
        self.metric = metric

    def update(self, *batch):
        self.metric.update(*batch)

    def compute(self):
        return self.metric.compute()


class Counts(torchmetrics.Metric):
    """A metric that counts in an attribute that is not a state."""

    def __init__(self, start=0):
        super().__init__()
        self.samples = start

    def update(self, *batch):
        self.samples = self.samples + len(batch[1])

    def compute(self):
        return self.samples


class Recounts(Counts):
    def reset(self):
        super().reset()
        self.samples = 0


class CountsInBuffer(Counts):
    def __init__(self):
        super().__init__()
        del self.samples
        self.register_buffer("samples", torch.tensor(0))


NUMBERS = [(3, 5, 2), (7,), (11, 13), (1, 1, 4, 9)]


def test_the_protocol_is_recognized():
    assert isinstance(Total(), Metric)
    assert not isinstance(torchmetrics.MeanMetric(), Metric)
    assert as_metric("x", 1.0) is as_metric("x", torch.ones(3)) is None
    assert isinstance(as_metric("x", torchmetrics.MeanMetric()), Metric)


@pytest.mark.parametrize("make", [Total, Spread])
def test_correct_metrics_pass(make):
    check_metric(make, NUMBERS)


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (WrongSum, "merging all parts must equal updating one metric"),
        (Shared, "merging all parts must equal updating one metric"),
        (Ungrouped, "must not depend on the grouping"),
        (Ordered, "must not depend on the order"),
        (NeedsSamples, "merging an empty part must not change the value"),
        (Forgets, "pickling must not change a part"),
        (Consumes, "compute must not change the state"),
        (Takes, "merge must not change the other metric"),
        (Aliases, "merge must not change the other metric, nor share its state"),
    ],
)
def test_each_broken_law_is_named(make, law):
    with pytest.raises(AssertionError, match=law):
        check_metric(make, NUMBERS)


def test_arguments_of_the_law_test_are_checked():
    with pytest.raises(ConfigError, match="parts must have at least 3 tuples of arguments, got 2"):
        check_metric(Total, NUMBERS[:2])
    total = Total()
    with pytest.raises(AssertionError, match=r"make\(\) must return a new object"):
        check_metric(lambda: total, NUMBERS)
    with pytest.raises(EvaluationError, match=r"make\(\) must return a metric"):
        check_metric(list, NUMBERS)


def test_a_metric_that_cannot_be_pickled_is_refused():
    class Local(Total):
        pass

    with pytest.raises(EvaluationError, match="define its class at module level"):
        check_metric(Local, NUMBERS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: classification.MulticlassAccuracy(CLASSES, average="micro"),
        lambda: classification.MulticlassAUROC(CLASSES),
        lambda: classification.MulticlassAUROC(CLASSES, thresholds=10),
        lambda: classification.MulticlassConfusionMatrix(CLASSES),
        lambda: 1 - classification.MulticlassAccuracy(CLASSES, average="micro"),
        lambda: (
            classification.MulticlassAccuracy(CLASSES) + classification.MulticlassRecall(CLASSES)
        ),
        lambda: classification.MulticlassAccuracy(CLASSES, average=None)[1],
        Both,
        InList,
        lambda: 1 - Wrapper(classification.MulticlassAccuracy(CLASSES)),
        lambda: Wrapper(
            torchmetrics.MetricCollection(
                [
                    classification.MulticlassAccuracy(CLASSES),
                    classification.MulticlassF1Score(CLASSES),
                ]
            )
        ),
        lambda: wrappers.LambdaInputTransformer(
            classification.MulticlassAccuracy(CLASSES), transform_pred=lambda scores: -scores
        ),
        lambda: wrappers.ClasswiseWrapper(classification.MulticlassRecall(CLASSES, average=None)),
        lambda: torchmetrics.MetricCollection(
            [
                classification.MulticlassPrecision(CLASSES),
                classification.MulticlassRecall(CLASSES),
                classification.MulticlassCalibrationError(CLASSES),
            ],
            prefix="a_",
            postfix="_z",
        ),
        lambda: torchmetrics.MetricCollection(
            {
                "precision": classification.MulticlassPrecision(CLASSES),
                "recall": classification.MulticlassRecall(CLASSES),
            },
            compute_groups=[["precision", "recall"]],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:No (posi|nega)tive samples in targets")
def test_torchmetrics_of_classes_follow_the_laws(make):
    check_metric(make, classified(), atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        torchmetrics.MeanSquaredError,
        regression.PearsonCorrCoef,
        regression.SpearmanCorrCoef,
        regression.R2Score,
        lambda: wrappers.MultitaskWrapper({"a": torchmetrics.MeanSquaredError()}),
    ],
)
@pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero")
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
def test_torchmetrics_of_numbers_follow_the_laws(make):
    parts = measured()
    parts[1] = (torch.randn(2), torch.randn(2))  # of one sample there is no correlation
    if isinstance(make(), wrappers.MultitaskWrapper):
        parts = [({"a": x}, {"a": y}) for x, y in parts]
    check_metric(make, parts, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        wrappers.MinMaxMetric,
        lambda accuracy: wrappers.Running(accuracy, window=2),
        lambda accuracy: 1 - wrappers.MinMaxMetric(accuracy),
        lambda accuracy: torchmetrics.MetricCollection([wrappers.MinMaxMetric(accuracy)]),
        lambda accuracy: torchmetrics.aggregation.RunningMean(window=2),
        lambda accuracy: Wrapper(wrappers.MetricTracker(accuracy)),
    ],
)
def test_wrappers_that_cannot_be_merged_are_refused(make):
    metric = make(classification.MulticlassAccuracy(CLASSES))
    with pytest.raises(EvaluationError, match=r"'x' contains .*; return the metric that it wraps"):
        as_metric("x", metric)


def merge_updated(metrics):
    for metric, part in zip(metrics, classified(), strict=False):
        metric.update(*part)
    metrics[0].merge(metrics[1])


@pytest.mark.parametrize("make", [Counts, Recounts, CountsInBuffer])
def test_attributes_that_are_not_merged_are_refused(make):
    metrics = [as_metric("x", make()) for _ in range(2)]
    message = rf"'x' cannot be merged, because update changes {make.__name__}\.samples, which is"
    with pytest.raises(EvaluationError, match=message):
        merge_updated(metrics)


def test_an_attribute_that_reset_clears_is_refused_even_with_one_part():
    metric = Recounts()
    metric.update(*classified()[0])
    only = as_metric("x", metric)
    with pytest.raises(EvaluationError, match=r"update changes Recounts\.samples"):
        only.compute()


def test_attributes_that_updates_do_not_change_are_allowed():
    metrics = [as_metric("x", Counts(math.nan)) for _ in range(2)]
    merge_updated(metrics)
    assert math.isnan(metrics[0].compute())


def test_other_objects_with_compute_are_refused():
    tracker = wrappers.MetricTracker(classification.BinaryAccuracy())
    with pytest.raises(EvaluationError, match=r"'x' must be a scalar, a samestep\.Metric"):
        as_metric("x", tracker)


def test_states_that_are_no_tensors_are_refused():
    class Words(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("words", default=[], dist_reduce_fx=None)

        def update(self, word):
            self.words.append(word)

        def compute(self):
            return len(self.words)

    metric = Words()
    metric.update("a")
    with pytest.raises(EvaluationError, match="Words has a non-tensor state"):
        as_metric("x", metric)


def test_bootstrapped_metrics_are_merged_copy_by_copy():
    metric = wrappers.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=3, raw=True)
    values = [torch.rand(9) for _ in range(3)]
    torch.manual_seed(0)
    for value in values:
        metric.update(value)
    expected = metric.compute()["raw"]
    torch.manual_seed(0)
    merged = TorchMetrics("x", metric)
    merged.parts.clear()
    for value in values:
        merged.update(value)
    torch.testing.assert_close(merged.compute()["raw"], expected)


def test_groups_of_a_collection_are_found_again_for_each_part():
    def make():
        return torchmetrics.MetricCollection(
            {
                "all": classification.MulticlassAccuracy(2, average="micro"),
                "known": classification.MulticlassAccuracy(2, average="micro", ignore_index=1),
            }
        )

    parts = [  # the states agree in the first
        (torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])),
        (torch.tensor([0, 1, 1]), torch.tensor([1, 1, 0])),
        (torch.tensor([1, 1]), torch.tensor([1, 0])),
    ]
    expected = {}
    for name, metric in make().items():
        for part in parts:
            metric.update(*part)
        expected[name] = metric.compute()
    merged = as_metric("x", make())
    for part in parts:
        merged.update(*part)
    assert merged.compute() == expected
    assert expected["all"] != expected["known"]


def test_a_torchmetrics_object_is_not_pickled():
    metric = as_metric("x", classification.MulticlassAccuracy(CLASSES, average=None)[0])
    metric.update(*classified()[0])
    copy = copied(metric)
    assert copy.metric is metric.metric
    assert copy.compute() == metric.compute()
    assert metric.__getstate__()["metric"] is None


def test_a_torchmetrics_object_is_restored_after_an_error():
    class Fails(torchmetrics.MeanMetric):
        def compute(self):
            raise ArithmeticError

    metric = Fails()
    available = metric.distributed_available_fn
    metric.update(3)
    merged = as_metric("x", metric)
    with pytest.raises(ArithmeticError):
        merged.compute()
    assert metric.distributed_available_fn is available
    assert not metric.mean_value
