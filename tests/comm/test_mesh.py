from __future__ import annotations

import os
import re
import signal
import socket
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep.comm import mesh, watchdog
from samestep.comm.mesh import SLOT_BYTES, StatusBoard, boards, create_boards
from samestep.comm.rendezvous import PeerInfo, PeerListener
from samestep.errors import WorldError
from tests.leaks import shared_files
from tests.workers import run_workers, try_workers
from tests.worlds import in_processes, patient_shared_world, shared_world


def wait_until_error(world, what):
    """Call barriers until one fails; return the message of its error."""
    with pytest.raises(WorldError) as caught:
        wait_forever(world, what)
    return str(caught.value)


def wait_forever(world, what):
    while True:
        world.barrier(what)


def entry(pid, address):
    return PeerInfo("host", pid, "home", address)


def state_of(pid):
    """Return the state of a process: R, S, T if it is stopped, Z if it has exited."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_that_dies_is_named_by_the_waiting_others():
    def body():
        world = shared_world(timeout=300)
        pids = world.all_gather_json(os.getpid(), "sharing pids")
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        message = wait_until_error(world, "waiting")
        assert f"worker {world.rank} got no response from other workers while waiting" in message
        assert f"worker 3 (process {pids[3]})" in message
        assert "last completed call: sharing pids" in message

    assert [outcome.exitcode for outcome in try_workers(body, 4)] == [0, 0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("leave", ["die", "close"])
def test_an_exit_is_noticed_if_a_forked_process_holds_the_connection(
    leave,
):
    noticed = get_context("fork").Event()

    def body():
        world = shared_world(timeout=300)
        child = os.fork() if world.rank == 1 else None
        if child == 0:
            signal.pause()
        world.barrier("forking")
        if world.rank == 0:
            message = wait_until_error(world, "waiting")
            noticed.set()
            return message
        if leave == "die":
            # once all have exited, the child is killed with the worker's group of processes
            os.kill(os.getpid(), signal.SIGKILL)
        world.close()
        assert noticed.wait(30)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ""

    first, second = try_workers(body, 2)
    assert second.exitcode == (-signal.SIGKILL if leave == "die" else 0)
    assert "lost connection: worker 1 (process" in first.value


def test_a_worker_that_leaves_is_noticed_by_the_others():
    def body():
        world = shared_world(timeout=300)
        world.barrier("waiting")
        if world.rank == 1:
            world.close()
            with pytest.raises(WorldError, match="this worker has left the world"):
                world.barrier("waiting again")
            return ""
        return wait_until_error(world, "waiting again")

    messages = run_workers(body, 3)
    assert all("worker 1 (process" in message for message in (messages[0], messages[2]))


def test_a_worker_that_was_stopped_is_named_after_the_timeout():
    both = get_context("fork").Barrier(2)

    def body():
        # for a busy machine
        watchdog.RESPONSE_SECONDS = watchdog.DIAGNOSIS_SECONDS = watchdog.EXIT_SECONDS = 30.0
        world = patient_shared_world(timeout=3)
        pids = world.all_gather_json(os.getpid(), "sharing pids")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        while state_of(pids[1]) != "T":
            time.sleep(0.01)
        both.wait(300)
        message = wait_until_error(world, "waiting")
        both.wait(300)  # a worker that closes its world ends the other's wait
        assert state_of(pids[1]) == "T"
        with pytest.raises(WorldError, match="while waiting again"):
            world.barrier("waiting again")
        world.close()
        both.wait(300)
        if world.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        return message

    messages = [outcome.value for outcome in try_workers(body, 3)]
    reports = [message for message in messages if "likely cause: SIGSTOP" in message]
    assert len(reports) == 1, messages
    (report,) = reports
    assert report.startswith(
        "timed out after 3 s waiting for worker 1: workers 0 and 2 were waiting at step 0\n"
    )
    (other,) = {messages[0], messages[2]} - {report}
    assert re.search(
        r"timed out after 3 s waiting for worker 1 \(process \d+, which is stopped\); last ",
        other,
    )
    assert re.search(
        r"; timed out after 3 s waiting for worker 1: .*; see the report of worker \d \(host", other
    )


def test_workers_that_make_different_calls_are_named():
    def body(world):
        own_call, other_call = ("sending", "receiving")[:: 1 if world.rank == 0 else -1]
        with pytest.raises(
            WorldError,
            match=f"worker {world.rank} was {own_call} "
            f"while worker {1 - world.rank} was {other_call}; ",
        ):
            world.barrier(own_call)
        with pytest.raises(WorldError, match=f"an earlier call failed, while {own_call}"):
            world.barrier("going on")

    in_processes(2, body)


def test_a_signal_breaks_no_call():
    def body(world):
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
        pids = world.all_gather_json(os.getpid(), "sharing pids")
        for turn in range(20):
            if world.rank == 0:
                while state_of(pids[1]) != "S":  # it waits for this worker
                    os.sched_yield()
                os.kill(pids[1], signal.SIGUSR1)
            assert world.all_gather_json([turn, world.rank], "waiting") == [[turn, 0], [turn, 1]]
        world.barrier("ending")
        return len(handled) > 0

    assert in_processes(2, body) == [False, True]


def test_a_handler_that_raises_ends_the_world_and_no_later_call_reads_what_was_left():
    def body(world):
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        pids = world.all_gather_json(os.getpid(), "sharing pids")
        if world.rank == 0:
            while state_of(pids[1]) != "S":
                os.sched_yield()
            os.kill(pids[1], signal.SIGUSR1)
            assert "lost connection: worker 1 " in wait_until_error(world, "waiting")
        else:
            with pytest.raises(KeyboardInterrupt):
                wait_forever(world, "waiting")
            with pytest.raises(WorldError, match="an earlier call failed, while waiting"):
                world.barrier("going on")

    in_processes(2, body)


def test_unauthenticated_peers_are_refused_and_the_world_still_forms(monkeypatch):
    """Other processes connect to every listener before its address is published."""
    intruders = []

    def open_listener(listener):
        original(listener)
        for _ in range(20):
            intruder = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            intruder.connect("\0" + listener.address)
            intruder.send(b"forming the world\0")
            intruders.append(intruder)

    def body(world):
        others = world.all_gather_json(world.rank, "waiting")
        for intruder in intruders:
            with pytest.raises(ConnectionResetError):
                intruder.recv(1)
            intruder.close()
        return others

    original = PeerListener.__init__
    monkeypatch.setattr(PeerListener, "__init__", open_listener)
    assert in_processes(3, body) == [[0, 1, 2]] * 3


def test_a_process_that_listens_at_the_address_of_another_is_refused():
    def body(address):
        members = {0: entry(os.getpid(), address), 1: entry(os.getpid(), None)}
        with (
            PeerListener() as listener,
            pytest.raises(
                WorldError,
                match=f"expected process {os.getpid()} to listen, got process {os.getppid()}",
            ),
        ):
            listener.connect(1, members, start_timeout_seconds=30, timeout_seconds=30)

    with PeerListener() as another:
        run_workers(body, 1, another.address)


def test_a_worker_that_does_not_connect_is_named():
    with (
        PeerListener() as listener,
        pytest.raises(
            WorldError,
            match=r"while forming the world.*\(timed out waiting for worker 1 \(process 1\)\)",
        ),
    ):
        listener.connect(
            0,
            {0: entry(os.getpid(), listener.address), 1: entry(1, None)},
            start_timeout_seconds=0.01,
            timeout_seconds=30,
        )


def test_no_file_stays_open():
    def body():
        shared_world().close()  # the store stays open for later worlds
        files, named = open_files(), shared_files()
        world = shared_world()
        world.shared(1000)
        world.broadcast(torch.zeros(5_000_000), "copying")
        assert shared_files() <= named
        world.close()
        assert "memfd:samestep" not in Path("/proc/self/maps").read_text()
        # rank 0's store closes its ends of the others' connections with some delay
        while open_files() > files:
            os.sched_yield()

    run_workers(body, 3)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def board_of(rank, host, file, pid=None):
    return StatusBoard.open(rank, host, pid or os.getpid(), file, file if rank == 0 else None)


def test_workers_of_a_board_see_each_other_s_status_and_news():
    team = [board_of(rank, range(3), 0) for rank in range(3)]
    assert [board.ranks for board in team] == [range(rank, rank + 1) for rank in range(3)]
    file = create_boards(3)
    team = [board_of(rank, range(3), file) for rank in range(3)]
    team[2].write({"rank": 2})
    team[1].write_news({"alarm": True})
    team[0].write_news({"failure": "é"})
    assert team[0].statuses() == [{"rank": 2}]
    assert team[2].news() == {"alarm": True, "failure": "é"}
    for board in team:
        board.close()


def test_the_first_worker_with_a_recent_status_publishes(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(mesh, "time", SimpleNamespace(monotonic=lambda: clock.now))
    file = create_boards(3)
    team = [board_of(rank, range(3), file) for rank in range(3)]

    def publishers(seconds):
        return [rank for rank, board in enumerate(team) if board.publishes(seconds)]

    assert publishers(60) == [0]  # no worker has started
    for board in team:
        board.write({})
    assert publishers(60) == [0]
    team[0].write({}, left=True)
    assert publishers(60) == [0, 1]  # the last status of the first worker is published by both
    clock.now += 61
    team[2].write({})
    assert publishers(60) == [0, 1, 2]
    for board in team:
        board.close()


def test_a_board_has_at_most_64_workers():
    assert boards([range(3), range(3, 133), range(133, 134)]) == [
        range(3),
        range(3, 67),
        range(67, 131),
        range(131, 133),
        range(133, 134),
    ]
    file = create_boards(130)
    made = {rank: board_of(rank, range(130), file) for rank in (0, 63, 64, 129)}
    for rank, board in made.items():
        board.write({"rank": rank})
    seen = [[status["rank"] for status in board.statuses()] for board in made.values()]
    assert seen == [[0, 63], [0, 63], [64], [129]]
    for board in made.values():
        board.close()


def test_a_status_that_is_being_written_is_the_previous_one():
    board = StatusBoard(0, range(1))
    board.write({"step": 1})
    assert board.statuses() == [{"step": 1}]
    board._memory[SLOT_BYTES + 20] ^= 1
    assert board.statuses() == [{"step": 1}]
    board.write({"text": "x" * SLOT_BYTES})  # too long
    assert board.statuses() == [{"step": 1}]
