from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep as ss
from samestep.errors import RecordError, SnapshotError
from samestep.snapshot import SnapshotWriter, check, list_snapshots, load, part
from samestep.snapshot.commit import CommitProtocol
from samestep.snapshot.manifest import NAME
from samestep.step.layout import flattened
from samestep.storage import write_atomically
from tests.faults import full_disk
from tests.snapshot.exact import exact, states, tensors
from tests.snapshot.saving import (
    NO_INFO,
    find_newest,
    save,
    save_once,
    sliced,
    small_state,
    team,
)
from tests.workers import run_workers

MEBIBYTE = 2**20


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def ignore(kind: str, **fields: Any) -> None:
    pass


@given(
    shared=st.dictionaries(st.text(max_size=3), states, max_size=3),
    workers=st.integers(1, 4),
    segment_bytes=st.integers(50, 5000),
)
def test_any_number_of_workers_writes_the_same_state(
    tmp_path_factory, shared, workers, segment_bytes
):
    directory = tmp_path_factory.mktemp("run")
    with mock.patch.object(part, "SEGMENT_BYTES", segment_bytes):
        save_once(directory, 7, shared, workers)
    assert exact(load(directory / "step-00000007").state) == exact(shared)


@st.composite
def sharded_tensors(draw, workers):
    """Tensors in any memory order, each with the cuts between its workers' slices."""
    drawn = draw(st.lists(tensors(), min_size=1, max_size=4))
    cuts = [
        sorted(
            draw(st.lists(st.integers(0, t.numel()), min_size=workers - 1, max_size=workers - 1))
        )
        for t in drawn
    ]
    return [
        (tensor, [0, *inner, tensor.numel()]) for tensor, inner in zip(drawn, cuts, strict=True)
    ]


@given(st.data(), st.integers(1, 4))
def test_slices_of_any_memory_order_make_complete_tensors(tmp_path_factory, data, workers):
    sharded = data.draw(sharded_tensors(workers))
    own_states = [
        {
            "optimizer": {
                "state": {
                    i: {"exp_avg": sliced(t, cuts[rank], cuts[rank + 1])}
                    for i, (t, cuts) in enumerate(sharded)
                }
            }
        }
        for rank in range(workers)
    ]
    directory = tmp_path_factory.mktemp("run")
    with team(directory, workers) as (writers, _):
        save(writers, 1, {"model": {"weight": torch.ones(70)}}, own_states)
    complete = load(directory / "step-00000001").state["optimizer"]["state"]
    assert exact(complete) == exact(
        {i: {"exp_avg": tensor} for i, (tensor, _) in enumerate(sharded)}
    )
    for i, (tensor, _) in enumerate(sharded):
        assert exact(flattened(complete[i]["exp_avg"])) == exact(flattened(tensor))


def test_channels_last_comes_back_as_channels_last(tmp_path):
    tensor = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with team(tmp_path, 2) as (writers, _):
        save(
            writers,
            1,
            {"a": tensor},
            [{"b": sliced(tensor, 0, 64)}, {"b": sliced(tensor, 64, 120)}],
        )
    state = load(tmp_path / "step-00000001").state
    for name in ("a", "b"):
        assert torch.equal(state[name], tensor)
        assert state[name].is_contiguous(memory_format=torch.channels_last)


def test_each_worker_writes_its_own_values(tmp_path):
    own_states = [
        {"streams": {rank: {"position": rank, "cache": torch.full((3,), float(rank))}}}
        for rank in range(3)
    ]
    with team(tmp_path, 3) as (writers, _):
        save(
            writers,
            1,
            {"model": {"weight": torch.ones(2)}, "streams": {"count": 3}},
            own_states,
            {"lanes": 3},
            0.5,
        )
    snapshot = load(tmp_path / "step-00000001")
    assert exact(snapshot.state["streams"]) == exact(
        {"count": 3}
        | own_states[0]["streams"]
        | own_states[1]["streams"]
        | own_states[2]["streams"]
    )
    assert (snapshot.step, snapshot.info, snapshot.score) == (1, {"lanes": 3}, 0.5)


