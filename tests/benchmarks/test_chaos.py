from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.chaos.__main__ import chaos, chosen
from benchmarks.chaos.faults import FAULTS


@pytest.mark.timeout(600)
def test_a_run_under_faults_ends_like_an_undisturbed_one(tmp_path):
    seconds = chaos(tmp_path, seed=1, faults=len(FAULTS), log=print)
    assert {name: len(some) for name, some in seconds.items()} == {
        fault.__name__: 1 for fault in FAULTS
    }


def test_by_default_each_kind_of_fault_has_its_share():
    assert Counter(chosen(random.Random(0), sum(FAULTS.values()))) == FAULTS
    assert sum(FAULTS.values()) >= 30
