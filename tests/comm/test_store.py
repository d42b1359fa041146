"""Stores: the coordinator's and torch's own must behave alike for torch.distributed."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

from samestep.cluster import find_process, gloo_interface, listen_at_master
from samestep.comm import token_store
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import rendezvous
from samestep.comm.store import WAIT_SECONDS, StoreClient
from samestep.comm.token_store import TokenStore, join_store, store_variables
from samestep.config import TOKEN
from samestep.errors import WorldError
from tests.launch.coordinators import SECRET, coordinator
from tests.ports import free_port
from tests.workers import run_workers

SOON = timedelta(seconds=60)


OPEN = """
import os
from samestep.cluster import find_process
from samestep.comm.store import open_store
open_store(find_process(os.environ), "samestep/0", 20)[1].close()
"""


@pytest.mark.long
def test_a_process_that_exits_has_no_unclosed_sockets():
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", OPEN],
        env={**os.environ, **place, "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "unclosed" not in done.stderr


def own_addresses():
    """Return this host's IPv4 addresses that others can reach."""
    entries = [entry for addresses in psutil.net_if_addrs().values() for entry in addresses]
    return [
        entry.address
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]


def variables(member, rank=0, attempt=0):
    return {"RANK": str(rank), TOKEN: SECRET, **store_variables(member.address, attempt)}


@pytest.fixture(autouse=True)
def _close_stores():
    """Close the stores of a test, which stay open in a worker until it exits."""
    yield
    while token_store._open:
        token_store._open[-1].close()


@pytest.fixture
def member():
    with coordinator() as member:
        member.start()
        yield member


@pytest.fixture(params=["ours", "torch's"])
def store(request):
    if request.param == "torch's":
        yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
        return
    yield join_store(variables(request.getfixturevalue("member")), SOON)


@pytest.mark.parametrize("prefixed", [False, True])
def test_methods_of_a_store(store, prefixed):
    before = store.num_keys()
    store = PrefixStore("some/prefix", store) if prefixed else store
    store.set("text", "value")
    store.set("bytes", bytes(range(256)))
    assert store.get("text") == b"value"
    assert store.get("bytes") == bytes(range(256))
    assert store.add("number", 3) == 3
    assert store.add("number", -5) == -2
    assert store.get("number") == b"-2"
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "other"])
    assert store.compare_set("text", "wrong", "new") == b"value"
    assert store.compare_set("text", "value", "new") == b"new"
    assert store.compare_set("first", "", "first") == b"first"
    assert store.compare_set("first", "", "late") == b"first"
    assert store.compare_set("nothing", "expected", "new") == b"expected"
    assert not store.check(["nothing"])
    store.append("text", " and more")
    store.append("empty", "")
    store.multi_set(["one", "two"], ["1", "2"])
    assert store.multi_get(["one", "two", "text"]) == [b"1", b"2", b"new and more"]
    assert store.delete_key("one")
    assert not store.delete_key("one")
    assert store.has_extended_api()
    assert store.num_keys() - before == 6


def test_a_missing_key_is_an_error_after_the_timeout(store):
    with pytest.raises(DistStoreError):
        store.wait(["never"], timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError):
        store.get("never")
    with pytest.raises(DistStoreError):
        store.wait(["never"])
    store.set("still", "here")
    assert store.get("still") == b"here"


def test_a_key_that_is_set_later_is_waited_for(store):
    other = store.clone()
    values = []
    waiting = threading.Thread(target=lambda: values.append(other.get("late")))
    waiting.start()
    store.set("early", "")
    store.set("late", "first")
    waiting.join()
    assert values == [b"first"]