def test_equal_values_of_several_workers_are_stored_once(tmp_path):
    own_state = {
        "optimizer": {
            "param_groups": [{"lr": torch.tensor(0.1), "params": [0, 1]}],
            "empty": torch.empty(0),
        }
    }
    with team(tmp_path, 3) as (writers, _):
        save(writers, 1, {}, [own_state, own_state, own_state])
    assert exact(load(tmp_path / "step-00000001").state) == exact(own_state)


@pytest.mark.parametrize(
    ("own_states", "message"),
    [
        (
            [{"a": torch.ones(2)}, {"a": torch.zeros(2)}],
            "tensor a must be equal on all workers, got other values on worker 1",
        ),
        (
            [{"a": torch.ones(2)}, {"a": torch.ones(2, 1)}],
            r"tensor a must be \['float32', \[2\].* on all workers, got \['float32', \[2, 1\]",
        ),
        ([{"a": {"b": 1}}, {"a": {"b": 2}}], "a/b must be equal on all workers, .* got 1 and 2"),
        (
            [{"a": sliced(torch.ones(9), 0, 3)}, {"a": sliced(torch.ones(9), 5, 9)}],
            "tensor a is incomplete: elements 3 to 5 of 9 .* missing",
        ),
        (
            [{"a": sliced(torch.ones(9), 0, 6)}, {"a": sliced(torch.ones(9), 5, 9)}],
            "tensor a is incomplete: elements 5 to 6 of 9 .* duplicates",
        ),
    ],
)
def test_workers_with_different_values_fail(tmp_path, own_states, message):
    with team(tmp_path, 2) as (writers, _), pytest.raises(SnapshotError, match=message):
        save(writers, 1, {}, own_states)
    assert find_newest(tmp_path, ignore) is None


def test_a_tensor_is_either_shared_or_own(tmp_path):
    with team(tmp_path) as ((writer,), _):
        with pytest.raises(
            SnapshotError,
            match="tensor a/b must be either shared by all workers or this worker's own, got both",
        ):
            writer.save(1, {"a": {"b": torch.ones(1)}}, {"a": {"b": torch.ones(1)}}, NO_INFO)
        with pytest.raises(
            SnapshotError,
            match="tensor a must be complete to be shared by all workers, got a slice",
        ):
            writer.save(1, {"a": sliced(torch.ones(4), 0, 4)}, {}, NO_INFO)


def _save_as_a_process(directory: Path, workers: int) -> None:
    rank = int(os.environ["RANK"])
    writer = SnapshotWriter(
        directory,
        rank=rank,
        workers=workers,
        attempt="processes",
        keep_last=2,
        keep_best=0,
        report=ignore,
    )
    for step in range(1, 5):
        writer.save(
            step, small_state(step), {"own": {rank: torch.full((9,), float(step))}}, NO_INFO
        )
    writer.wait()
    writer.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_save_together(tmp_path, workers):
    run_workers(_save_as_a_process, workers, tmp_path, workers)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
    own_state = {rank: torch.full((9,), 4.0) for rank in range(workers)}
    assert exact(load(tmp_path / "step-00000004").state) == exact(
        {**small_state(4), "own": own_state}
    )


def test_training_goes_on_while_a_snapshot_is_written(tmp_path, monkeypatch):
    weight = torch.ones(1000)
    free = threading.Event()
    monkeypatch.setattr(CommitProtocol, "raise_if_given_up", lambda _: free.wait(300))
    with team(tmp_path) as ((writer,), reports):
        writer.save(1, {"weight": weight}, {}, NO_INFO)
        weight.zero_()
        writer.raise_if_failed()
        assert not reports
        free.set()
        writer.wait()
    assert torch.equal(load(tmp_path / "step-00000001").state["weight"], torch.ones(1000))


