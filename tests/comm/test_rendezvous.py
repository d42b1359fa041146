from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from samestep.cluster import find_process
from samestep.comm import rendezvous as formation
from samestep.comm import store
from samestep.comm.base import Alone
from samestep.comm.connect import connect
from samestep.comm.distributed import Distributed
from samestep.comm.shared_memory import Shared
from samestep.config import Config
from samestep.errors import ConfigError, WorldError
from tests.seccomp import refuse
from tests.workers import run_workers
from tests.worlds import shared_world


def connected():
    """Return the kind of world that `connect` chooses, and its hosts, after it has met the others."""
    world = connect(find_process(os.environ), Config(), cuda=False)
    world.barrier("meeting")
    world.close()
    return type(world), [list(host) for host in world.hosts]


def test_workers_of_one_host_share_memory():
    assert run_workers(connected, 3) == [(Shared, [[0, 1, 2]])] * 3


def test_one_worker_is_alone_and_lanes_must_do_for_all():
    place = find_process({})
    assert isinstance(connect(place, Config(), cuda=False), Alone)
    with pytest.raises(ConfigError, match="lanes=2 was given for 3 workers"):
        connect(replace(place, world_size=3), Config(lanes=2), cuda=False)


def test_workers_that_are_started_as_two_hosts_share_memory_inside_each():
    def body():
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE=str(2 - rank // 2))
        return connected()

    assert run_workers(body, 3) == [(Distributed, [[0, 1], [2]])] * 3


@pytest.mark.parametrize("lacking", ["pidfd_open", "memfd_create"])
def test_where_one_lacks_what_sharing_needs_it_is_a_host_of_its_own(lacking, monkeypatch):
    def body():
        if os.environ["RANK"] == "1":
            monkeypatch.delattr(os, lacking)
        return connected()

    assert run_workers(body, 4) == [(Distributed, [[0], [1], [2, 3]])] * 4


def test_where_a_sandbox_refuses_what_sharing_needs_each_is_a_host_of_its_own():
    def body():
        refuse("memfd_create")
        return connected()

    assert run_workers(body, 2) == [(Distributed, [[0], [1]])] * 2


def test_a_worker_on_another_kernel_is_another_host(monkeypatch, tmp_path):
    def body():
        if os.environ["RANK"] == "0":
            monkeypatch.setattr(formation, "BOOT_ID", tmp_path / "boot_id")
            formation.BOOT_ID.write_text("another")
        return connected()

    assert run_workers(body, 2) == [(Distributed, [[0], [1]])] * 2


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1))
def test_hosts_are_the_runs_of_ranks_with_one_name(names):
    hosts = formation._hosts(names)
    assert [rank for host in hosts for rank in host] == list(range(len(names)))
    for host in hosts:
        assert len(host) == 1 or {names[rank] for rank in host} in [{"a"}, {"b"}]
    for left, right in pairwise(hosts):
        assert names[left[0]] != names[right[0]] or names[left[0]] is None


def test_workers_that_never_come_are_named(monkeypatch):
    both_are_there = get_context("fork").Barrier(2)
    put_first = store.Line.put_first

    def put_and_wait(line, key, value):
        """Start the timeout only when both offers are in the store."""
        first = put_first(line, key, value)
        if key.startswith("offer/"):
            both_are_there.wait()
        return first

    def body():
        if os.environ["RANK"] in "02":
            with pytest.raises(WorldError) as caught:
                shared_world(timeout=3)
            return str(caught.value)
        return None

    monkeypatch.setattr(
        formation, "open_store", lambda place, prefix, _: store.open_store(place, prefix, 60.0)
    )
    monkeypatch.setattr(store.Line, "put_first", put_and_wait)
    first, _, third, _ = run_workers(body, 4)
    for rank, message in ((0, first), (2, third)):
        assert message.startswith("workers 1 and 3 did not come within 3 s")
        assert (
            f"(worker {rank}, while forming the world, was told RANK={rank} of WORLD_SIZE=4)"
            in message
        )


def test_where_rank_zero_never_comes_there_is_no_store():
    def body():
        if os.environ["RANK"] == "0":
            return
        with pytest.raises(
            WorldError,
            match=r"worker 1 .* forming the world: nobody listens at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+ ",
        ):
            shared_world(timeout=0.5)

    run_workers(body, 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_two_workers_with_one_rank_are_found_at_once(rank):
    def body():
        if os.environ["RANK"] == "3":
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        with pytest.raises(WorldError) as caught:
            shared_world(timeout=60)
        return str(caught.value).partition("; ")[0]

    # after the timeout, the message would name the missing worker 3
    (message,) = set(run_workers(body, 4))
    assert re.fullmatch(
        rf"two workers have rank {rank}: process (\d+) on host \S+ and process (?!\1)\d+ on host \S+",
        message,
    )


@pytest.mark.parametrize(
    "garbage", ["", "{", "[]", "{}", '{"host": "a", "pid": "b", "home": null, "address": null}']
)
def test_a_stranger_who_writes_into_the_store_is_an_error(garbage):
    def body():
        with pytest.raises(
            WorldError, match="expected only this run's workers at MASTER_ADDR and MASTER_PORT"
        ):
            shared_world(timeout=10)

    with launcher_store() as (kept, environment):
        kept.set("attempt/0/samestep/0/offer/1", garbage or " ")
        run_workers(body, 2, environment=environment)


@contextmanager
def launcher_store():
    """Yield a store like the launcher's, which is there before all workers, and the variables that lead to it."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield kept, {"MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_a_launcher_s_store_serves_one_world_after_another():
    def body():
        shared_world().close()
        world = shared_world()
        world.close()
        if world.rank == 1:
            return
        with pytest.raises(WorldError, match=r"worker 1 did not come within 0.5 s"):
            shared_world(timeout=0.5)

    with launcher_store() as (_, environment):
        run_workers(body, 2, environment=environment)


@pytest.mark.parametrize(
    ("address", "listens"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("10.1.2.3", "::")],
)
def test_a_store_at_the_loopback_address_listens_there_alone(address, listens):
    """Elsewhere it listens on all addresses: a host may not have the one by which others know it."""
    place = replace(find_process({}), address=address)
    with store._listener(place) as listener:
        assert listener.getsockname()[0] == listens
        # taken: whose it is will be found out
        assert store._listener(replace(place, port=listener.getsockname()[1])) is None
        assert store._listener(replace(place, rank=1)) is None
