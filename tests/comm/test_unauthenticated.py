"""Processes that do not belong to the run: what they write and send in each phase is harmless."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

import samestep as ss
from samestep.cluster import connect_to_master, find_process, network
from samestep.cluster.network import listening_user
from samestep.comm import distributed, rendezvous, store, store_server, watchdog
from samestep.comm.connect import connect
from samestep.comm.link import Link
from samestep.comm.shared_memory import Shared
from samestep.config import TOKEN, Config
from samestep.errors import WorldError
from samestep.launch import launch
from samestep.launch.supervisor import LocalStore
from tests.ports import free_port
from tests.workers import run_workers
from tests.worlds import distributed_world, in_threads, launcher_store

FORK = get_context("fork")
SECRET = "a secret of the tests"
PEER = {"host": "here", "pid": 1, "home": None, "address": None, "nonce": ""}
KEYS = {"worker/0": PEER, "worker/1": PEER, "offer/0": PEER, "alarm": True, "failure": "attacked"}
SOON = timedelta(seconds=60)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def bomb(tmp_path):
    yield pickle.dumps(Bomb(tmp_path / "exploded"))
    assert not list(tmp_path.iterdir())


def in_another_process(attack, *arguments):
    process = FORK.Process(target=attack, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def write_to_tcp_store():
    """Write an entry of each worker, an alarm and a failure into the store at MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(address, port, is_master=False, timeout=SOON)
    for prefix in ("samestep/0", "attempt/0/samestep/0"):
        for key, value in KEYS.items():
            client.set(f"{prefix}/{key}", json.dumps(value))


def knock():
    """Connect without the token to every abstract socket of samestep; none may let this in."""
    text = Path("/proc/net/unix").read_text()
    names = set(re.findall(r"@(samestep-[0-9a-f]{32})$", text, re.MULTILINE))
    refused = 0
    for name in names:
        with suppress(OSError):  # of another kind: the listeners of the mesh
            with pytest.raises(WorldError, match="has a different token"):
                Link(name, "a guess of the token", 10)
            refused += 1
    assert refused
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with pytest.raises(ConnectionRefusedError):  # there is no store that admits everyone
        socket.create_connection(address)


@pytest.fixture
def beats(monkeypatch):
    """Fast heartbeats, and a way to wait for some of them."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    made, beat = threading.Semaphore(0), watchdog.Watchdog._heartbeat

    def counted(self, **options):
        made.release()
        return beat(self, **options)

    def wait_for_more(count):
        while made.acquire(blocking=False):
            pass
        assert all(made.acquire(timeout=60) for _ in range(count))

    monkeypatch.setattr(watchdog.Watchdog, "_heartbeat", counted)
    return SimpleNamespace(wait_for_more=wait_for_more)


def test_one_host_is_not_disturbed_while_forming_and_running(beats):
    def body():
        in_another_process(knock)
        with ss.init(lanes=2) as run:
            kind = type(run._world).__name__
            in_another_process(knock)
            beats.wait_for_more(5)
            return kind, run.all_gather(run.rank)

    assert launch(body, workers=2) == ("Shared", [0, 1])


def test_the_store_of_one_host_disconnects_other_users(monkeypatch):
    with closing(LocalStore(SECRET, 0)) as local:
        Link(local.name, SECRET, 60).close()
        monkeypatch.setattr(store_server.os, "geteuid", lambda: 4321)
        with pytest.raises(ConnectionError):
            Link(local.name, SECRET, 60)


def test_the_store_of_one_host_reports_a_peer_without_the_token(capsys, caplog):
    with closing(LocalStore(SECRET, 0)) as local:
        with pytest.raises(WorldError, match="token"):
            Link(local.name, "another token", 60)
        Link(local.name, SECRET, 60).close()
    refused = "samestep: refused a connection from this host: it does not have this run's token\n"
    for thread in threading.enumerate():
        if thread.name == "samestep log":
            thread.join()
    assert capsys.readouterr().err == refused
    assert not caplog.records  # of asyncio


def test_all_workers_of_a_host_may_connect_at_once():
    with closing(LocalStore(SECRET, 0)) as local, ExitStack() as exits:
        for _ in range(400):
            silent = exits.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(f"\0{local.name}")
        Link(local.name, SECRET, 60).close()
        silent.settimeout(60)
        assert silent.recv(1)  # of the server's nonce


def test_other_launchers_stores_cannot_end_a_running_world(beats):
    def body():
        world = connect(find_process(os.environ), Config())
        world.barrier("forming")
        if world.rank == 1:
            in_another_process(write_to_tcp_store)
        world.barrier("attacking")
        beats.wait_for_more(5)
        world.barrier("running")
        if world.rank == 1:  # the attacker's value does not hide the first real failure
            world.status.report_failure(LookupError("a real failure"))
            return ""
        with pytest.raises(WorldError) as caught:
            world.barrier("failing")
        return str(caught.value)

    with launcher_store() as (_, variables):
        outcomes = run_workers(body, 2, environment=variables)
    assert "failed first, at step 0: LookupError: a real failure" in outcomes[0]


@pytest.mark.parametrize("call", ["all_gather_object", "gather_object", "broadcast_object"])
@pytest.mark.parametrize("attack", ["unsigned", "signed with another token"])
def test_an_object_without_the_run_s_signature_is_not_unpickled(bomb, call, attack):
    def body():
        world = distributed_world(hosts=2)
        what, attacker = "gathering an object", 0 if call == "broadcast_object" else 1
        if world.rank == attacker:
            signing = attack != "unsigned"
            world.signing_key = bytes(32)
            data = world._sign(bomb, attacker, world.barriers, what) if signing else bomb
            send = world.gather_bytes if call == "gather_object" else world.all_gather_bytes
            send(data, what)
        else:
            with pytest.raises(WorldError, match=f"refused an object from worker {attacker} "):
                getattr(world, call)("object", what)

    run_workers(body, 2, environment={TOKEN: SECRET})


def test_a_signed_object_cannot_be_replayed_or_moved():
    def body(world):
        world.signing_key = b"key"
        signed = world._sign(b"data", world.rank, world.barriers, "first")
        for call in ("first", "second"):
            sent = signed if call == "first" or world.rank == 1 else b""
            if world.rank == 0 and call == "second":
                with pytest.raises(WorldError, match="refused an object from worker 1"):
                    world.gather_signed(sent, call)
            else:
                world.gather_bytes(sent, call)
        with pytest.raises(WorldError):
            world._verify(signed, 1 - world.rank, 0, "first")
        return world._verify(signed, world.rank, 0, "first")

    assert in_threads(2, body) == [b"data"] * 2


@contextmanager
def forged_entries():
    """Yield the variables of a launcher's store in which all entries are forged."""
    with launcher_store() as (store, environment):
        for key in ("worker/0", "worker/1"):
            store.set(f"attempt/0/samestep/0/{key}", json.dumps(PEER))
        store.set("samestep/round", json.dumps("2/forged"))
        yield environment


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "7"}])
def test_with_a_token_forged_entries_in_other_launchers_stores_are_replaced(launcher):
    def body():
        return type(connect(find_process(os.environ), Config(timeout=60)))

    with forged_entries() as variables:
        variables |= {TOKEN: SECRET, **launcher}
        assert run_workers(body, 2, environment=variables) == [Shared] * 2


