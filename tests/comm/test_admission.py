"""Servers at the limit of open files, with more strangers than they may have connections."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from samestep.cluster import network
from samestep.cluster.network import peer_user
from samestep.comm import admission, store_server
from samestep.comm.admission import connections_within, first_of_busiest
from samestep.comm.link import Link
from samestep.comm.store_server import StoreServer, StoreThread
from samestep.comm.token_store import join_store_of_rank_0
from samestep.errors import WorldError
from tests.worlds import FORK

TOKEN = "a token of sixteen or more"
FILES = 256
SOON = timedelta(seconds=60)


def test_the_oldest_of_the_address_with_most_connections_is_first():
    assert first_of_busiest({1: "a", 2: "b", 3: "c", 4: "b", 5: "c", 6: "b"}) == 2


def test_strangers_leave_files_to_the_server(monkeypatch):
    for files, limit in ((256, 128), (1024, 512), (10_000, 4096), (-1, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections_within(4096) == limit


def listening():
    return socket.create_server(("127.0.0.1", 0))


def serve(listener, errors):
    """Serve a store with few files, whose process prints to `errors`."""
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    StoreThread(StoreServer(TOKEN, 0), listener)._thread.join()


def test_a_flood_of_a_store_prints_nothing_and_keeps_nobody_out(tmp_path):
    with ExitStack() as exits:
        listener = exits.enter_context(listening())
        address = listener.getsockname()
        errors = os.open(tmp_path / "errors", os.O_CREAT | os.O_WRONLY)
        process = FORK.Process(target=serve, args=(listener, errors))
        process.start()
        exits.callback(process.join)
        exits.callback(process.kill)
        for _ in range(2 * FILES):
            exits.enter_context(closing(socket.create_connection(address, 60)))
        Link(address, TOKEN, 60).close()
    assert (tmp_path / "errors").read_text() == ""


def test_no_file_left_is_one_line_and_other_errors_are_reported(monkeypatch, caplog):
    lines = []
    monkeypatch.setattr(admission, "_told_at", [float("-inf")])
    monkeypatch.setattr(admission, "log", lines.append)

    async def report():
        admission.limit_errors()
        loop = asyncio.get_running_loop()
        for number in (errno.EMFILE, errno.ENFILE, errno.EMFILE):
            loop.call_exception_handler({"message": "accept", "exception": OSError(number, "")})
        assert not caplog.records
        loop.call_exception_handler({"message": "another", "exception": OSError(errno.EIO, "")})

    asyncio.run(report())
    assert len(lines) == 1
    assert "files (ulimit -n)" in lines[0]
    assert [record.message for record in caplog.records] == ["another"]


def test_the_kernel_names_the_user_of_a_connection_of_this_host(monkeypatch):
    with listening() as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert peer_user(accepted) == peer_user(client) == os.geteuid()
            monkeypatch.setattr(network, "_sockets", lambda: iter([]))
            assert peer_user(accepted) is None  # another host
    for end in (pair := socket.socketpair()):
        assert peer_user(end) == os.geteuid()
    for end in pair:
        end.close()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_without_a_token_other_users_of_the_host_are_refused(token, monkeypatch):
    thread = StoreThread(StoreServer(token, 0), listener := listening())
    monkeypatch.setattr(store_server, "peer_user", lambda _: os.geteuid() + 1)
    address = listener.getsockname()
    try:
        if token:
            Link(address, token, 60).close()
        else:
            with pytest.raises(ConnectionError):
                Link(address, token, 60)
    finally:
        thread.close()


def test_a_store_is_bounded_and_serves_others_after_that(monkeypatch, capsys):
    monkeypatch.setattr(store_server, "MAX_STORED", 1000)
    thread = StoreThread(StoreServer(TOKEN, 0), listener := listening())
    address = listener.getsockname()
    try:
        stores = [join_store_of_rank_0(address, TOKEN, SOON) for _ in range(2)]
        for _ in range(3):  # the same key again takes no more
            stores[0].set("key", 600 * b"x")
        with pytest.raises(RuntimeError, match="the store does not respond"):
            stores[0].set("other", 600 * b"x")
        assert stores[1].delete_key("key")
        stores[1].set("other", 600 * b"x")
        for store in stores:
            store.close()
    finally:
        thread.close()


def test_a_worker_with_another_token_is_told_so():
    thread = StoreThread(StoreServer(TOKEN, 0), listener := listening())
    try:
        with pytest.raises(WorldError, match="has a different token"):
            join_store_of_rank_0(listener.getsockname(), "another token", SOON)
    finally:
        thread.close()
