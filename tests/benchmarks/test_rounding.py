from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import rounding


@pytest.mark.long
def test_the_recipe_is_scored_with_an_exchange_dtype():
    options = Namespace(epochs=1, lanes=4)
    found = rounding.scores("bfloat16", 0, options)
    assert 0 < found["model_top1"] < 100
    assert found["model_loss"] != rounding.scores(None, 0, options)["model_loss"]
