"""A coordinator among strangers: it lets in who holds the token, and nothing that others send disturbs the run."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import active_children
from random import Random

import pytest
from torch.distributed import TCPStore

from samestep.comm.link import HELLO_SECONDS, Link, encode, frame
from samestep.comm.store import join_store, store_variables
from samestep.config import TOKEN, Config
from samestep.errors import ConfigError, LaunchError
from samestep.launch import coordinator as coordinator_module
from samestep.launch import coordinator_client as member_module
from samestep.launch.cluster_spec import ClusterSpec, Nodes
from samestep.launch.coordinator_client import join_cluster
from tests.launch.coordinators import SECRET, coordinator
from tests.launch.launchers import wait_until
from tests.launch.processes import end_soon, listening


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """What coordinators printed up to now."""
    log = tmp_path / "log"
    log.touch()

    def print_(text):
        with log.open("a") as file:
            file.write(f"{text}\n")

    monkeypatch.setattr(coordinator_module, "_log", print_)
    return log.read_text


@pytest.fixture
def leader(terminal):
    with coordinator() as leader:
        leader.start()
        yield leader
        leader.end()


def stranger(leader, number=2):
    """Connect from an address that nobody else has."""
    return socket.create_connection(leader.coordinator, 60, source_address=(f"127.0.0.{number}", 0))


def is_closed(connection):
    """Wait until the other end has closed a connection."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def still_serves(leader):
    store = join_store(
        {"RANK": "0", TOKEN: SECRET, **store_variables(leader.coordinator, leader.attempt)},
        timedelta(seconds=60),
    )
    store.set("key", "value")
    return store.get("key") == b"value"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (
            b"GET / HTTP/1.1\r\n\r\n",
            "expected a frame of at most 512 bytes, got 1195725856",
        ),
        (b"\xff" * 4096, "got 4294967295"),
        (frame(b"\x80\x04."), "can't decode"),
        (frame(b'{"as":"host","name":"me"}'), "expected a hello with a nonce"),
        (
            frame(encode({"as": "worker", "rank": 1, "nonce": 64 * "0", "proof": 64 * "0"})),
            "it does not have this run's token",
        ),
        (frame(b"[" * 500), "a message is nested too deeply|Expecting value"),
    ],
)
def test_a_stranger_is_refused_with_the_reason_and_the_run_goes_on(leader, terminal, sent, reason):
    with stranger(leader) as connection:
        connection.sendall(sent)
        assert is_closed(connection)
    wait_until(lambda: "127.0.0.2 is refused: " in terminal())
    assert re.search(reason, terminal())
    assert still_serves(leader)


def test_an_address_is_named_once_however_often_it_comes(leader, terminal):
    for number in (3, 2, 2, 2, 4):
        with stranger(leader, number) as connection:
            connection.sendall(b"\xff" * 8)
            assert is_closed(connection)
    wait_until(lambda: "127.0.0.4 is refused" in terminal())
    assert terminal().count("127.0.0.2 is refused") == 1


def test_the_log_of_strangers_is_bounded(monkeypatch, terminal):
    monkeypatch.setattr(coordinator_module, "MOST_NAMED", 3)
    with coordinator() as leader:
        leader.start()
        for number in range(2, 10):
            with stranger(leader, number) as connection:
                connection.sendall(b"\xff" * 8)
                assert is_closed(connection)
        leader.end()
    assert terminal().count("is refused") == 3
    assert "those from further addresses are refused without a word" in terminal()


def test_strangers_that_never_end_their_hello_keep_nobody_out(leader):
    with ExitStack() as exits:
        first = exits.enter_context(stranger(leader))
        for _ in range(coordinator_module.MOST_STRANGERS):
            exits.enter_context(stranger(leader)).sendall(b"\0\0")
        assert is_closed(first)
        assert still_serves(leader)


def test_a_hello_is_not_waited_for_without_end(monkeypatch, terminal):
    monkeypatch.setattr(coordinator_module, "HELLO_SECONDS", 0.2)
    with coordinator() as leader:
        leader.start()
        with stranger(leader) as connection:
            assert is_closed(connection)
        leader.end()
    assert "it did not say hello within 0.2 s" in terminal()


def test_a_client_of_torchs_own_store_is_a_stranger(leader, terminal):
    host, port = leader.coordinator
    with pytest.raises(RuntimeError):
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
    assert still_serves(leader)


