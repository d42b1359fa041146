from __future__ import annotations

import json
import os
import threading
import time
from multiprocessing import get_context

import pytest

from samestep.comm import watchdog as watch
from samestep.comm.status import WorkerStatus
from samestep.errors import HangError, WorldError
from tests.workers import run_workers, try_workers
from tests.worlds import in_processes, shared_world


def names_of_threads():
    return [thread.name for thread in threading.enumerate()]


def meet_for_ever(world):
    while True:
        world.barrier("meeting")


def test_where_a_worker_is_stands_in_plain_attributes():
    status = WorkerStatus()
    with status.doing("evaluating"):
        status.at("loading data")
        with status.waiting("gathering"):
            assert (status.part, status.waits) == ("loading data", "gathering")
    assert (status.part, status.waits) == ("starting", "")


def test_the_thread_goes_with_the_world():
    def body(world):
        assert names_of_threads() == ["MainThread", "samestep watch"]
        world.close()
        assert names_of_threads() == ["MainThread"]
        world.close()

    in_processes(2, body)


def test_a_process_that_is_forked_leaves_the_watch_to_the_worker():
    def body(world):
        child = get_context("fork").Process(target=world.status.close)
        child.start()
        child.join()
        world.barrier("meeting")
        assert child.exitcode == 0
        assert names_of_threads() == ["MainThread", "samestep watch"]

    in_processes(2, body)


def test_the_first_failure_is_what_all_others_tell():
    def body(world):
        if world.rank == 2:
            world.status.step = 5
            world.status.report_failure(LookupError("no such thing\nat all"))
            world.status.report_failure(RuntimeError("something else"))
            return ""
        with pytest.raises(WorldError) as caught:
            meet_for_ever(world)
        world.status.report_failure(caught.value)
        return str(caught.value)

    first, second, _ = in_processes(3, body)
    for rank, message in enumerate((first, second)):
        assert message.startswith(
            f"worker {rank} got no answer from the others while meeting; worker 2 (host "
        )
        assert "failed first, at step 5: LookupError: no such thing (" in message


def test_a_worker_that_failed_and_closed_goes_on_as_it_likes():
    """Its world has ended, and with that nobody waits for it any more."""

    def body(world):
        world.status.report_failure(LookupError())
        world.close()
        return world.status._ends_at

    assert in_processes(2, body) == [float("inf")] * 2


@pytest.mark.parametrize("garbage", [b"{", b"[1]", b'{"rank": 1}', b'"text"'])
def test_what_a_stranger_writes_into_the_store_harms_nobody(garbage, monkeypatch):
    def body(world):
        status = world.status
        status._ask(status._beat, 5)  # the next one is long away
        world.barrier("telling")
        status._line._store.set(f"beat/{1 - world.rank}", garbage)
        assert not status._ask(status._beats_of_others, 5)
        world.barrier("looking")
        status._line._store.set("alarm", garbage)
        status._ask(status._beat, 5)
        assert world.all_gather_json(1, "meeting") == [1, 1]
        status.end()
        return names_of_threads()

    monkeypatch.setattr(watch, "BEAT_SECONDS", 60.0)
    assert in_processes(2, body) == [["MainThread", "samestep watch"]] * 2


def test_one_reports_and_the_others_say_who(monkeypatch):
    def body():
        world = shared_world(timeout=0.3)
        world.barrier("meeting")
        if world.rank == 3:
            time.sleep(3600)
        with pytest.raises(WorldError) as caught:
            world.barrier("meeting again")
        world.close()
        return isinstance(caught.value, HangError), str(caught.value)

    monkeypatch.setattr(watch, "FAREWELL_SECONDS", 0.3)
    *others, sleeper = try_workers(body, 4)
    assert sleeper.exitcode == 1
    reports = [text for is_report, text in (end.value for end in others) if is_report]
    told = [text for is_report, text in (end.value for end in others) if not is_report]
    assert len(reports) == 1
    assert reports[0].startswith(
        "worker 3 did not come within 0.3 s while workers 0, 1 and 2 were meeting again at step 0\n"
    )
    assert len(told) == 2
    for text in told:
        assert (
            "worker 3 did not come within 0.3 s while workers 0, 1 and 2 were meeting again at step 0: worker "
            in text
        )
        assert "tells more" in text


def test_what_is_told_is_plain_data():
    def body():
        world = shared_world()
        world.status.at("counting")
        world.status._ask(world.status._beat, 5)
        world.barrier("telling")
        told = json.loads(world.status._line._store.get(f"beat/{1 - world.rank}"))
        world.barrier("looking")
        world.close()
        return told["rank"], told["part"], told["pid"] != os.getpid(), told["stack"]

    assert run_workers(body, 2) == [(1, "counting", True, None), (0, "counting", True, None)]
