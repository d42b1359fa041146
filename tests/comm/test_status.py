from __future__ import annotations

from samestep.comm.status import WorkerStatus


def test_activities_nest_and_waiting_is_separate():
    status = WorkerStatus()
    with status.doing("evaluating"):
        status.set_activity("loading data")
        with status.waiting("gathering"):
            assert (status.activity, status.collective) == ("loading data", "gathering")
    assert (status.activity, status.collective) == ("starting", "")
