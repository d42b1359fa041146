from __future__ import annotations

from pathlib import Path

import torch

from samestep.world import shared
from tests.worlds import in_processes

SIZE = 1000


def test_all_workers_see_what_each_wrote_and_no_file_stands_for_it():
    def body(world):
        before = set(Path("/dev/shm").iterdir())
        buffers = world.shared(SIZE)
        buffers[world.rank].fill_(world.rank + 1)
        world.barrier("writing")
        seen = [buffer.unique().tolist() for buffer in buffers]
        world.barrier("reading")
        return seen, {len(buffer) for buffer in buffers}, set(Path("/dev/shm").iterdir()) - before

    assert in_processes(3, body) == [([[1], [2], [3]], {SIZE}, set())] * 3


def test_nothing_is_shared_where_one_worker_cannot_see_the_others(monkeypatch):
    def body(world):
        if world.rank == 1:

            def elsewhere(offer, nbytes):
                raise FileNotFoundError("another host")

            monkeypatch.setattr(shared, "_open", elsewhere)
        return world.shared(SIZE)

    assert in_processes(2, body) == [None, None]


def test_a_file_of_another_process_is_never_taken_for_a_buffer():
    def body(world):
        if world.rank == 0:
            offers = world.all_gather_json
            world.all_gather_json = lambda value, what: offers({**value, "name": "another"} if isinstance(value, dict) else value, what)
        return world.shared(SIZE)

    assert in_processes(2, body) == [None, None]


def test_one_worker_alone_shares_with_nobody():
    assert in_processes(1, lambda world: world.shared(SIZE)) == [None]


def test_an_empty_buffer_can_be_shared():
    assert in_processes(2, lambda world: [buffer.dtype for buffer in world.shared(0)]) == [[torch.uint8] * 2] * 2
