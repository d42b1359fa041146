"""Sharded models have the bits of replicated ones on simulated GPUs."""

from __future__ import annotations

import pytest

from tests.gpu.simulated import VISIBLE
from tests.sharded.jobs import digests


@pytest.mark.long
def test_two_workers_have_the_bits_of_one(gpus):
    names = ("tied", "few")
    expected = gpus.call(digests, names, {})
    results = gpus.workers(2, digests, names, {"shard": "full"}, **{VISIBLE: "0,1"})
    assert results == [expected] * 2