def test_threads_share_a_connection(member):
    store = join_store(variables(member), SOON)
    threads = [
        threading.Thread(target=lambda: [store.add("sum", 1) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("sum", 0) == 200


def test_a_value_may_be_large_and_one_that_is_too_large_is_an_error(member):
    store = join_store(variables(member), SOON)
    store.set("large", bytes(2**21))
    assert store.get("large") == bytes(2**21)
    with pytest.raises(ValueError, match="messages must have at most"):
        store.set("larger", bytes(2**22))


def test_workers_train_over_it_with_gloo(member):
    def body(address):
        import os

        os.environ.update(variables(address, os.environ["RANK"]))
        store = PrefixStore("world", join_store(os.environ, SOON))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=3,
            timeout=timedelta(seconds=60),
        )
        total = torch.ones(3) * dist.get_rank()
        dist.all_reduce(total)
        dist.monitored_barrier()
        group = dist.new_group([0, 2])
        ranks = [None] * 3
        dist.all_gather_object(ranks, dist.get_rank())
        if dist.get_rank() != 1:
            dist.barrier(group)
        dist.destroy_process_group()
        return total.tolist(), ranks

    assert run_workers(body, 3, member) == 3 * [([3.0, 3.0, 3.0], [0, 1, 2])]


def test_worlds_leave_one_connection_to_the_coordinator(member):
    def body(member):
        os.environ.update(variables(member, os.environ["RANK"]))

        def connections():
            tcp_connections = psutil.Process().net_connections("tcp")
            return sum(connection.raddr == member.address for connection in tcp_connections)

        inherited, counts = connections(), []
        for _ in range(2):
            meeting = rendezvous(find_process(os.environ), 60.0, share=False)
            with gloo_interface("127.0.0.1"):
                world = Distributed(meeting, cuda=False)
            counts.append(connections() - inherited)
            world.close()
            counts.append(connections() - inherited)
        return counts

    assert run_workers(body, 2, member) == 2 * [[3, 1, 3, 1]]


def test_there_is_no_store_without_a_coordinator():
    assert join_store({"RANK": "0"}, SOON) is None


def test_another_process_cannot_claim_a_taken_rank(member, monkeypatch):
    join_store(variables(member), SOON)
    message = r"refused this worker: .*:7 claims rank 0, which belongs to "
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 7)
        with pytest.raises(WorldError, match=message):
            join_store(variables(member), SOON)


def test_a_worker_of_an_earlier_attempt_is_refused_and_disconnected(member):
    old = join_store(variables(member), SOON)
    old.set("key", "old")
    member.restart()
    with pytest.raises(DistNetworkError):
        old.get("key")
    with pytest.raises(WorldError, match="expected a worker of attempt 1, got attempt 0"):
        join_store(variables(member), SOON)
    assert not join_store(variables(member, attempt=1), SOON).check(["key"])


def test_a_wrong_token_is_an_error(member):
    with pytest.raises(WorldError, match="the coordinator there has a different token"):
        join_store({**variables(member), TOKEN: "another token"}, SOON)


def test_a_late_response_is_not_given_to_the_next_call(member, monkeypatch):
    store = join_store(variables(member), SOON)
    monkeypatch.setattr(store._link, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.set("key", "value")
    monkeypatch.undo()
    with pytest.raises(DistNetworkError):
        store.get("key")


def interrupt(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("10.1.2.3", "::"),
        *((address, address) for address in own_addresses()),
    ],
)
def test_a_store_listens_at_the_master_s_address(address, listens):
    """It listens on all addresses only if this host does not have that one."""
    process = replace(find_process({}), address=address)
    with listen_at_master(process) as listener:
        assert listener.getsockname()[0] == listens
        # taken
        assert listen_at_master(replace(process, port=listener.getsockname()[1])) is None


def test_many_values_come_in_as_many_answers_as_they_need(member, monkeypatch):
    store = join_store(variables(member), SOON)
    values = [bytes([number]) * 300_000 for number in range(9)]
    keys = [str(number) for number in range(len(values))]
    store.multi_set(keys, values)
    requests = []
    request = TokenStore._request
    monkeypatch.setattr(
        TokenStore,
        "_request",
        lambda self, what, *args, **fields: (
            requests.append(what) or request(self, what, *args, **fields)
        ),
    )
    assert store.multi_get(keys) == values
    assert 2 <= len(requests) <= 5
    assert store.multi_get([]) == []


@pytest.fixture(params=[False, True])
def clients(request, store):
    """Return a client of each store, with and without signed values."""
    is_own = isinstance(store, TokenStore)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    key = b"key" if request.param and not is_own else None
    yield StoreClient(store, silent, hosts_store=False, seconds=60, key=key, is_own=is_own)
    silent.close()


@pytest.fixture
def requests(monkeypatch):
    """Return the names of the requests that clients make."""
    methods = []
    request = StoreClient._request
    monkeypatch.setattr(
        StoreClient,
        "_request",
        lambda self, method, *args: methods.append(method) or request(self, method, *args),
    )
    return methods


def test_values_of_many_keys_are_read_in_two_requests_plus_some_for_each_missing_one(
    clients, requests
):
    keys = [f"many/{number}" for number in range(64)]
    for number, key in enumerate(keys):
        clients.put(key, number)
    requests.clear()
    assert clients.get_many(keys) == list(range(64))
    assert requests == ["check", "multi_get"]
    requests.clear()
    assert clients.get_many([*keys, "missing"]) == [*range(64), None]
    assert len(requests) < 25
    assert clients.get_many([]) == []


def test_a_client_waits_for_late_keys_with_few_requests(clients, store, requests):
    assert set(map(tuple, clients.wait_for(["early", "late"], 0.05, 1))) == {()}
    clients.put("early", 1)
    silent = clients._liveness
    other = StoreClient(store.clone(), silent, hosts_store=False, seconds=60, key=clients.key)
    timer = threading.Timer(1.0, other.put, ["late", {"a": 1}])
    requests.clear()
    started = time.monotonic()
    timer.start()
    *misses, values = iter_until(clients.wait_for(["early", "late"], 60, 1), len)
    waited = time.monotonic() - started
    timer.join()
    assert waited >= 1.0
    assert values == [1, {"a": 1}]
    assert misses == [[]] * len(misses)
    requests.remove("set")
    assert requests.pop() == "multi_get"
    if isinstance(store, TokenStore):
        assert requests == ["wait"] * (1 + int(waited / WAIT_SECONDS))
    else:  # each pause is 2% of the time that was waited, once that is 25 ms
        assert len(requests) < 55 + math.log(waited / 0.025, 1.02)


def iter_until(items, condition):
    for item in items:
        yield item
        if condition(item):
            return