def test_with_a_token_a_replaced_round_of_torchrun_is_set_again():
    def body():
        if os.environ["RANK"] == "1":
            port = int(os.environ["MASTER_PORT"])
            client = TCPStore("127.0.0.1", port, is_master=False, timeout=SOON)
            while (
                client.get("samestep/round") == b'"2/forged"'
            ):  # until worker 0 waits for this one
                time.sleep(0.01)
            client.set("samestep/round", json.dumps("2/forged"))
        return type(connect(find_process(os.environ), Config(timeout=60)))

    with forged_entries() as variables:
        variables |= {TOKEN: SECRET, "TORCHELASTIC_RUN_ID": "7"}
        assert run_workers(body, 2, environment=variables) == [Shared] * 2


def test_without_a_token_forged_entries_end_the_start_with_an_error():
    def body():
        with pytest.raises(WorldError):
            connect(find_process(os.environ), Config(timeout=2))

    with forged_entries() as variables:
        run_workers(body, 2, environment=variables)


def test_workers_with_different_tokens_are_told_so():
    def body():
        os.environ[TOKEN] = SECRET + os.environ["RANK"]
        other = 1 - int(os.environ["RANK"])
        text = rf"timed out .* worker {other} to start with the same SAMESTEP_TOKEN"
        with pytest.raises(WorldError, match=text):
            connect(find_process(os.environ), Config(timeout=1))

    with forged_entries() as variables:
        run_workers(body, 2, environment=variables)


@contextmanager
def listener(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, free_port()), family=family) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listener_of_another_user_is_refused(address, monkeypatch):
    with listener(address) as port:
        host = "::1" if ":" in address else "127.0.0.1"
        assert listening_user(host, port) == os.geteuid()
        assert listening_user("127.0.0.9", port) == (
            os.geteuid() if address in "0.0.0.0::" else None
        )
        monkeypatch.setattr(network.os, "geteuid", lambda: 4321)
        variables = {
            "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": host, "MASTER_PORT": str(port),
        }  # fmt: skip
        with pytest.raises(PermissionError, match=r"a program of another user \(\d+\) listens at"):
            connect_to_master(find_process(variables), time.monotonic() + 5)


def stop_store():
    os.kill(int(os.environ["STORE_PID"]), signal.SIGSTOP)


def stop_before(module, name):
    """Stop the store's process immediately before a function of a module is called."""
    function = getattr(module, name)

    def stopping(*args, **kwargs):
        stop_store()
        return function(*args, **kwargs)

    setattr(module, name, stopping)


PHASES = {
    "opening": lambda: stop_before(store, "connect_to_master"),
    "exchanging": lambda: stop_before(rendezvous, "_gather_infos"),
    "making the group": lambda: stop_before(distributed.dist, "init_process_group"),
}


@pytest.mark.parametrize(
    "phase",
    [pytest.param(phase, marks=[pytest.mark.long] * (phase != "exchanging")) for phase in PHASES],
)
def test_forming_ends_in_time_if_the_store_is_stopped(phase, monkeypatch):
    monkeypatch.setattr(store, "CALL_SECONDS", 1.0)
    port = free_port()
    up = FORK.Event()

    def serve():
        server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        up.set()
        while server:
            signal.pause()

    def body():
        PHASES[phase]()
        with pytest.raises(WorldError, match=r"the store .*(did|does) not respond"):
            distributed_world(timeout=5.0, hosts=2)  # workers start within it under load, too

    host = FORK.Process(target=serve)
    host.start()
    assert up.wait(60)
    try:
        began = time.monotonic()
        run_workers(
            body,
            2,
            environment={
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "STORE_PID": str(host.pid),
            },
        )
        assert time.monotonic() - began < 250  # and not torch's 300
    finally:
        host.kill()
        host.join()