def test_events_of_a_save(tmp_path):
    with team(tmp_path, keep_last=1) as (writers, reports):
        save(writers, 1, small_state(1))
        save(writers, 2, small_state(2), score=1.5)
    (first, _), (second, fields), (removed, old) = reports
    assert (first, second, removed) == ("snapshot", "snapshot", "snapshot_removed")
    path = tmp_path / "step-00000002"
    seconds = {"stall_seconds": fields.pop("stall_seconds"), "seconds": fields.pop("seconds")}
    assert fields == {
        "step": 2,
        "path": str(path),
        "bytes": sum(f.stat().st_size for f in path.glob("tensors*")),
        "score": 1.5,
    }
    assert all(value > 0 for value in seconds.values())
    assert old == {"path": str(tmp_path / "step-00000001")}


def test_files_outside_of_the_manifest_are_removed(tmp_path):
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    for leftover in (
        "tensors-old-0-of-1.safetensors",
        "part-old-0.json",
        "failed-old-0.txt",
        ".manifest.json.1.tmp",
    ):
        (directory / leftover).write_bytes(b"half")
    save_once(tmp_path, 1, small_state(1), 2)
    assert names_in(directory) == [
        NAME,
        "tensors-first.1-0-of-2.safetensors",
        "tensors-first.1-1-of-2.safetensors",
    ]
    save_once(tmp_path, 1, small_state(2), 1, attempt="second")
    assert names_in(directory) == [NAME, "tensors-second.1-0-of-1.safetensors"]
    assert exact(load(directory).state) == exact(small_state(2))


def test_what_is_not_of_a_save_stays(tmp_path):
    directory = tmp_path / "step-00000001"
    save_once(tmp_path, 1, small_state(1))
    others = ["notes.txt", "keep.txt", ".keep.txt.7.tmp", "tensors.txt"]
    for name in others:
        (directory / name).write_text("of a user, or of another thread")
    save_once(tmp_path, 1, small_state(2), attempt="second")
    assert {*others} < {*names_in(directory)}


@given(
    workers=st.integers(1, 3),
    saves=st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(0, 2)), min_size=2),
)
@settings(max_examples=10)
def test_a_step_saved_again_writes_only_the_data_that_changed(tmp_path_factory, workers, saves):
    directory, data = tmp_path_factory.mktemp("run"), {}
    with team(directory, workers) as (writers, _):
        for value, score in saves:
            save(writers, 1, small_state(value), score=score)
            path = directory / "step-00000001"
            check(path)
            snapshot = load(path)
            assert (exact(snapshot.state), snapshot.score) == (exact(small_state(value)), score)
            files = {file.name: file.stat().st_ino for file in path.glob("tensors-*")}
            if data.get("value") == value:
                assert files == data["files"]
            else:
                assert len(files) == workers
            data = {"value": value, "files": files}
            assert {*names_in(path)} == {NAME, *files}


def test_leftovers_are_removed_before_any_worker_may_save_again(tmp_path, monkeypatch):
    removed, unlink = [], os.unlink

    def record(path, **options):
        removed.append(Path(path).name)
        unlink(path, **options)

    with team(tmp_path, 3) as (writers, _):
        save(writers, 1, {"model": torch.zeros(1000)})
        monkeypatch.setattr(os, "unlink", record)
        save(writers, 1, {"model": torch.ones(1000)}, score=1.0)
    kinds = [name.partition("-")[0] for name in removed if not name.startswith(".")]
    assert kinds == ["tensors"] * 3 + ["part"] * 3


def test_a_part_that_is_gone_does_not_show_that_the_save_was_committed(tmp_path):
    save_once(tmp_path, 1, small_state(1))  # of which the manifest stays
    with team(tmp_path, 2, attempt="second") as ((_, writer), _):
        writer.save(1, small_state(2), {}, NO_INFO)
        part = tmp_path / "step-00000001" / "part-second.1-1.json"
        while not part.exists():
            writer.raise_if_failed()
        part.unlink()
        with pytest.raises(SnapshotError, match="worker 1: its files were removed"):
            writer.wait()


