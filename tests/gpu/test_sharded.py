"""Sharded models on simulated GPUs have the bits of replicated ones, and free what they gather."""

from __future__ import annotations

import pytest

from tests.gpu.simulated import VISIBLE
from tests.sharded.jobs import digests

FULL = {"shard": "full"}
NAMES = ("tied", "partly", "averaged", "scaled")


@pytest.mark.parametrize(
    ("workers", "visible"),
    [
        pytest.param(1, "0", id="1 worker", marks=pytest.mark.long),
        pytest.param(2, "0,1", id="2 workers with NCCL"),
        pytest.param(2, "0", id="2 workers that share a device", marks=pytest.mark.long),
        pytest.param(3, "0,1,2", id="3 workers with NCCL", marks=pytest.mark.long),
    ],
)
def test_sharded_models_have_the_bits_of_replicated_ones(workers, visible, gpus):
    expected = gpus.call(digests, NAMES, {})
    results = gpus.workers(workers, digests, NAMES, FULL, **{VISIBLE: visible})
    assert results == [expected] * workers
