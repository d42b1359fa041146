"""The workload that a trial run shows."""

from __future__ import annotations

from samestep.tools.scale.trials import Workload, read_workload

STARTED = {"event": "started", "lanes": 4, "devices": ["cpu"], "config": {"threads": 1}}


def test_the_workload_is_read_from_the_record():
    loop = {"event": "loop", "batch_size": 12}
    assert read_workload([STARTED, loop]) == Workload(4, 12, "cpu", 1)
    stream = {"event": "loop", "batch_size": None}
    assert read_workload([STARTED, stream]).batch_size is None
