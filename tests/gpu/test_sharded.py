"""Sharded models on simulated GPUs have the bits of replicated ones, and free what they gather."""

from __future__ import annotations

import pytest

from tests.gpu.simulated import VISIBLE
from tests.sharded.jobs import digests
from tests.sharded.test_models import trained

FULL = {"shard": "full"}
SOME = ("tied", "failed")
MORE = ("partly", "checkpoints", "twice", "few", "evaluated", "averaged", "adversaries")
ONE = {VISIBLE: "0"}


def watched(names, shard):
    """Return what `digests` does; each stream has to wait for what others did to its memory."""
    from tests.gpu.simulated.device import LIBRARY

    LIBRARY.sim_watch_uses()
    return digests(names, shard)


@pytest.mark.parametrize(
    ("workers", "visible", "names"),
    [
        pytest.param(2, "0,1", SOME, id="2 workers with NCCL"),
        *(
            pytest.param(workers, visible, names, id=name, marks=pytest.mark.long)
            for name, workers, visible, names in [
                ("1 worker", 1, "0", SOME),
                ("2 workers that share a device", 2, "0", SOME),
                ("3 workers with NCCL", 3, "0,1,2", SOME),
                ("other jobs", 3, "0,1,2", MORE),
            ]
        ),
    ],
)
def test_sharded_models_have_the_bits_of_replicated_ones(workers, visible, names, gpus):
    (expected,) = gpus.workers(1, digests, names, {}, **ONE)
    results = gpus.workers(workers, watched, names, FULL, **{VISIBLE: visible})
    assert results == [expected] * workers


@pytest.mark.long
@pytest.mark.parametrize("keep", ["lane", "step"])
def test_units_may_be_kept_on_devices(keep, gpus):
    (expected,) = gpus.workers(1, digests, SOME, {}, **ONE)
    results = gpus.workers(2, watched, SOME, {**FULL, "keep": keep}, **{VISIBLE: "0,1"})
    assert results == [expected] * 2


@pytest.mark.long
def test_sharded_models_resume_on_other_devices(gpus, tmp_path):
    (expected,) = gpus.workers(1, trained, tmp_path / "whole", {}, 6, **ONE)
    gpus.workers(2, trained, tmp_path / "run", FULL, 6, 3, **{VISIBLE: "0,1"})
    results = gpus.workers(3, trained, tmp_path / "run", FULL, 6, **{VISIBLE: "0,1,2"})
    assert results == [expected] * 3


def without_waits():
    """Train while FSDP2 frees what it gathered without a wait of the stream that allocated it."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    FSDPParamGroup._wait_all_gather_streams_on_event = lambda *_: None
    digests(("tied",), FULL)


@pytest.mark.long
def test_memory_that_is_freed_too_early_is_found(gpus):
    with pytest.raises(AssertionError, match="memory was freed while a stream used it"):
        gpus.workers(2, without_waits, **{VISIBLE: "0,1"})
