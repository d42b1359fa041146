"""In-memory snapshots of workers that are killed at every write."""

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
from hypothesis import given
from hypothesis import strategies as st

from samestep import host
from samestep.cluster import find_process
from samestep.comm.base import Alone, World
from samestep.config import merge
from samestep.errors import SnapshotError
from samestep.handoff import SLOTS, open_launcher_state
from samestep.record import open_record
from samestep.snapshot import files, in_memory, load_newest, memory_slot
from samestep.snapshot.in_memory import InMemorySnapshots, Saving
from samestep.snapshot.manager import SnapshotManager, Tracked
from samestep.snapshot.part import StagingBuffer, contribution_of
from tests.snapshot.exact import exact
from tests.snapshot.saving import save_once, sliced, small_state
from tests.worlds import Threaded, in_threads

INFO = {"lanes": 8, "seed": 0, "epoch": 3}


class KilledError(Exception):
    """Simulates the death of a worker."""


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(memory_slot, "SEGMENT_BYTES", 200)
    monkeypatch.setattr(files, "TRANSFER_BYTES", 1000)


def process(rank, workers, on_host):
    """Return the process of a worker; each host has equally many."""
    return replace(
        find_process({}),
        rank=rank,
        world_size=workers,
        local_rank=rank % on_host,
        local_world_size=on_host,
    )


