from __future__ import annotations

import pytest

from benchmarks import rounding


@pytest.mark.long
@pytest.mark.parametrize("name", rounding.JOBS)
def test_a_recipe_is_scored_with_an_exchange_dtype(name):
    titles = rounding.JOBS[name].titles
    scores = rounding.scores(name, "bfloat16", 0, 1, 4)
    others = rounding.scores(name, None, 0, 1, 4)
    assert {*titles} <= {*scores}
    assert all(scores[score] >= 0 for score in titles)
    assert any(scores[score] != others[score] for score in titles)
