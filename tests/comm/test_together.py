from __future__ import annotations

import threading

import pytest

import samestep as ss
from samestep.comm.base import Alone
from samestep.comm.together import call_once, run_together
from tests.workers import run_workers, try_workers
from tests.worlds import be_patient, limit_waits


def test_job_runs_alone():
    assert run_together(Alone(), lambda: 7, "working") == [7]
    assert call_once(Alone(), threading.current_thread, "working") is (threading.main_thread())


def test_others_wait_without_a_limit_and_get_the_result():
    def body():
        be_patient()
        with ss.init(lanes=2) as run:
            done = threading.Event()
            run.barrier("starting")
            limit_waits(run._world, 5)

            def prepare():
                done.wait(6)  # more than the limit
                return {"rank": run.rank}

            return run.once(prepare)

    assert run_workers(body, 2) == [{"rank": 0}] * 2


def test_exception_reaches_all_workers():
    def body():
        with ss.init(lanes=2) as run:
            with pytest.raises(ValueError if run.is_main else ss.WorldError, match="no space"):
                run.once(lambda: int("no space"))
            return run.once(lambda: 2)

    assert run_workers(body, 2) == [2, 2]


def test_call_of_the_run_in_it_is_an_error():
    def body():
        with ss.init(lanes=2) as run:
            run.once(lambda: run.all_gather(0))

    assert all(outcome.failed for outcome in try_workers(body, 2))
