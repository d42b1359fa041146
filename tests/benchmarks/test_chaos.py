from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.chaos.__main__ import chaos, chosen
from benchmarks.chaos.faults import FAULTS


@pytest.mark.timeout(300)
def test_a_run_under_fire_ends_as_if_it_had_been_left_alone(tmp_path):
    seconds = chaos(tmp_path, seed=1, faults=len(FAULTS), epochs=4, tell=print)
    assert {name: len(some) for name, some in seconds.items()} == {
        fault.__name__: 1 for fault in FAULTS
    }


def test_a_long_form_has_each_kind_its_share():
    assert Counter(chosen(random.Random(0), sum(FAULTS.values()))) == FAULTS
    assert sum(FAULTS.values()) >= 30