def test_garbage_of_every_kind_disturbs_nothing(leader):
    random = Random(0)
    for _ in range(300):
        with stranger(leader) as connection, suppress(ConnectionError):
            body = random.randbytes(random.randrange(64))
            connection.sendall(
                random.choice(
                    [body, frame(body), frame(encode({"nonce": body.hex(), "proof": body.hex()}))]
                )
            )
    assert still_serves(leader)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"as": "host"},
        {"as": "host", "name": "x", "workers": 0, "same": {}},
        {"as": "worker", "attempt": 5},
    ],
)
def test_who_holds_the_token_and_makes_no_sense_is_refused(leader, terminal, hello):
    link = Link(leader.coordinator, SECRET, HELLO_SECONDS)
    link.send(hello)
    with suppress(ConnectionError):
        assert "refused" in link.receive(60)
        link.receive(60)
    link.close()
    wait_until(lambda: "is refused" in terminal())
    assert still_serves(leader)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"do": "set"},
        {"do": "get", "key": 1},
        {"do": "wait", "keys": "x", "seconds": 1},
        {"do": "no", "key": ""},
    ],
)
def test_a_request_that_makes_no_sense_ends_its_connection(leader, asked):
    store = join_store(
        {"RANK": "0", TOKEN: SECRET, **store_variables(leader.coordinator, leader.attempt)},
        timedelta(seconds=60),
    )
    store._link.send(asked)
    with pytest.raises(ConnectionError):
        store._link.receive(60)
    store._link.close()
    assert still_serves(leader)


def test_it_listens_at_the_masters_address_alone(leader):
    (process,) = active_children()
    _, port = leader.coordinator
    assert listening(process.pid) == {("0100007F", f"{port:04X}")}


def other(leader, nodes=None, token=SECRET):
    """Join from a second launcher on this machine."""
    gathering = ClusterSpec(leader.coordinator, token, nodes or leader.gathering.nodes)
    return join_cluster(gathering, 1, Config())


def test_a_host_with_another_token_is_told_so(leader):
    with (
        pytest.raises(
            LaunchError, match="cannot join there: the coordinator there has another token"
        ),
        other(leader, token=16 * "x"),
    ):
        pass


def test_a_host_with_other_nodes_is_refused(leader, terminal):
    with (
        pytest.raises(
            LaunchError, match=r"refuses this one: its --nodes is '2', and '1' on the first host"
        ),
        other(leader, Nodes(2, 2)),
    ):
        pass
    wait_until(lambda: "is refused: its --nodes" in terminal())


def test_a_host_that_comes_when_all_is_over_is_refused(terminal):
    with coordinator(2, 2) as leader, other(leader) as slow:
        slow.report("ready")
        leader.start()
        slow.report("ended", attempt=0)
        leader.end()
        with pytest.raises(LaunchError, match="the run is over"), other(leader):
            pass


def test_a_master_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(member_module, "COME_SECONDS", 0.3)
    # an address of documentation (RFC 5737)
    gathering = ClusterSpec(("192.0.2.1", 29400), SECRET, Nodes(2, 2))
    monkeypatch.setattr(member_module, "HELLO_SECONDS", 0.1)
    with (
        pytest.raises(
            LaunchError,
            match=r"--master 192\.0\.2\.1:29400 was given, and did not answer within 0\.3 s",
        ),
        join_cluster(gathering, 1, Config()),
    ):
        pass


def test_hosts_that_may_come_and_go_need_lanes():
    gathering = ClusterSpec(("127.0.0.1", 29411), SECRET, Nodes(1, 2))
    with (
        pytest.raises(ConfigError, match=r"--nodes 1:2 was given without --lanes"),
        join_cluster(gathering, 1, Config()),
    ):
        pass


def test_a_name_that_is_the_loopback_here_is_refused(monkeypatch):
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29411))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    gathering = ClusterSpec(("node1", 29411), SECRET, Nodes(2, 2))
    with (
        pytest.raises(ConfigError, match=r"node1 is 127\.0\.1\.1, which no other host reaches"),
        join_cluster(gathering, 1, Config()),
    ):
        pass


def test_a_coordinator_that_is_gone_is_an_error():
    with coordinator() as leader:
        (process,) = active_children()
        process.kill()
        with pytest.raises(LaunchError, match="has lost the first host of the run, at 127"):
            wait_until(lambda: leader.member.orders(0))


def test_it_ends_with_its_launcher():
    ready, told = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        with coordinator():
            (process,) = active_children()
            os.write(told, b"%d\n" % process.pid)
            signal.pause()
    pid = int(os.read(ready, 100))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    for file in (ready, told):
        os.close(file)
    assert end_soon([pid])
