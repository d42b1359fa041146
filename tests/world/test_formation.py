from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from samestep.config import Config
from samestep.errors import ConfigError, WorldError
from samestep.launch.place import find_place
from samestep.world import Alone, connect, formation
from samestep.world.distributed import Distributed
from samestep.world.shared import Shared
from tests.workers import run_workers, try_workers
from tests.worlds import shared_world


def connected():
    """Return the kind of world that `connect` chooses, and its hosts, after it has met the others."""
    world = connect(find_place(os.environ), Config(), cuda=False)
    world.barrier("meeting")
    world.close()
    return type(world), [list(host) for host in world.hosts]


def test_workers_of_one_host_share_memory():
    assert run_workers(connected, 3) == [(Shared, [[0, 1, 2]])] * 3


def test_one_worker_is_alone_and_lanes_must_do_for_all():
    place = find_place({})
    assert isinstance(connect(place, Config(), cuda=False), Alone)
    with pytest.raises(ConfigError, match="lanes=2 was given for 3 workers"):
        connect(replace(place, workers=3), Config(lanes=2), cuda=False)


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


def test_a_worker_that_never_comes_is_an_error_after_the_timeout():
    def body():
        if os.environ["RANK"] == "0":
            return
        with pytest.raises(WorldError, match="worker 1 got no answer from the others while forming the world"):
            shared_world(patience=1)

    assert [outcome.exitcode for outcome in try_workers(body, 2)] == [0, 0]


def test_it_is_named_where_the_store_is_the_launcher_s():
    """A launcher's store answers before all workers have come, and serves one world after another."""

    def body():
        shared_world().close()
        world = shared_world()
        world.close()
        if world.rank == 1:
            return
        with pytest.raises(WorldError, match=r"worker 0 got no answer from the others while forming the world.*worker 1 did not come"):
            shared_world(patience=1)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert run_workers(body, 2, environment=environment) == [None, None]