@pytest.mark.parametrize("loss", ["removed", "cut", "replaced by a folder"])
def test_files_are_looked_at_before_a_manifest_replaces_another(tmp_path, monkeypatch, loss):
    receive = CommitProtocol.receive_parts

    def lose(protocol):
        parts = receive(protocol)
        path = protocol.data_path(1)
        if loss == "cut":
            os.truncate(path, 10)
        else:
            path.unlink()
        if loss == "replaced by a folder":
            path.mkdir()
        return parts

    with team(tmp_path, 2) as (writers, _):
        save(writers, 1, small_state(1))
        monkeypatch.setattr(CommitProtocol, "receive_parts", lose)
        for writer in writers:
            writer.save(1, small_state(2), {}, NO_INFO)
        for writer in writers:
            with pytest.raises(SnapshotError, match=r"worker 0: .*newest .* step-00000001"):
                writer.wait()
    assert exact(load(tmp_path / "step-00000001").state) == exact(small_state(1))


def test_data_of_a_part_that_rank_0_may_see_is_left_to_it(tmp_path, monkeypatch):
    sent = write_atomically

    def fail_after(path, data):
        sent(path, data)
        if path.name.startswith("part"):
            raise OSError(errno.EIO, "injected")

    monkeypatch.setattr("samestep.snapshot.commit.write_atomically", fail_after)
    with team(tmp_path, 2) as ((_, writer), _):
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(SnapshotError, match="injected"):
            writer.wait()
        names = {name.partition("-")[0] for name in names_in(tmp_path / "step-00000001")}
        assert names == {"tensors", "part", "failed"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_snapshot_says_which_tensors_are_not_finite(tmp_path, dtype, value):
    tensor = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)  # the sum overflows
    for step, last in enumerate((1.0, value)):
        tensor[-1] = last
        save_once(tmp_path, step, {"model": {"weight": tensor, "bias": torch.ones(2)}}, 2)
    assert "nonfinite" not in load(tmp_path / "step-00000000").info
    assert load(tmp_path / "step-00000001").info["nonfinite"] == ["model/weight"]


def test_memory_is_allocated_before_the_first_save_and_reused(tmp_path):
    with team(tmp_path) as ((writer,), _):
        writer.prepare(small_state(1), {})
        writer.save(1, small_state(1), {}, NO_INFO)
        first = writer._staging._memory
        writer.wait()
        writer.save(2, small_state(2), {}, NO_INFO)
        assert writer._staging._memory is first
        assert first.data_ptr() % mmap.PAGESIZE == 0
        writer.save(3, {"larger": torch.ones(first.numel())}, {}, NO_INFO)
        writer.wait()
    assert exact(load(tmp_path / "step-00000002").state) == exact(small_state(2))
    assert exact(load(tmp_path / "step-00000003").state) == exact(
        {"larger": torch.ones(first.numel())}
    )


def test_unsupported_states_are_rejected_before_the_first_save(tmp_path):
    with (
        team(tmp_path) as ((writer,), _),
        pytest.raises(SnapshotError, match=r"model/weight is a tensor of .*sparse_coo"),
    ):
        writer.prepare({"model": {"weight": torch.ones(2).to_sparse()}}, {})


