from __future__ import annotations

import pytest

from samestep.watch.curves import Curve
from samestep.watch.score import NAME, Score

UNNAMED = (NAME, "highest")


def curves(**values):
    """Return curves whose values follow each step, from the first on; None for no value."""
    made = {}
    for name, column in values.items():
        made[name] = Curve()
        for step, value in enumerate(column):
            if value is not None:
                made[name].append((step, True), 0.0, value)
    return made


def scored(logged, scores):
    """Return the score of a run after snapshots with scores, by the number of complete steps."""
    score = Score()
    for step, value in scores.items():
        score.add(step, 0.0, value, logged)
    return score.scalar(logged)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, None),
        ({2: 0.5}, ("val", "highest")),
        ({2: 0.5, 4: 0.75}, ("val", "highest")),
        ({2: 0.9}, ("train", "highest")),
        ({2: -0.1, 4: -0.05}, ("error", "lowest")),
        ({4: 0.75}, ("val", "highest")),  # both had it, and evaluations are rarer
        ({2: 0.75}, UNNAMED),  # at another step
        ({2: 0.5, 4: 0.05}, ("val", "highest")),  # it may log it later
        ({2: 0.5, 3: 0.1, 4: 0.2}, UNNAMED),
        ({2: 7.0, 4: 8.0}, UNNAMED),
    ],
)
def test_a_score_has_the_name_of_the_scalar_with_its_values(scores, expected):
    train, error = [0.1, 0.9, 0.2, 0.75], [None, 0.1, None, 0.05]
    logged = curves(train=train, val=[None, 0.5, None, 0.75], error=error)
    assert scored(logged, scores) == expected


def test_a_value_that_is_logged_after_its_snapshot_gives_the_name():
    score, before = Score(), curves(loss=[2.0])
    score.add(1, 0.0, 0.5, before)
    assert score.scalar(before) == UNNAMED
    assert score.scalar(curves(loss=[2.0], val=[0.5])) == ("val", "highest")


def test_a_snapshot_that_is_written_again_counts_once_and_a_resume_forgets_later_ones():
    score, logged = Score(), curves(val=[0.5, 0.7])
    for step in (1, 1, 2):
        score.add(step, 0.0, logged["val"].points().value[step - 1], logged)
    assert len(score.curve) == 2
    score.discard_after((1, False))
    assert len(score.curve) == 1
    score.add(2, 0.0, 0.7, logged)
    assert len(score.curve) == 2
    score.discard_after((float("-inf"), False))
    assert score.scalar(logged) is None
