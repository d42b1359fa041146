"""Copies in memory, of workers that are killed at everything that they write."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import host as files
from samestep.cluster import find_process
from samestep.comm.base import Alone
from samestep.config import merge
from samestep.errors import SnapshotError
from samestep.handoff import SLOTS, open_launcher_state
from samestep.record import open_record
from samestep.snapshot import in_memory as hot
from samestep.snapshot import load_newest
from samestep.snapshot import memory_slot as slot
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager
from tests.snapshot.exact import exact
from tests.snapshot.saving import save_once, sliced, small_state
from tests.worlds import in_threads

INFO = {"lanes": 8, "seed": 0, "epoch": 3}


class KilledError(Exception):
    """Stands in for the end of a worker."""


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(slot, "SEGMENT_BYTES", 200)
    monkeypatch.setattr(hot, "PASSED_BYTES", 1000)


def place(rank, workers, on_host):
    """Return the place of a worker, of which there are as many on each host."""
    return replace(
        find_process({}),
        rank=rank,
        world_size=workers,
        local_rank=rank % on_host,
        local_world_size=on_host,
    )


def team(hosts, workers, every="1"):
    """Return the copies of all workers, on one or several hosts; what they save needs no world."""
    on_host = workers // len(hosts)
    copies = []
    for rank in range(workers):
        world = Alone()
        world.rank, world.size = rank, workers
        copies.append(
            InMemorySnapshots(
                hosts[rank // on_host], place(rank, workers, on_host), world, Path("run"), every
            )
        )
    return copies


def momentum(step):
    return torch.arange(step, step + 100 + 7 * (step % 3), dtype=torch.float32)


def state(step):
    """Return the whole state after a step; its size differs from step to step."""
    return {
        **small_state(step),
        "optimizer": {"momentum": momentum(step)},
        "streams": {lane: torch.full((2,), lane) for lane in range(4)},
    }


def save(copies, worker, step, attempt="a"):
    """Have one worker make its part of a copy: of some it writes a share, some is sliced, and some lanes are its own."""
    workers = len(copies)
    size = len(momentum(step))
    low, high = (size * number // workers for number in (worker, worker + 1))
    own = {
        "optimizer": {"momentum": sliced(momentum(step), low, high)},
        "streams": {lane: torch.full((2,), lane) for lane in range(4) if lane % workers == worker},
    }
    copies[worker].save(step, attempt, small_state(step), own, INFO, time.monotonic())


def save_all(copies, step, attempt="a"):
    for worker in range(len(copies)):
        save(copies, worker, step, attempt)


def refuse(kind, **fields):
    raise AssertionError(kind, fields)


def ordered(whole):
    """Return a state with the lanes of its streams in order: parts are united in the order of workers."""
    return exact({**whole, "streams": dict(sorted(whole["streams"].items()))})


def load_of(kept, report=refuse):
    """Return the step of the copy that a worker would take, after a look at its bits; None where there is none."""
    snapshot = load_newest(None, Alone(), report, team([kept], 1)[0])
    if snapshot is None:
        return None
    assert ordered(snapshot.state) == ordered(state(snapshot.step))
    assert snapshot.info == INFO
    return snapshot.step


@contextmanager
def death(at):
    """End whoever writes at point number `at`: before a call, or in the middle of one; what is as short as a header is written at once."""
    write, checksum, points = os.pwrite, slot.checksum, iter(range(10**9))

    def pwrite(file, data, offset):
        if next(points) == at:
            if len(data) > slot._HEADER.size:
                write(file, bytes(data)[: len(data) // 2], offset)
            raise KilledError
        return write(file, data, offset)

    def checksum_of(data):
        if next(points) == at:
            raise KilledError
        return checksum(data)

    with (
        mock.patch.object(slot.os, "pwrite", pwrite),
        mock.patch.object(slot, "checksum", checksum_of),
    ):
        yield


def test_there_are_copies_of_every_number_of_workers():
    for workers in range(1, 5):
        with open_launcher_state(workers) as kept:
            assert load_of(kept) is None
            copies = team([kept], workers)
            for step in range(1, 6):
                save_all(copies, step)
                assert load_of(kept) == step


@settings(max_examples=60)
@given(st.data())
def test_killed_workers_leave_the_last_copy_that_all_of_them_finished(data):
    """Attempts at any number of workers; in the last copy of each, every worker is killed at any of its writes, or after them."""
    step, newest = 0, None
    with open_launcher_state(4) as kept:
        for attempt in "abcde":
            copies = team([kept], data.draw(st.integers(1, 4), label="workers"))
            for one in copies:  # each sees what all would
                load_newest(None, Alone(), refuse, one)
            for _ in range(data.draw(st.integers(0, 3), label="copies")):
                step += 1
                save_all(copies, step, attempt)
                newest = step
            step += 1
            cuts = [data.draw(st.none() | st.integers(0, 20), label="killed at") for _ in copies]
            finished = [
                make_until(copies, worker, step, attempt, cut) for worker, cut in enumerate(cuts)
            ]
            newest = step if all(finished) else newest
            assert load_of(kept) == newest


def make_until(copies, worker, step, attempt, cut):
    """Have a worker make its part, or be killed at one of its writes; return whether it finished."""
    if cut is None:
        save(copies, worker, step, attempt)
        return True
    try:
        with death(cut):
            save(copies, worker, step, attempt)
    except KilledError:
        return False
    return True


def test_every_byte_counts():
    with open_launcher_state(1) as kept:
        copies = team([kept], 1)
        save_all(copies, 1)
        save_all(copies, 2)
        file = kept.slots[0][1]
        content = os.pread(file, os.fstat(file).st_size, 0)
        for index in (*range(slot._HEADER.size), *range(slot.START, len(content), 5)):
            os.pwrite(file, bytes([content[index] ^ 1]), index)
            told = []
            assert load_of(kept, lambda kind, reason, told=told: told.append((kind, reason))) == 1
            ((kind, reason),) = told
            assert kind == "hot_copy_rejected"
            assert "damaged" in reason
            os.pwrite(file, content[index : index + 1], index)
        assert load_of(kept) == 2


def test_a_hot_copy_wins_over_a_snapshot_of_its_step_and_older_ones_only(tmp_path):
    with open_launcher_state(1) as kept:
        save_all(team([kept], 1), 2)
        for step, expected in ((1, None), (2, None), (3, "step-00000003")):
            save_once(tmp_path, step, small_state(step))
            snapshot = load_newest(tmp_path, Alone(), refuse, team([kept], 1)[0])
            assert snapshot.path.name == (expected or "hot-copy-of-step-2")


@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 4), (4, 2)])
def test_hosts_pass_on_what_others_lack(before, after):
    with open_launcher_state(2) as here, open_launcher_state(2) as there:
        copies = team([here, there], before)
        save_all(copies, 1)
        save_all(copies, 2)

        def body(world):
            host = (here, there)[world.rank // (after // 2)]
            mine = InMemorySnapshots(
                host, place(world.rank, after, after // 2), world, Path("run"), "1"
            )
            snapshot = load_newest(None, world, refuse, mine)
            return snapshot.step, ordered(snapshot.state)

        assert in_threads(after, body) == [(2, ordered(state(2)))] * after


def test_a_host_that_is_gone_took_its_parts_with_it():
    with open_launcher_state(1) as here:
        with open_launcher_state(1) as gone:
            save_all(team([here, gone], 2), 1)
        assert load_of(here) is None


def test_fewer_successors_give_back_the_memory_of_the_others():
    with open_launcher_state(3) as kept:
        save_all(team([kept], 3), 1)
        (copies,) = team([kept], 1)
        assert load_newest(None, Alone(), refuse, copies).step == 1
        save_all([copies], 2)
        assert os.fstat(kept.slots[2][0]).st_size > 0
        save_all([copies], 3)
        assert [os.fstat(file).st_size > 0 for pair in kept.slots for file in pair] == [
            True
        ] * SLOTS + [False] * 2 * SLOTS
        assert load_of(kept) == 3


def test_workers_meet_between_two_copies():
    with open_launcher_state(1) as kept:
        (copies,) = team([kept], 1)
        meetings = []
        for step in (1, 2, 3):
            save_all([copies], step)
            meetings.append(copies._world.barriers)
        copies._world.barrier("exchanging gradients")
        save_all([copies], 4)
        assert [*meetings, copies._world.barriers] == [0, 1, 2, 3]


def test_auto_makes_the_first_copy_at_once_and_then_as_rank_0_says(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(hot.time, "monotonic", lambda: clock.now)

    def slow_write(*_):
        clock.now += 0.5

    monkeypatch.setattr(slot.MemorySlot, "write", slow_write)
    with open_launcher_state(1) as kept:
        (copies,) = team([kept], 1, "auto")
        assert copies.is_due(1, agreed=False)
        copies.save(1, "a", small_state(1), {}, INFO, clock.now)
        assert not copies.time_is_up()
        clock.now += 49.9
        assert not copies.time_is_up()
        clock.now += 0.2
        assert copies.time_is_up()
        assert [copies.is_due(2, agreed=agreed) for agreed in (False, True)] == [False, True]


def test_a_copy_that_cannot_be_made_is_told_and_is_the_last(tmp_path, caplog):
    events = []
    with (
        open_launcher_state(1) as kept,
        mock.patch.object(
            slot.os, "posix_fallocate", side_effect=OSError(12, "Cannot allocate memory")
        ),
    ):
        (copies,) = team([kept], 1)
        record = mock.Mock(
            wraps=open_record(tmp_path, writes=False),
            event=lambda kind, **fields: events.append((kind, fields)),
        )
        keeper = SnapshotManager(merge({}, {}), Alone(), record, "a", None, copies)
        keeper.tracked.add("model", torch.nn.Linear(2, 2), None)
        keeper.copy(1, lambda: ({"run": {"lanes": 8, "epoch": 0}}, {}))
        keeper.copy(2, lambda: ({"run": {"lanes": 8, "epoch": 0}}, {}))
        assert not copies.time_is_up()
    assert events == [
        ("hot_copy_failed", {"step": 1, "reason": "[Errno 12] Cannot allocate memory"})
    ]
    assert "no more hot copies are made: [Errno 12]" in caplog.text


@pytest.mark.parametrize(("anew", "telling"), [(True, [0]), (False, [])])
def test_where_no_memory_outlives_workers_one_of_them_says_so_once(anew, telling):
    with (
        mock.patch.object(
            files.os, "memfd_create", side_effect=PermissionError(1, "Operation not permitted")
        ),
        open_launcher_state(2) as kept,
    ):
        copies = team([kept], 2)
        told = {}
        for rank, one in enumerate(copies):
            assert one.find(refuse) == []
            one.begin(0, anew=anew)
            try:
                one.save(1, "a", small_state(1), {}, INFO, time.monotonic())
            except SnapshotError as error:
                told[rank] = str(error)
    assert list(told) == telling
    assert all("refuses memfd_create" in reason for reason in told.values())


def test_a_part_that_says_it_is_whole_and_is_cut_is_refused():
    with open_launcher_state(1) as kept:
        save_all(team([kept], 1), 1)
        file = kept.slots[0][0]
        os.ftruncate(file, os.fstat(file).st_size - 1)
        with pytest.raises(SnapshotError, match="damaged"):
            slot.read(file)
