"""Coordinators accept peers that hold the token; nothing that others send disturbs the run."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import active_children
from random import Random

import pytest
from torch.distributed import TCPStore

from samestep.comm import store_server
from samestep.comm.link import HELLO_SECONDS, Link, encode, frame
from samestep.comm.token_store import join_store, store_variables
from samestep.config import TOKEN, Config
from samestep.errors import ConfigError, LaunchError
from samestep.host import raise_file_limit
from samestep.launch import coordinator as coordinator_module
from samestep.launch import coordinator_client as client_module
from samestep.launch.cluster_spec import ClusterSpec, Nodes
from samestep.launch.coordinator_client import join_cluster
from tests.launch.coordinators import SECRET, coordinator
from tests.launch.launchers import wait_until
from tests.launch.processes import end_soon, listening
from tests.needs import needs
from tests.ports import free_port


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """Return what coordinators have printed."""
    log = tmp_path / "log"
    log.touch()

    def print_(text):
        with log.open("a") as file:
            file.write(f"{text}\n")

    for module in (coordinator_module, store_server):
        monkeypatch.setattr(module, "log", print_)
    return log.read_text


@pytest.fixture
def leader(terminal):
    with coordinator() as leader:
        leader.start()
        yield leader
        leader.end()


def unauthenticated(leader, number=2):
    """Connect from an address that no other test connection has."""
    return socket.create_connection(leader.address, 60, source_address=(f"127.0.0.{number}", 0))


def is_closed(connection):
    """Wait until the other end has closed a connection."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def still_serves(leader):
    store = join_store(
        {"RANK": "0", TOKEN: SECRET, **store_variables(leader.address, leader.attempt)},
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
def test_an_unauthenticated_peer_is_refused_with_the_reason(leader, terminal, sent, reason):
    with unauthenticated(leader) as connection:
        connection.sendall(sent)
        assert is_closed(connection)
    wait_until(lambda: "refused a connection from 127.0.0.2: " in terminal())
    assert re.search(reason, terminal())
    assert still_serves(leader)


def test_an_address_is_logged_once(leader, terminal):
    for number in (3, 2, 2, 2, 4):
        with unauthenticated(leader, number) as connection:
            connection.sendall(b"\xff" * 8)
            assert is_closed(connection)
    wait_until(lambda: "refused a connection from 127.0.0.4" in terminal())
    assert terminal().count("refused a connection from 127.0.0.2") == 1


def test_the_log_of_refused_connections_is_bounded(monkeypatch, terminal):
    monkeypatch.setattr(store_server, "MAX_LOGGED_ADDRESSES", 3)
    with coordinator() as leader:
        leader.start()
        for number in range(2, 10):
            with unauthenticated(leader, number) as connection:
                connection.sendall(b"\xff" * 8)
                assert is_closed(connection)
        leader.end()
    assert terminal().count("refused a connection") == 3
    assert "further refused addresses are not logged" in terminal()


def test_incomplete_hellos_do_not_keep_others_out(monkeypatch):
    monkeypatch.setattr(store_server.StoreServer.__init__, "__defaults__", (64, None))
    with coordinator() as leader, ExitStack() as exits:
        leader.start()
        first = exits.enter_context(unauthenticated(leader))
        other = exits.enter_context(unauthenticated(leader, 3))
        # the host's worker may have some as well
        for _ in range(63 + coordinator_module.CONNECTIONS):
            exits.enter_context(unauthenticated(leader)).sendall(b"\0\0")
        assert is_closed(first)
        assert still_serves(leader)
        other.settimeout(60)
        other.recv(4096)  # a nonce
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):  # only addresses with many connections lose them
            other.recv(4096)
        leader.end()


def test_512_workers_that_arrive_at_once_are_served(leader):
    workers = 512
    first = threading.Barrier(workers)

    def join(rank):
        variables = store_variables(leader.address, leader.attempt)
        first.wait()
        variables = {"RANK": str(rank), TOKEN: SECRET, **variables}
        store = join_store(variables, timedelta(seconds=60))
        count = store.add("arrived", 1)
        store._link.close()
        return count

    with ThreadPoolExecutor(workers) as pool:
        counts = list(pool.map(join, range(workers)))
    assert sorted(counts) == list(range(1, workers + 1))


def test_a_hello_times_out(monkeypatch, terminal):
    monkeypatch.setattr(store_server.link, "HELLO_SECONDS", 0.2)
    with coordinator() as leader:
        leader.start()
        with unauthenticated(leader) as connection:
            assert is_closed(connection)
        leader.end()
    assert "it sent no hello within 0.2 s" in terminal()


def test_a_client_of_torchs_own_store_is_refused(leader, terminal):
    host, port = leader.address
    with pytest.raises(RuntimeError):
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
    assert still_serves(leader)