def test_the_save_reports_a_lack_of_memory(tmp_path, monkeypatch):
    def none_left(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    with team(tmp_path) as ((writer,), _):
        monkeypatch.setattr(torch, "empty", none_left)
        writer.prepare(small_state(1), {})
        with pytest.raises(RuntimeError, match="not enough memory"):
            writer.save(1, small_state(1), {}, NO_INFO)


def test_an_attempt_is_part_of_file_names(tmp_path):
    with (
        pytest.raises(SnapshotError, match=r"attempt must have letters, .* got 'a/b'"),
        team(tmp_path, attempt="a/b"),
    ):
        pass


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_workers_receive_a_failure(tmp_path, monkeypatch, failing):
    with team(tmp_path, 3) as (writers, reports):
        save(writers, 1, small_state(1))
        monkeypatch.setattr(
            CommitProtocol,
            "raise_if_given_up",
            lambda meeting: full() if meeting.rank == failing else None,
        )
        for writer in writers:
            writer.save(2, small_state(2), {}, NO_INFO)
        for writer in writers:
            with pytest.raises(
                SnapshotError,
                match=rf"step-00000002 could not be written: worker {failing}: .*No space left.*; "
                r"free some space there.*"
                r"The newest complete snapshot is step-00000001",
            ):
                writer.wait()
            writer.wait()
        assert names_in(tmp_path / "step-00000002") == sorted(
            {f"failed-first.2-{rank}.txt" for rank in (0, failing)}
        )
        assert [kind for kind, _ in reports] == ["snapshot", "snapshot_failed"]
        monkeypatch.undo()
        save(writers, 3, small_state(3))
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_failure_without_a_reason_is_received(tmp_path):
    with team(tmp_path, 2) as ((writer, _), _):
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "failed-first.1-1.txt").touch()
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(
            SnapshotError,
            match=r"worker 1 could not write its part of snapshot .*step-00000001",
        ):
            writer.wait()


def test_a_failure_is_reported_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.snapshot.commit.write_atomically", full)
    with team(tmp_path, 2) as (writers, _):
        for writer in writers:
            writer.save(1, small_state(1), {}, NO_INFO)
        for writer in writers:
            with pytest.raises(SnapshotError, match="No space left"):
                writer.wait()
        assert {path.stat().st_size for path in (tmp_path / "step-00000001").glob("failed-*")} == {
            0
        }


def test_a_missing_worker_is_named(tmp_path):
    with team(tmp_path, 3, timeout_seconds=0.02) as ((writer, _, last), _):
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(
            SnapshotError,
            match=r"worker 1, 2 did not write its part within 0.02 seconds. "
            "There is no complete snapshot yet",
        ):
            writer.wait()
        last.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(SnapshotError, match="worker 1, 2 did not write its part"):
            last.wait()
        assert names_in(tmp_path / "step-00000001") == ["failed-first.1-0.txt"]


def test_rank_0_removes_the_files_of_a_lost_worker(tmp_path):
    with team(tmp_path, 3) as ((writer, gone, _), _):
        gone.save(1, small_state(1), {}, NO_INFO)
        while not (tmp_path / "step-00000001" / "part-first.1-1.json").exists():
            gone.raise_if_failed()
        gone.close(grace_seconds=0.0)
        writer.save(1, small_state(1), {}, NO_INFO)
        writer.close(grace_seconds=0.0)
        assert names_in(tmp_path / "step-00000001") == ["failed-first.1-0.txt"]


def test_a_missing_manifest_is_reported(tmp_path):
    with team(tmp_path, 2, timeout_seconds=0.02) as ((_, writer), _):
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(
            SnapshotError, match="worker 1: worker 0 did not write the manifest within"
        ):
            writer.wait()
        assert not any(name.startswith("failed") for name in names_in(tmp_path / "step-00000001"))


def test_close_gives_up_a_save_that_cannot_be_committed(tmp_path):
    with team(tmp_path, 2) as ((writer, _), reports):
        writer.save(1, small_state(1), {}, NO_INFO)
        writer.close(grace_seconds=0.0)
    ((kind, fields),) = reports
    assert kind == "snapshot_failed"
    assert "this worker stopped" in fields["reason"]
    assert find_newest(tmp_path, ignore) is None


def test_close_waits_for_a_pending_commit(tmp_path):
    with team(tmp_path) as ((writer,), reports):
        writer.save(1, small_state(1), {}, NO_INFO)
        writer.close(grace_seconds=20.0)
    assert reports[0][0] == "snapshot"
    check(tmp_path / "step-00000001")


def test_the_directory_may_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        CommitProtocol, "raise_if_given_up", lambda _: shutil.rmtree(tmp_path / "run")
    )
    with team(tmp_path / "run") as ((writer,), _):
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(
            SnapshotError,
            match=r"No such file.*do not move or remove the run's directory.*"
            "There is no complete snapshot yet",
        ):
            writer.wait()


