from __future__ import annotations

from contextlib import closing

import pytest
import torch

from samestep.cluster import find_process
from samestep.comm.base import Alone
from samestep.config import merge
from samestep.record import open_record
from samestep.snapshot import SnapshotWriter
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager, Tracked


@pytest.mark.parametrize(("snapshot_every", "expected"), [("7", 1), ("10min", 1), (None, 0)])
def test_memory_is_allocated_once_the_optimizer_has_its_state(
    tmp_path, monkeypatch, snapshot_every, expected
):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = []
    monkeypatch.setattr(
        SnapshotWriter,
        "prepare",
        lambda _, shared, own_states: prepared.append((set(shared), own_states)),
    )
    config = merge({"dir": tmp_path, "snapshot_every": snapshot_every}, {})
    in_memory = InMemorySnapshots(None, find_process({}), Alone(), tmp_path, config.hot_every)
    with (
        closing(open_record(tmp_path, writes=True)) as record,
        closing(
            SnapshotManager(
                config, Alone(), record, "a", dict, None, in_memory, tracked=Tracked(None)
            )
        ) as manager,
    ):
        assert not manager.is_due(1)
        assert prepared == []
        manager.tracked.add("model", model, None)
        manager.tracked.add("optimizer", optimizer, None)
        for step in (2, 3):
            assert not manager.is_due(step)
    assert prepared == [({"model", "optimizer"}, {})] * expected