def test_random_bytes_disturb_nothing(leader):
    random = Random(0)
    for _ in range(300):
        with unauthenticated(leader) as connection, suppress(ConnectionError):
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
        {"as": "host", "name": "x", "workers": 0, "settings": {}},
        {"as": "worker", "attempt": 5},
    ],
)
def test_an_invalid_hello_with_the_token_is_refused(leader, terminal, hello):
    link = Link(leader.address, SECRET, HELLO_SECONDS)
    link.send(hello)
    with suppress(ConnectionError):
        assert "refused" in link.receive(60)
        link.receive(60)
    link.close()
    wait_until(lambda: "refused a connection" in terminal())
    assert still_serves(leader)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"do": "set"},
        {"do": "get", "key": 1},
        {"do": "wait", "keys": "x", "seconds": 1},
        {"do": "no", "key": ""},
    ],
)
def test_an_invalid_request_ends_its_connection(leader, message):
    store = join_store(
        {"RANK": "0", TOKEN: SECRET, **store_variables(leader.address, leader.attempt)},
        timedelta(seconds=60),
    )
    store._link.send(message)
    with pytest.raises(ConnectionError):
        store._link.receive(60)
    store._link.close()
    assert still_serves(leader)


def test_it_listens_only_at_the_masters_address(leader):
    (process,) = active_children()
    _, port = leader.address
    assert listening(process.pid) == {("0100007F", f"{port:04X}")}


def other(leader, nodes=None, token=SECRET):
    """Join from a second launcher on this machine."""
    spec = ClusterSpec(leader.address, token, nodes or leader.spec.nodes)
    return join_cluster(spec, 1, Config())


def test_a_host_with_another_token_cannot_join(leader):
    with (
        pytest.raises(LaunchError, match=r"cannot join at --master .*token"),
        other(leader, token=16 * "x"),
    ):
        pass


def test_a_host_with_other_nodes_is_refused(leader, terminal):
    with (
        pytest.raises(
            LaunchError,
            match="refused this host: --nodes must be '1' as on the first host, got '2'",
        ),
        other(leader, Nodes(2, 2)),
    ):
        pass
    assert "--nodes must be '1'" in terminal()


def test_a_host_that_joins_after_the_end_is_refused(terminal):
    with coordinator(2, 2) as leader, other(leader) as slow:
        slow.report("ready")
        leader.start()
        slow.report("ended", attempt=0)
        leader.end()
        with pytest.raises(LaunchError, match="the run is over"), other(leader):
            pass


def test_a_master_that_does_not_respond_is_an_error(monkeypatch):
    monkeypatch.setattr(client_module, "JOIN_SECONDS", 0.3)
    # an address of documentation (RFC 5737)
    spec = ClusterSpec(("192.0.2.1", 29400), SECRET, Nodes(2, 2))
    monkeypatch.setattr(client_module, "HELLO_SECONDS", 0.1)
    with (
        pytest.raises(
            LaunchError,
            match=r"--master 192\.0\.2\.1:29400 did not respond within 0\.3 s",
        ),
        join_cluster(spec, 1, Config()),
    ):
        pass


def test_an_elastic_run_requires_lanes():
    spec = ClusterSpec(("127.0.0.1", 29411), SECRET, Nodes(1, 2))
    with (
        pytest.raises(ConfigError, match="--nodes 1:2 requires --lanes"),
        join_cluster(spec, 1, Config()),
    ):
        pass


def test_a_name_of_the_loopback_interface_is_an_error(monkeypatch):
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29411))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    spec = ClusterSpec(("node1", 29411), SECRET, Nodes(2, 2))
    with (
        pytest.raises(ConfigError, match=r"node1 is 127\.0\.1\.1 on this host"),
        join_cluster(spec, 1, Config()),
    ):
        pass


def test_losing_the_coordinator_is_an_error():
    with coordinator() as leader:
        (process,) = active_children()
        process.kill()
        with pytest.raises(LaunchError, match="lost the connection to the first host at 127"):
            wait_until(lambda: leader.client.orders(0))


def test_it_exits_with_its_launcher():
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        with coordinator():
            (process,) = active_children()
            os.write(writing, b"%d\n" % process.pid)
            signal.pause()
    pid = int(os.read(reading, 100))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    for file in (reading, writing):
        os.close(file)
    assert end_soon([pid])


@pytest.mark.long
def test_all_workers_of_a_host_may_connect_at_once():
    """Two connections each, more than strangers may have in a handshake."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs("permission to open 10,000 files", is_present=limits[1] >= 10_000)
    spec = ClusterSpec(("127.0.0.1", free_port()), SECRET, Nodes(1, 1))
    with ExitStack() as exits:
        exits.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        raise_file_limit()
        client = exits.enter_context(join_cluster(spec, store_server.MAX_UNAUTHENTICATED, Config()))
        first = exits.enter_context(socket.create_connection(client.address[:2]))
        for _ in range(2 * store_server.MAX_UNAUTHENTICATED):
            exits.enter_context(socket.create_connection(client.address[:2]))
        first.settimeout(60)
        hello = first.recv(1000)
        assert hello
        first.settimeout(0.2)
        with pytest.raises(TimeoutError):  # the connection stays open
            first.recv(1)