def test_the_directory_may_be_removed_while_a_worker_waits(tmp_path, monkeypatch):
    asked = []

    def removing(path):
        if not asked:
            shutil.rmtree(path.parent)
        asked.append(path.name)
        return False

    with team(tmp_path, 2) as ((_, writer), _):
        monkeypatch.setattr(type(tmp_path), "exists", removing)
        writer.save(1, small_state(1), {}, NO_INFO)
        with pytest.raises(SnapshotError, match="worker 1: its files were removed"):
            writer.wait()


def test_a_file_with_the_name_of_a_snapshot_is_reported(tmp_path):
    (tmp_path / "step-00000001").touch()
    with (
        team(tmp_path) as (writers, _),
        pytest.raises(SnapshotError, match=r"step-00000001 could not be written: .*File exists"),
    ):
        save(writers, 1, small_state(1))


def test_a_failing_record_does_not_hide_a_failed_save(tmp_path, monkeypatch):
    def report(kind: str, **fields: Any) -> None:
        raise RecordError("full")

    writer = SnapshotWriter(
        tmp_path, rank=0, workers=1, attempt="a", keep_last=1, keep_best=0, report=report
    )
    monkeypatch.setattr(CommitProtocol, "raise_if_given_up", full)
    writer.save(1, small_state(1), {}, NO_INFO)
    with pytest.raises(SnapshotError, match="No space left"):
        writer.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_leaves_the_previous_snapshot_complete(workers):
    big = {"weight": torch.arange(MEBIBYTE / 4)}
    bigger = {"weight": torch.arange(MEBIBYTE)}
    with full_disk(3 * MEBIBYTE) as disk, team(disk, workers) as (writers, _):
        save(writers, 1, big)
        for writer in writers:
            writer.save(2, bigger, {}, NO_INFO)
        for writer in writers:
            with pytest.raises(
                SnapshotError,
                match=r"No space left.*free some space there.*"
                "newest complete snapshot is step-00000001",
            ):
                writer.wait()
        assert not list(disk.glob("step-00000002/tensors*"))
        assert find_newest(disk, ignore) == disk / "step-00000001"
        save(writers, 3, big)
        assert list_snapshots(disk)[-1] == disk / "step-00000003"
        assert exact(load(disk / "step-00000003").state) == exact(big)


@given(cut=st.integers(0, 40))
def test_a_partial_snapshot_on_a_full_disk_is_never_complete(cut):
    with full_disk(4096 * (cut + 2)) as disk:
        try:
            save_once(disk, 1, {"weight": torch.arange(10_000.0)}, 2)
        except SnapshotError:
            assert find_newest(disk, ignore) is None
        else:
            assert exact(load(disk / "step-00000001").state) == exact(
                {"weight": torch.arange(10_000.0)}
            )


def test_an_error_after_the_commit_leaves_the_snapshot(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        assert (path / "step-00000001" / NAME).exists()
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr("samestep.snapshot.commit.sync", fail)
    with team(tmp_path, workers=2) as ((first, second), _):
        for rank, writer in enumerate((first, second)):
            writer.save(1, small_state(1), {"own": {rank: torch.ones(3)}}, NO_INFO)
        second.wait()
        with pytest.raises(SnapshotError, match=r"injected.*newest complete .* step-00000001"):
            first.wait()
    check(tmp_path / "step-00000001")


def test_nothing_is_committed_before_the_record_is_durable(tmp_path, monkeypatch):
    synced = []

    def fdatasync(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        content, is_committed = file.read_bytes(), any(tmp_path.glob(f"step-*/{NAME}"))
        is_written = len(content) == 128 if file.suffix == ".bin" else b'"loss":3.0' in content
        synced.append((file.name, is_committed, is_written))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with ss.init(dir=tmp_path, snapshot_every=None) as run:
        run.track(model=torch.nn.Linear(2, 1))
        for _ in run.batches([1, 2], 2, steps=1):
            run.log(loss=3.0)
    assert synced == [("chain.bin", False, True), ("events.jsonl", False, True)]
    check(tmp_path / "step-00000001")
