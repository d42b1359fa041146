from __future__ import annotations

import os
import re
import signal
import socket
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from samestep.comm.rendezvous import MeshAddress, PeerListener
from samestep.errors import WorldError
from tests.workers import run_workers, try_workers
from tests.worlds import in_processes, shared_world


def met_until_error(world, what):
    """Meet the others again and again; return the message of the error that ends it."""
    with pytest.raises(WorldError) as caught:
        meet_for_ever(world, what)
    return str(caught.value)


def meet_for_ever(world, what):
    while True:
        world.barrier(what)


def state_of(pid):
    """Return the state of a process: R, S, T when it is stopped, Z when it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_that_dies_is_named_while_the_others_wait_for_it():
    def body():
        world = shared_world(timeout=300)
        pids = world.all_gather_json(os.getpid(), "telling pids")
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        message = met_until_error(world, "waiting")
        assert f"worker {world.rank} got no answer from the others while waiting" in message
        assert f"worker 3 (process {pids[3]})" in message
        assert "before that all were telling pids" in message

    assert [outcome.exitcode for outcome in try_workers(body, 4)] == [0, 0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("leave", ["die", "close"])
def test_a_worker_that_goes_is_noticed_where_a_process_that_it_forked_holds_on_to_the_connection(
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
            message = met_until_error(world, "waiting")
            noticed.set()
            return message
        if leave == "die":
            # when all have ended, the child is killed with the worker's group of processes
            os.kill(os.getpid(), signal.SIGKILL)
        world.close()
        assert noticed.wait(30)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ""

    first, second = try_workers(body, 2)
    assert second.exitcode == (-signal.SIGKILL if leave == "die" else 0)
    assert "gone: worker 1 (process" in first.value


def test_a_worker_that_leaves_is_noticed_by_those_who_go_on():
    def body():
        world = shared_world(timeout=300)
        world.barrier("meeting")
        if world.rank == 1:
            world.close()
            with pytest.raises(WorldError, match="this worker has left the world"):
                world.barrier("meeting again")
            return ""
        return met_until_error(world, "meeting again")

    told = run_workers(body, 3)
    assert all("worker 1 (process" in message for message in (told[0], told[2]))


def test_a_worker_that_was_stopped_is_named_after_the_timeout():
    named = get_context("fork").Barrier(2)

    def body():
        world = shared_world(timeout=1)
        pids = world.all_gather_json(os.getpid(), "telling pids")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        message = met_until_error(world, "waiting")
        assert state_of(pids[1]) == "T"
        with pytest.raises(WorldError, match="while waiting again"):
            world.barrier("waiting again")
        world.close()
        named.wait(30)
        if world.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        return message

    messages = [outcome.value for outcome in try_workers(body, 3)]
    (report,) = [message for message in messages if "usual cause: SIGSTOP" in message]
    assert report.startswith(
        "worker 1 did not come within 1 s while workers 0 and 2 were waiting at step 0\n"
    )
    (other,) = {messages[0], messages[2]} - {report}
    assert re.search(
        r"worker 1 \(process \d+, which is stopped\) did not come within 1 s; before that all were telling pids",
        other,
    )
    assert re.search(r"; worker 1 did not come within 1 s .* tells more \(", other)


def test_workers_that_make_different_calls_are_told():
    def body(world):
        mine, other = ("sending", "receiving")[:: 1 if world.rank == 0 else -1]
        with pytest.raises(
            WorldError,
            match=f"worker {world.rank} was {mine} while worker {1 - world.rank} was {other}; expected the same calls",
        ):
            world.barrier(mine)
        with pytest.raises(WorldError, match=f"an earlier call failed, while {mine}"):
            world.barrier("going on")

    in_processes(2, body)


def test_a_signal_breaks_no_call():
    def body(world):
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
        pids = world.all_gather_json(os.getpid(), "telling pids")
        for turn in range(20):
            if world.rank == 0:
                while state_of(pids[1]) != "S":  # it waits for this worker
                    os.sched_yield()
                os.kill(pids[1], signal.SIGUSR1)
            assert world.all_gather_json([turn, world.rank], "meeting") == [[turn, 0], [turn, 1]]
        world.barrier("ending")
        return len(handled) > 0

    assert in_processes(2, body) == [False, True]


def test_a_handler_that_raises_ends_the_world_and_no_later_call_reads_what_was_left():
    def body(world):
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        pids = world.all_gather_json(os.getpid(), "telling pids")
        if world.rank == 0:
            while state_of(pids[1]) != "S":
                os.sched_yield()
            os.kill(pids[1], signal.SIGUSR1)
            assert "gone: worker 1 " in met_until_error(world, "meeting")
        else:
            with pytest.raises(KeyboardInterrupt):
                meet_for_ever(world, "meeting")
            with pytest.raises(WorldError, match="an earlier call failed, while meeting"):
                world.barrier("going on")

    in_processes(2, body)


def test_strangers_are_refused_and_the_world_forms_all_the_same(monkeypatch):
    """Strangers call at every door before it is told to anyone."""
    strangers = []

    def opened(door):
        made(door)
        for _ in range(20):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect("\0" + door.member.address)
            stranger.send(b"forming the world\0")
            strangers.append(stranger)

    def body(world):
        others = world.all_gather_json(world.rank, "meeting")
        for stranger in strangers:
            with pytest.raises(ConnectionResetError):
                stranger.recv(1)
            stranger.close()
        return others

    made = PeerListener.__init__
    monkeypatch.setattr(PeerListener, "__init__", opened)
    assert in_processes(3, body) == [[0, 1, 2]] * 3


def test_nobody_connects_to_a_process_that_listens_in_the_place_of_another():
    def body(address):
        members = {0: MeshAddress(os.getpid(), address), 1: MeshAddress(os.getpid(), "")}
        with (
            PeerListener() as door,
            pytest.raises(
                WorldError,
                match=f"process {os.getppid()} listens where process {os.getpid()} should",
            ),
        ):
            door.connect(1, members, start_timeout_seconds=30, timeout_seconds=30)

    with PeerListener() as another:
        run_workers(body, 1, another.member.address)


def test_a_worker_that_does_not_connect_is_named():
    with (
        PeerListener() as door,
        pytest.raises(
            WorldError, match=r"while forming the world.*\(worker 1 \(process 1\) did not come\)"
        ),
    ):
        door.connect(
            0,
            {0: door.member, 1: MeshAddress(1, "")},
            start_timeout_seconds=0.01,
            timeout_seconds=30,
        )


def test_nothing_stays_open_or_behind():
    def body():
        shared_world().close()  # the store that was opened stays so, for further worlds
        files, named = open_files(), set(Path("/dev/shm").iterdir())
        world = shared_world()
        world.shared(1000)
        world.broadcast(torch.zeros(5_000_000), "copying")
        assert set(Path("/dev/shm").iterdir()) == named
        world.close()
        assert "memfd:samestep" not in Path("/proc/self/maps").read_text()
        # rank 0's store closes its ends of the others' connections when it gets round to it
        while open_files() > files:
            os.sched_yield()

    run_workers(body, 3)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))
