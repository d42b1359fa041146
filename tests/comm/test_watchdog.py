from __future__ import annotations

import json
import os
import signal
import threading
import time
from multiprocessing import get_context

import pytest

from samestep.comm import rendezvous, watchdog
from samestep.errors import HangError, WorldError
from tests.workers import run_workers, try_workers
from tests.worlds import (
    be_patient,
    distributed_world,
    in_processes,
    limit_waits,
    on_hosts,
    shared_world,
)


def names_of_threads():
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name != "samestep store"]  # of rank 0, for all workers


def wait_forever(world):
    while True:
        world.barrier("waiting")


def test_the_thread_ends_with_the_world():
    def body(world):
        assert names_of_threads() == ["MainThread", "samestep watchdog"]
        world.close()
        assert names_of_threads() == ["MainThread"]
        world.close()

    in_processes(2, body)


def test_a_forked_process_does_not_stop_the_watchdog():
    def body(world):
        child = get_context("fork").Process(target=world.status.close)
        child.start()
        child.join()
        world.barrier("waiting")
        assert child.exitcode == 0
        assert names_of_threads() == ["MainThread", "samestep watchdog"]

    in_processes(2, body)


def test_all_others_report_the_first_failure():
    def body(world):
        if world.rank == 2:
            world.status.step = 5
            world.status.report_failure(LookupError("no such thing\nat all"))
            world.status.report_failure(RuntimeError("something else"))
            return ""
        with pytest.raises(WorldError) as caught:
            wait_forever(world)
        world.status.report_failure(caught.value)
        return str(caught.value)

    first, second, _ = in_processes(3, body)
    for rank, message in enumerate((first, second)):
        assert message.startswith(
            f"worker {rank} got no response from other workers while waiting; worker 2 (host "
        )
        assert "failed first, at step 5: LookupError: no such thing (" in message


def test_a_worker_that_failed_and_closed_is_not_terminated():
    """Its world is closed, so no other worker waits for it."""

    def body(world):
        watchdog.EXIT_SECONDS = watchdog.CLOSE_SECONDS = 60.0  # its thread may be late
        world.status.report_failure(LookupError())
        world.close()
        return world.status._exit_by

    assert in_processes(2, body) == [float("inf")] * 2


@pytest.mark.parametrize("garbage", [b"{", b"[1]", b'{"rank": 1}', b'"text"'])
def test_garbage_in_the_store_is_harmless(garbage, monkeypatch):
    def body(world):
        status = world.status
        status._call(status._publish, 60)  # the next heartbeat is a minute away
        world.barrier("publishing")
        status._client._store.set(f"heartbeat/{1 - world.rank}", garbage)
        assert not status._call(status._heartbeats, 60)
        world.barrier("reading")
        status._client._store.set("alarm", garbage)
        status._call(status._publish, 60)
        assert world.all_gather_json(1, "waiting") == [1, 1]
        status.finish()
        return names_of_threads()

    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 60.0)
    assert on_hosts(2, 2, body) == [["MainThread", "samestep watchdog"]] * 2


def test_one_worker_reports_and_the_others_name_it():
    def body():
        be_patient(hung_rank=3)
        world = shared_world()
        world.barrier("waiting")
        limit_waits(world, 3)
        if world.rank == 3:
            time.sleep(3600)
        with pytest.raises(WorldError) as caught:
            world.barrier("waiting again")
        world.close()
        return isinstance(caught.value, HangError), str(caught.value)

    *others, sleeper = try_workers(body, 4)
    assert sleeper.exitcode == 1
    reports = [text for is_report, text in (end.value for end in others) if is_report]
    summaries = [text for is_report, text in (end.value for end in others) if not is_report]
    assert len(reports) == 1
    assert reports[0].startswith(
        "timed out after 3 s waiting for worker 3: "
        "workers 0, 1 and 2 were waiting again at step 0\n"
    )
    assert len(summaries) == 2
    for text in summaries:
        assert "workers 0, 1 and 2 were waiting again at step 0; see the report of worker" in text


def test_heartbeats_are_plain_data():
    def body():
        world = distributed_world(hosts=2)
        world.status.set_activity("counting")
        world.status._write_at = world.status._publish_at = 0.0
        world.status._call(world.status._publish, 60)
        world.barrier("publishing")
        (beat,) = json.loads(world.status._client._store.get(f"heartbeat/{1 - world.rank}"))
        world.barrier("reading")
        world.close()
        return beat["rank"], beat["activity"], beat["pid"] != os.getpid(), beat["stack"]

    assert run_workers(body, 2) == [(1, "counting", True, None), (0, "counting", True, None)]


def test_workers_of_a_host_publish_one_heartbeat(monkeypatch):
    def body(world):
        status = world.status
        world.barrier("starting")
        status._call(status._publish, 60)
        status._write_at = status._publish_at = 0.0
        world.barrier("writing")
        status._call(status._publish, 60)
        world.barrier("publishing")
        keys = [status._client.get(f"heartbeat/{rank}") for rank in range(world.size)]
        world.barrier("reading")
        return [None if beats is None else [beat["rank"] for beat in beats] for beats in keys]

    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 60.0)
    (first, *others), *_ = in_processes(3, body)
    assert first == [0, 1, 2]
    assert others == [None, None]


def test_workers_that_cannot_open_their_board_publish_their_own_status(monkeypatch):
    def body(world):
        status = world.status
        status._write_at = status._publish_at = 0.0
        status._call(status._publish, 60)
        world.barrier("publishing")
        seen = status._call(status._heartbeats, 60)
        world.barrier("reading")
        return status._board.ranks, sorted(seen)

    monkeypatch.setattr(rendezvous, "create_boards", lambda _: None)
    assert in_processes(3, body) == [
        (range(rank, rank + 1), [other for other in range(3) if other != rank]) for rank in range(3)
    ]


@pytest.mark.long
def test_another_worker_publishes_for_a_host_s_first_one_that_is_stopped():
    def body():
        world = distributed_world(timeout=30, hosts=2)
        pids = world.all_gather_json(os.getpid(), "sharing pids")
        limit_waits(world, 4)
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        with pytest.raises(WorldError) as caught:
            world.barrier("waiting")
        world.status.close()  # which would end this process soon
        if world.rank == 0:
            time.sleep(watchdog.DIAGNOSIS_SECONDS)
            os.kill(pids[2], signal.SIGKILL)
        return str(caught.value)

    messages = [end.value or "" for end in try_workers(body, 4)]
    (report,) = [text for text in messages if "likely cause: SIGSTOP" in text]
    assert report.startswith("timed out after 4 s waiting for worker 2: workers 0, 1 and 3 were ")


def test_samples_of_other_hosts_reach_the_worker_that_writes_the_record():
    def body(world):
        share, samples = world.status.share_sample, []
        others = [1] if world.rank == 0 else []
        while world.rank == 0 and samples != [{"cpu": 1}]:
            samples = share({"cpu": 0}, others)
        if world.rank == 1:
            assert share({"cpu": 1}, others) == []
        world.barrier("sampling")
        world.status.report_failure(LookupError())
        assert share({"cpu": 2}, others) is None
        world.status.close()
        assert share({"cpu": 2}, others) is None

    on_hosts(2, 2, body)
