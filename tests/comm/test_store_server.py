"""The store server with random and invalid requests; valid ones are tested with its client."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import warnings
from contextlib import suppress
from random import Random

import pytest

from samestep.comm.link import to_text
from samestep.comm.store_server import KeyValueStore, StoreServer, StoreThread

VALUES = [
    None,
    True,
    0,
    -1,
    10**30,
    0.01,
    float("inf"),
    float("nan"),
    "",
    "x",
    "é",
    to_text(b"12"),
    [],
    ["x"],
    [1],
    {},
    {"x": 1},
]


def test_any_request_has_an_answer_or_an_error():
    random = Random(0)

    async def ask():
        store = KeyValueStore()
        answered = 0
        for _ in range(20_000):
            names = random.sample(
                ["key", "keys", "value", "expected", "amount", "seconds", "other"],
                k=random.randrange(7),
            )
            request = {name: random.choice(VALUES) for name in names}
            request["do"] = random.choice(
                [
                    "set",
                    "get",
                    "add",
                    "append",
                    "check",
                    "compare_set",
                    "count",
                    "delete",
                    "wait",
                    "",
                    None,
                    [],
                ]
            )
            with suppress(ValueError):
                json.dumps(
                    await asyncio.wait_for(
                        store.handle({**request, "seconds": request.get("seconds") and 0}), 5
                    )
                )
                answered += 1
        return answered

    assert asyncio.run(ask()) > 1000


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "x", None, 1e10])
def test_a_wait_is_bounded(seconds):
    with pytest.raises(ValueError, match=r"seconds must be|invalid request|could not convert"):
        asyncio.run(KeyValueStore().handle({"do": "wait", "keys": ["never"], "seconds": seconds}))


def test_connections_at_the_end_are_closed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests have left
    name = f"\0samestep-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    thread = StoreThread(StoreServer("", 0), listener)
    is_blocked, may_go_on = threading.Event(), threading.Event()
    thread._loop.call_soon_threadsafe(lambda: (is_blocked.set(), may_go_on.wait(60)))
    assert is_blocked.wait(60)
    thread._loop.call_soon_threadsafe(thread._end.set)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for client in clients:
        client.connect(name)
    may_go_on.set()
    thread.close()
    for client in clients:
        client.close()
    del thread
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
