from __future__ import annotations

import math

import pytest

import samestep as ss


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [("min", [3.0, 2.0, 2.0, math.nan], 2.0), ("max", [1.0, 1.5, 1.4, -math.inf], 1.5)],
)
def test_values_without_improvement_are_counted(mode, values, best):
    patience = ss.Patience(2, mode=mode)
    assert [patience.step(value) for value in values] == [False, False, False, True]
    resumed = ss.Patience(3, mode=mode)
    resumed.load_state_dict(patience.state_dict())
    assert (resumed.best, resumed.count, resumed.step(values[0])) == (best, 2, True)
    assert not resumed.step(best + (1 if mode == "max" else -1))


def test_nan_is_never_the_best():
    patience = ss.Patience(3)
    assert not patience.step(math.nan)
    assert not patience.step(5.0)
    assert patience.best == 5.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "patience must be a whole number of at least 1, got 0"),
        ((1, "lower"), "mode must be 'min' or 'max', got 'lower'"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ss.ConfigError, match=message):
        ss.Patience(arguments[0], **dict(zip(["mode"], arguments[1:], strict=False)))
