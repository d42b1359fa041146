"""Logging: values by name, and the lowest and highest worker of means."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.errors import RecordError
from samestep.metrics import Means
from samestep.run.mixins import scalars_of
from samestep.step.lane_pass import LaneResult
from tests.jobs import Net, classify, images
from tests.jobs import events as events_in


def means(*losses):
    """Return means over one lane with one item per worker."""
    return Means(
        [LaneResult(lane, lane, 1, {"loss": loss, "size": 2.0}) for lane, loss in enumerate(losses)]
    )


def test_means_are_logged_with_their_range_over_workers():
    assert scalars_of(means(1.0, 4.0), {"rate": torch.tensor(0.5)}) == (
        {"loss": 2.5, "size": 2.0, "rate": 0.5},
        {"loss": 1.0, "size": 2.0},
        {"loss": 4.0, "size": 2.0},
    )


def test_mappings_prefix_their_names():
    values, low, high = scalars_of(
        {}, {"generators": means(1.0, 2.0), "judges": means(5.0), "rate": 1, "scores": {"f1": 0.25}}
    )
    assert list(values) == [
        "generators/loss",
        "generators/size",
        "judges/loss",
        "judges/size",
        "rate",
        "scores/f1",
    ]
    assert (
        values["generators/loss"],
        values["judges/loss"],
        values["rate"],
        values["scores/f1"],
    ) == (1.5, 5.0, 1.0, 0.25)
    assert low == {
        "generators/loss": 1.0,
        "generators/size": 2.0,
        "judges/loss": 5.0,
        "judges/size": 2.0,
    }
    assert high == {**low, "generators/loss": 2.0}


@pytest.mark.parametrize("prefixed", [False, True])
def test_plain_values_have_no_range_over_workers(prefixed):
    plain = {"norm": 3.0}
    values, low, high = scalars_of({}, {"all": plain}) if prefixed else scalars_of(plain, {})
    assert (values, low, high) == ({"all/norm" if prefixed else "norm": 3.0}, {}, {})


def test_run_logs_several_means_per_step_and_values_between_steps(tmp_path):
    with ss.init(lanes=2, dir=tmp_path) as run:
        model, other = run.replicate(Net()), run.replicate(Net())
        run.log(start=0)
        for batch in run.batches(images(8), 4):
            run.log(
                one=run.backward(classify, model, batch),
                other=run.backward(classify, other, batch),
                rate=0.5,
            )
        run.log(score=1.0)
    logged = [
        (event["step"], "between" in event, list(event["values"]))
        for event in events_in(tmp_path, "scalars")
    ]
    named = ["one/loss", "one/accuracy", "other/loss", "other/accuracy", "rate"]
    assert logged == [
        (0, True, ["start"]),
        (0, False, named),
        (1, False, named),
        (2, True, ["score"]),
    ]


@pytest.mark.parametrize(
    ("means", "others", "words"),
    [
        ({}, {"a": "x"}, "a number for 'a', got str 'x'"),
        ({"rate": None}, {}, "a number for 'rate', got NoneType None"),
        ({}, {"inner": {"a": torch.zeros(2)}}, r"for 'inner/a', got Tensor of shape \(2,\)"),
        ({}, {"a": 10**400}, "'a' that fits into a float, at most 1.8e\\+308, got a larger int"),
        ({}, {"a": Fraction(10**5000)}, "got a larger Fraction"),
        ({}, {"a": Decimal("-1e400")}, "got a larger Decimal"),
        ({}, {"a": np.complex64(1j)}, "a number for 'a', got complex64"),
        ({}, {"a": np.ones((1, 2))}, r"got ndarray of shape \(1, 2\)"),
        ("loss", {}, "a number without a name, got str 'loss'"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(means, others, words):
    with pytest.raises(RecordError, match=words):
        scalars_of(means, others)
    with ss.init() as run, pytest.raises(RecordError, match=words):
        run.log(means, **others)


def test_numbers_of_any_kind_are_logged():
    numbers = {"fraction": Fraction(1, 4), "decimal": Decimal("0.25"), "text": "0.25"}
    numbers |= {"item": np.float16(0.25), "array": np.array([0.25]), "tensor": torch.tensor([0.25])}
    assert set(scalars_of(numbers, {})[0].values()) == {0.25}
    assert scalars_of({"a": float("-inf"), "b": np.float32("inf")}, {})[0] == {
        "a": float("-inf"),
        "b": float("inf"),
    }