def team(hosts, workers, every="1"):
    """Return the in-memory snapshots of all workers on these hosts; saving needs no world."""
    on_host = workers // len(hosts)
    snapshots = []
    for rank in range(workers):
        world = Alone()
        world.rank, world.size = rank, workers
        snapshots.append(
            InMemorySnapshots(
                hosts[rank // on_host], process(rank, workers, on_host), world, Path("run"), every
            )
        )
    return snapshots


def momentum(step):
    return torch.arange(step, step + 100 + 7 * (step % 3), dtype=torch.float32)


def state(step):
    """Return the complete state after a step; its size differs between steps."""
    return {
        **small_state(step),
        "optimizer": {"momentum": momentum(step)},
        "streams": {lane: torch.full((2,), lane) for lane in range(4)},
    }


def save(snapshots, worker, step, attempt="a"):
    """Save a worker's part: shares of tensors, a slice of the momentum, and its own lanes."""
    workers = len(snapshots)
    size = len(momentum(step))
    low, high = (size * number // workers for number in (worker, worker + 1))
    own_state = {
        "optimizer": {"momentum": sliced(momentum(step), low, high)},
        "streams": {lane: torch.full((2,), lane) for lane in range(4) if lane % workers == worker},
    }
    saving = Saving(step, attempt, INFO, time.monotonic())
    snapshots[worker].save(saving, small_state(step), own_state)


def save_all(snapshots, step, attempt="a"):
    for worker in range(len(snapshots)):
        save(snapshots, worker, step, attempt)


def refuse(kind, **fields):
    raise AssertionError(kind, fields)


def ordered(complete):
    """Return a state with sorted lanes of its streams; parts are merged in the order of workers."""
    return exact({**complete, "streams": dict(sorted(complete["streams"].items()))})


def load_of(launcher_state, report=refuse):
    """Return the step of the snapshot that a worker loads after checking its bits, or None."""
    snapshot = load_newest(None, Alone(), report, team([launcher_state], 1)[0])
    if snapshot is None:
        return None
    assert ordered(snapshot.state) == ordered(state(snapshot.step))
    assert snapshot.info == INFO
    return snapshot.step


@contextmanager
def death(at):
    """Raise at write or checksum number `at`; a write longer than the header is cut in half."""
    write, checksum, points = os.pwrite, memory_slot.checksum, iter(range(10**9))

    def pwrite(file, data, offset):
        if next(points) == at:
            if len(data) > memory_slot._HEADER.size:
                write(file, bytes(data)[: len(data) // 2], offset)
            raise KilledError
        return write(file, data, offset)

    def checksum_of(data):
        if next(points) == at:
            raise KilledError
        return checksum(data)

    with (
        mock.patch.object(memory_slot.os, "pwrite", pwrite),
        mock.patch.object(memory_slot, "checksum", checksum_of),
    ):
        yield


def test_snapshots_work_at_every_number_of_workers():
    for workers in range(1, 5):
        with open_launcher_state(workers) as launcher_state:
            assert load_of(launcher_state) is None
            snapshots = team([launcher_state], workers)
            for step in range(1, 6):
                save_all(snapshots, step)
                assert load_of(launcher_state) == step


@given(st.data())
def test_killed_workers_leave_the_last_snapshot_that_all_of_them_finished(data):
    """Kill every worker at any write of the last save, in attempts at any number of workers."""
    step, newest = 0, None
    with open_launcher_state(4) as launcher_state:
        for attempt in "abcde":
            snapshots = team([launcher_state], data.draw(st.integers(1, 4), label="workers"))
            for worker_snapshots in snapshots:  # each one sees all parts
                with mock.patch.object(worker_snapshots, "_world", Alone()):
                    load_newest(None, Alone(), refuse, worker_snapshots)
            for _ in range(data.draw(st.integers(0, 3), label="snapshots")):
                step += 1
                save_all(snapshots, step, attempt)
                newest = step
            step += 1
            cuts = [data.draw(st.none() | st.integers(0, 20), label="killed at") for _ in snapshots]
            finished = [
                make_until(snapshots, worker, step, attempt, cut) for worker, cut in enumerate(cuts)
            ]
            newest = step if all(finished) else newest
            assert load_of(launcher_state) == newest


def make_until(snapshots, worker, step, attempt, cut):
    """Return whether a worker saved its part before it was killed at a write."""
    if cut is None:
        save(snapshots, worker, step, attempt)
        return True
    try:
        with death(cut):
            save(snapshots, worker, step, attempt)
    except KilledError:
        return False
    return True


def test_every_byte_counts():
    with open_launcher_state(1) as launcher_state:
        snapshots = team([launcher_state], 1)
        save_all(snapshots, 1)
        save_all(snapshots, 2)
        file = launcher_state.slots[0][1]
        content = os.pread(file, os.fstat(file).st_size, 0)
        for index in (*range(memory_slot._HEADER.size), *range(memory_slot.START, len(content), 5)):
            os.pwrite(file, bytes([content[index] ^ 1]), index)
            reported = []
            assert (
                load_of(
                    launcher_state,
                    lambda kind, reason, reported=reported: reported.append((kind, reason)),
                )
                == 1
            )
            ((kind, reason),) = reported
            assert kind == "in_memory_snapshot_rejected"
            assert "damaged" in reason
            os.pwrite(file, content[index : index + 1], index)
        assert load_of(launcher_state) == 2


def test_a_in_memory_snapshot_wins_over_a_snapshot_of_its_step_and_older_ones_only(tmp_path):
    with open_launcher_state(1) as launcher_state:
        save_all(team([launcher_state], 1), 2)
        for step, expected in ((1, None), (2, None), (3, "step-00000003")):
            save_once(tmp_path, step, small_state(step))
            snapshot = load_newest(tmp_path, Alone(), refuse, team([launcher_state], 1)[0])
            assert snapshot.path.name == (expected or "in-memory-snapshot-of-step-2")


def load_on(hosts, after, world, report=refuse):
    """Return the snapshots of a worker of these hosts, and what it loads."""
    number = world.rank // (after // len(hosts))
    world.local_ranks = range(number, number + 1)  # threads of one process, as if on these hosts
    place = process(world.rank, after, after // len(hosts))
    snapshots = InMemorySnapshots(hosts[number], place, world, Path("run"), "1")
    return load_newest(None, world, report, snapshots)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 4), (4, 2)])
def test_hosts_send_parts_that_others_lack_to_one_receiver(before, after, monkeypatch):
    received = []

    def transfer(world, sent, incoming, what):
        received.extend((world.rank, len(part)) for part in incoming.values())
        World.transfer(world, sent, incoming, what)

    monkeypatch.setattr(Threaded, "transfer", transfer, raising=False)
    with open_launcher_state(2) as first, open_launcher_state(2) as second:
        snapshots = team([first, second], before)
        save_all(snapshots, 1)
        save_all(snapshots, 2)

        def body(world):
            snapshot = load_on([first, second], after, world)
            return snapshot.step, ordered(snapshot.state)

        assert in_threads(after, body) == [(2, ordered(state(2)))] * after
        slots = [pair[1] for host in (first, second) for pair in host.slots]
        contents = [memory_slot.read(slot) for slot in slots]
        sizes = [content.part.file.size for content in contents if content is not None]
    assert {rank for rank, _ in received} == {0, after // 2}
    # each host receives every file of the other one once, in pieces of 1,000 / 2 bytes at most
    assert sum(size for _, size in received) == sum(sizes)
    assert len(received) <= 2 * (sum(sizes) // 2 // 400 + 2)


def test_a_part_that_is_damaged_on_one_host_is_rejected_on_all():
    with open_launcher_state(2) as first, open_launcher_state(2) as second:
        snapshots = team([first, second], 4)
        save_all(snapshots, 1)
        save_all(snapshots, 2)
        file = second.slots[1][1]
        byte = os.pread(file, 1, memory_slot.START + 20)[0]
        os.pwrite(file, bytes([byte ^ 1]), memory_slot.START + 20)

        def body(world):
            reported = []
            snapshot = load_on(
                [first, second], 4, world, lambda kind, reason: reported.append((kind, reason))
            )
            return snapshot.step, ordered(snapshot.state), reported

        ((step, loaded, ((kind, reason),)), *others) = in_threads(4, body)
        assert others == [(step, loaded, [(kind, reason)])] * 3
    assert (step, kind) == (1, "in_memory_snapshot_rejected")
    assert loaded == ordered(state(1))
    assert "damaged" in reason


def test_the_parts_of_a_lost_host_are_lost():
    with open_launcher_state(1) as here:
        with open_launcher_state(1) as gone:
            save_all(team([here, gone], 2), 1)
        assert load_of(here) is None


def test_fewer_replacement_workers_free_the_memory_of_the_others():
    with open_launcher_state(3) as launcher_state:
        save_all(team([launcher_state], 3), 1)
        (snapshots,) = team([launcher_state], 1)
        assert load_newest(None, Alone(), refuse, snapshots).step == 1
        save_all([snapshots], 2)
        assert os.fstat(launcher_state.slots[2][0]).st_size > 0
        save_all([snapshots], 3)
        assert [os.fstat(file).st_size > 0 for pair in launcher_state.slots for file in pair] == [
            True
        ] * SLOTS + [False] * 2 * SLOTS
        assert load_of(launcher_state) == 3


def test_workers_communicate_between_two_saves():
    with open_launcher_state(1) as launcher_state:
        (snapshots,) = team([launcher_state], 1)
        barriers = []
        for step in (1, 2, 3):
            save_all([snapshots], step)
            barriers.append(snapshots._world.barriers)
        snapshots._world.barrier("exchanging gradients")
        save_all([snapshots], 4)
        assert [*barriers, snapshots._world.barriers] == [0, 1, 2, 3]


def test_auto_saves_immediately_and_then_as_all_workers_agree(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(in_memory.time, "monotonic", lambda: clock.now)

    def slow_write(*_):
        clock.now += 0.5

    monkeypatch.setattr(memory_slot.MemorySlot, "write", slow_write)
    with open_launcher_state(1) as launcher_state:
        (snapshots,) = team([launcher_state], 1, "auto")
        assert snapshots.is_due(1, agreed=False)
        snapshots.save(Saving(1, "a", INFO, clock.now), small_state(1), {})
        assert not snapshots.time_is_up()
        clock.now += 49.9
        assert not snapshots.time_is_up()
        clock.now += 0.2
        assert snapshots.time_is_up()
        assert [snapshots.is_due(2, agreed=agreed) for agreed in (False, True)] == [False, True]


def stage(snapshots, worker, step):
    """Save a worker's part for a snapshot on disk, too; return the data file."""
    own_part, values = contribution_of(small_state(step), {}, worker, len(snapshots))
    data = snapshots[worker].stage(Saving(step, "a", INFO, time.monotonic()), own_part, values)
    assert bytes(data) == bytes(StagingBuffer().copy(own_part, values))
    return data


def test_snapshots_on_disk_are_written_from_a_slot_that_stays_until_all_workers_did():
    with open_launcher_state(2) as launcher_state:
        snapshots = team([launcher_state], 2)

        def newest():
            keys = InMemorySnapshots(
                launcher_state, process(0, 1, 1), Alone(), Path("run"), "1"
            ).find(refuse)
            return [(key.step, key.slot) for key in keys]

        save_all(snapshots, 1)
        staged = [(stage(snapshots, worker, 2)) for worker in range(2)]
        contents = list(map(bytes, staged))
        assert newest() == [(1, 0), (2, 1)]
        for step in (3, 4, 5):
            for worker, worker_snapshots in enumerate(snapshots):
                own_state = {"streams": {worker: torch.full((2,), step)}}
                saving = Saving(step, "a", INFO, time.monotonic())
                worker_snapshots.save(saving, small_state(step), own_state, writing=True)
            assert newest() == [(2, 1), (step, 0)]
        assert list(map(bytes, staged)) == contents
        save_all(snapshots, 6)
        save_all(snapshots, 7)
        assert newest() == [(6, 1), (7, 0)]


def test_a_step_that_was_saved_for_disk_is_not_saved_again():
    with open_launcher_state(1) as launcher_state:
        (snapshots,) = team([launcher_state], 1)
        stage([snapshots], 0, 1)
        with mock.patch.object(memory_slot.MemorySlot, "write") as write:
            snapshots.save(
                Saving(1, "a", INFO, time.monotonic()), small_state(1), {}, writing=False
            )
        assert not write.called


@pytest.mark.parametrize(("available", "fits"), [(12, True), (11, False)])
def test_the_room_for_all_copies_and_for_a_resume_is_checked(available, fits, monkeypatch):
    monkeypatch.setattr(in_memory, "available_bytes", lambda: available * 2**20)
    with open_launcher_state(1) as first, open_launcher_state(1) as second:
        worker_snapshots, _ = team([first, second], 2)
        # per worker 2 slots of 2 MiB; on resume 4 MiB, and 2 MiB from the other host
        monkeypatch.setattr(worker_snapshots, "_stages", False)  # and 2 MiB for snapshots on disk
        nbytes = 2 * 2**20 - memory_slot.START
        monkeypatch.setattr(in_memory, "TRANSFER_BYTES", 2**31)
        if fits:
            worker_snapshots._check_memory(nbytes)
        else:
            with pytest.raises(SnapshotError, match="GB for replacement workers to read them"):
                worker_snapshots._check_memory(nbytes)


def test_a_failed_save_is_reported_and_is_the_last(tmp_path, caplog):
    events = []
    with (
        open_launcher_state(1) as launcher_state,
        mock.patch.object(
            memory_slot.os, "posix_fallocate", side_effect=OSError(12, "Cannot allocate memory")
        ),
    ):
        (snapshots,) = team([launcher_state], 1)
        record = mock.Mock(
            wraps=open_record(tmp_path, writes=False),
            event=lambda kind, **fields: events.append((kind, fields)),
        )
        manager = SnapshotManager(
            merge({}, {}), Alone(), record, "a", dict, None, snapshots, tracked=Tracked(None)
        )
        manager.tracked.add("model", torch.nn.Linear(2, 2), None)
        manager.save_in_memory(1, lambda: ({"run": {"lanes": 8, "epoch": 0, "positions": {}}}, {}))
        manager.save_in_memory(2, lambda: ({"run": {"lanes": 8, "epoch": 0, "positions": {}}}, {}))
        assert not snapshots.time_is_up()
    assert events == [
        ("in_memory_snapshot_failed", {"step": 1, "reason": "[Errno 12] Cannot allocate memory"})
    ]
    assert "no more in-memory snapshots: [Errno 12]" in caplog.text


@pytest.mark.parametrize(("is_new", "reporting"), [(True, [0]), (False, [])])
def test_one_worker_reports_once_that_no_memory_outlives_workers(is_new, reporting):
    with (
        mock.patch.object(
            host.os, "memfd_create", side_effect=PermissionError(1, "Operation not permitted")
        ),
        open_launcher_state(2) as launcher_state,
    ):
        snapshots = team([launcher_state], 2)
        reported = {}
        for rank, worker_snapshots in enumerate(snapshots):
            assert worker_snapshots.find(refuse) == []
            worker_snapshots.report_start(0, is_new=is_new)
            try:
                saving = Saving(1, "a", INFO, time.monotonic())
                worker_snapshots.save(saving, small_state(1), {})
            except SnapshotError as error:
                reported[rank] = str(error)
    assert list(reported) == reporting
    assert all("refuses memfd_create" in reason for reason in reported.values())


def test_a_truncated_part_is_rejected():
    with open_launcher_state(1) as launcher_state:
        save_all(team([launcher_state], 1), 1)
        file = launcher_state.slots[0][0]
        os.ftruncate(file, os.fstat(file).st_size - 1)
        with pytest.raises(SnapshotError, match="damaged"):
            memory_slot.read(file)
