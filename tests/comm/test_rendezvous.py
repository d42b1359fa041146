from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import host as this_host
from samestep.cluster import find_process
from samestep.comm import rendezvous, store
from samestep.comm.base import Alone
from samestep.comm.connect import connect
from samestep.comm.distributed import Distributed
from samestep.comm.shared_memory import Shared
from samestep.config import Config
from samestep.errors import ConfigError, WorldError
from tests.seccomp import refuse
from tests.workers import run_workers
from tests.worlds import launcher_store, shared_world


def connected():
    """Return the kind of world that `connect` chooses, and its hosts, after a barrier."""
    world = connect(find_process(os.environ), Config())
    world.barrier("waiting")
    world.close()
    return type(world), [list(host) for host in world.hosts]


def test_workers_of_one_host_share_memory():
    assert run_workers(connected, 3) == [(Shared, [[0, 1, 2]])] * 3


def test_one_worker_is_alone_and_every_worker_needs_a_lane():
    process = find_process({})
    assert isinstance(connect(process, Config()), Alone)
    with pytest.raises(
        ConfigError, match=r"lanes must be at least the number of workers \(3\), got 2"
    ):
        connect(replace(process, world_size=3), Config(lanes=2))


def test_workers_that_are_started_as_two_hosts_share_memory_within_each():
    def body():
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE=str(2 - rank // 2))
        return connected()

    assert run_workers(body, 3) == [(Distributed, [[0, 1], [2]])] * 3


@pytest.mark.parametrize("missing", ["pidfd_open", "memfd_create"])
def test_a_worker_without_a_needed_system_call_is_a_host(missing, monkeypatch):
    def body():
        if os.environ["RANK"] == "1":
            monkeypatch.delattr(os, missing)
        return connected()

    assert run_workers(body, 4) == [(Distributed, [[0], [1], [2, 3]])] * 4


def test_workers_in_a_sandbox_that_refuses_a_system_call_are_hosts():
    def body():
        refuse("memfd_create")
        return connected()

    assert run_workers(body, 2) == [(Distributed, [[0], [1]])] * 2


def test_a_worker_on_another_kernel_is_another_host(monkeypatch, tmp_path):
    def body():
        if os.environ["RANK"] == "0":
            monkeypatch.setattr(this_host, "BOOT_ID", tmp_path / "boot_id")
            this_host.BOOT_ID.write_text("another")
        return connected()

    assert run_workers(body, 2) == [(Distributed, [[0], [1]])] * 2


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1))
def test_hosts_are_the_runs_of_ranks_with_one_home(names):
    hosts = rendezvous._hosts(names)
    assert [rank for host in hosts for rank in host] == list(range(len(names)))
    for host in hosts:
        assert len(host) == 1 or {names[rank] for rank in host} in [{"a"}, {"b"}]
    for left, right in pairwise(hosts):
        assert names[left[0]] != names[right[0]] or names[left[0]] is None


def test_missing_workers_are_named(monkeypatch):
    both_have_started = get_context("fork").Barrier(2)
    put_first = store.StoreClient.put_first

    def put_and_wait(client, key, value):
        """Start the timeout only when both entries are in the store."""
        first = put_first(client, key, value)
        if key.startswith("worker/"):
            both_have_started.wait()
        return first

    def body():
        if os.environ["RANK"] in "02":
            with pytest.raises(WorldError) as caught:
                shared_world(timeout=3)
            return str(caught.value)
        return None

    def open_patiently(process, prefix, _):
        return store.open_store(process, prefix, 60.0)

    monkeypatch.setattr(rendezvous, "open_store", open_patiently)
    monkeypatch.setattr(store.StoreClient, "put_first", put_and_wait)
    first, _, third, _ = run_workers(body, 4)
    for rank, message in ((0, first), (2, third)):
        assert message.startswith("timed out after 3 s waiting for workers 1 and 3 to start")
        assert (
            f"worker {rank}, while forming the world, was started with RANK={rank} of WORLD_SIZE=4"
            in message
        )


def test_without_rank_zero_there_is_no_store():
    def body():
        if os.environ["RANK"] == "0":
            return
        with pytest.raises(
            WorldError,
            match=r"worker 1 .* forming the world: nothing listens at MASTER_ADDR=127.0.0.1 ",
        ):
            shared_world(timeout=0.5)

    run_workers(body, 2)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_two_workers_with_one_rank_are_found_immediately(rank):
    def body():
        if os.environ["RANK"] == "3":
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        with pytest.raises(WorldError) as caught:
            shared_world(timeout=60)
        return str(caught.value).partition("; ")[0]

    # after the timeout, the message would name the missing worker 3
    (message,) = set(run_workers(body, 4))
    assert re.fullmatch(
        rf"two workers have rank {rank}: process (\d+) on host \S+ and process (?!\1)\d+ on .*",
        message,
    )


@pytest.mark.parametrize(
    "garbage",
    ["", "{", "[]", "{}", '{"host": "a", "pid": "b", "home": null, "address": null, "nonce": ""}'],
)
def test_another_program_in_the_store_is_an_error(garbage):
    def body():
        with pytest.raises(WorldError, match="another program uses MASTER_ADDR and MASTER_PORT"):
            shared_world()

    with launcher_store() as (server, environment):
        server.set("attempt/0/samestep/0/worker/1", garbage or " ")
        run_workers(body, 2, environment=environment)


@pytest.mark.long
def test_a_launcher_s_store_serves_one_world_after_another():
    def body():
        shared_world().close()
        world = shared_world()
        world.close()
        if world.rank == 1:
            return
        # the store may be slow
        with pytest.raises(WorldError, match=r"timed out after 3 s waiting for worker 1 "):
            shared_world(timeout=3)

    with launcher_store() as (_, environment):
        run_workers(body, 2, environment=environment)


@pytest.mark.long
def test_workers_of_torchrun_ignore_what_earlier_attempts_left_in_its_store():
    both = get_context("fork").Barrier(2)

    def body(attempt):
        # torchrun counts a failure, but not that it restarts workers for another host's sake
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt * int(os.environ["RANK"]))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if attempt == 1 and rank == 2:
            return None  # killed before it could join
        if rank == 0 and attempt > 0:
            # time in which the others, which report nothing yet, find the last attempt's round
            time.sleep(0.5)
        if attempt == 1:
            names = r"worker 2" if rank == 0 else "worker 0"
            both.wait()  # with their timeout
            with pytest.raises(WorldError, match=rf"for {names} to join .*SHARE_RDZV_TCP_STORE=1"):
                shared_world(timeout=5)
            return None
        world = shared_world()
        world.barrier("waiting")
        world.close()
        return size

    with launcher_store() as (_, environment):
        environment["TORCHELASTIC_RUN_ID"] = "7"
        for attempt, workers in enumerate([3, 3, 2, 3]):
            expected = [None if attempt == 1 else workers] * workers
            assert run_workers(body, workers, attempt, environment=environment) == expected
