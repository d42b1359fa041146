from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import samestep as ss
from samestep.errors import SnapshotError
from samestep.snapshot import check, list_snapshots, load, part, read
from samestep.snapshot.files import checksum
from samestep.snapshot.manifest import LARGEST_BYTES, NAME
from samestep.snapshot.read import fault, inspect
from samestep.snapshot.state import canonical
from tests.faults import cut, flip_byte
from tests.snapshot.exact import exact
from tests.snapshot.saving import find_newest, save, save_once, small_state, team
from tests.snapshot.test_state import tagged_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> dict[str, bytes]:
    """The files of a small snapshot that two workers wrote."""
    directory = tmp_path_factory.mktemp("run")
    save_once(directory, 2, small_state(2), 2)
    return {path.name: path.read_bytes() for path in (directory / "step-00000002").iterdir()}


@pytest.fixture
def snapshot(tmp_path, complete) -> Path:
    return put(tmp_path / "step-00000002", complete)


def put(path: Path, contents: dict[str, bytes]) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


def signed(body: dict[str, Any]) -> bytes:
    """Return a manifest with any content and the right checksum."""
    body = {name: value for name, value in body.items() if name != "checksum"}
    return canonical({**body, "checksum": checksum(canonical(body).encode())}).encode()


def rejected_by(examine: Callable[[Path], object], path: Path) -> str:
    """Return why a snapshot is rejected; any other error than `SnapshotError` fails the test."""
    with pytest.raises(SnapshotError) as caught:
        examine(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_complete_snapshot_passes(snapshot):
    assert check(snapshot).step == 2
    assert exact(load(snapshot).state) == exact(small_state(2))


FIFTHS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(1, 5))]


@pytest.mark.parametrize("first", FIFTHS)
def test_every_flipped_byte_of_every_file_is_found(snapshot, complete, first):
    for name, content in complete.items():
        for index in range(first, len(content), 5):
            flip_byte(snapshot / name, index)
            assert fault(snapshot), (name, index)
            (snapshot / name).write_bytes(content)
    assert fault(snapshot) is None


@pytest.mark.parametrize("first", FIFTHS)
def test_a_cut_at_any_byte_of_any_file_is_found(snapshot, complete, first):
    for name, content in complete.items():
        for size in range(first, len(content), 5):
            cut(snapshot / name, size)
            assert fault(snapshot), (name, size)
            (snapshot / name).write_bytes(content)
    assert fault(snapshot) is None


@given(data=st.data())
def test_any_change_of_bytes_is_found(tmp_path_factory, complete, data):
    name = data.draw(st.sampled_from(sorted(complete)))
    content = complete[name]
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, min(start + 8, len(content))))
    changed = content[:start] + data.draw(st.binary(max_size=8)) + content[stop:]
    path = put(tmp_path_factory.mktemp("run") / "step-00000002", {**complete, name: changed})
    assert (fault(path) is None) == (changed == content)


def test_a_missing_file_is_named(snapshot, complete):
    for name in complete:
        (snapshot / name).unlink()
        assert name in rejected_by(check, snapshot)
        (snapshot / name).write_bytes(complete[name])


def test_no_manifest_no_snapshot(tmp_path, snapshot):
    (snapshot / NAME).unlink()
    assert f"snapshot {snapshot} has no manifest.json: it was never committed" == rejected_by(
        check, snapshot
    )
    assert f"there is no snapshot {tmp_path / 'none'}" == rejected_by(check, tmp_path / "none")


@pytest.mark.parametrize("examine", [check, load])
def test_only_regular_files_are_read(snapshot, complete, examine):
    for name in complete:
        (snapshot / name).unlink()
        os.mkfifo(snapshot / name)
        assert "not a regular file" in rejected_by(examine, snapshot)
        (snapshot / name).unlink()
        (snapshot / name).mkdir()
        assert "not a regular file" in rejected_by(examine, snapshot)
        (snapshot / name).rmdir()
        (snapshot / name).symlink_to(name)
        assert rejected_by(examine, snapshot)
        (snapshot / name).unlink()
        (snapshot / name).write_bytes(complete[name])


def test_a_manifest_that_is_too_large_is_not_read(snapshot):
    os.truncate(snapshot / NAME, LARGEST_BYTES + 1)
    assert f"must have at most {LARGEST_BYTES} bytes" in rejected_by(inspect, snapshot)


def test_a_newer_format_is_rejected_with_the_version_to_install(snapshot, complete):
    newer = {**json.loads(complete[NAME]), "format": 3, "samestep": "7.5"}
    put(snapshot, {NAME: signed(newer)})
    assert (
        "manifest.json must have format 2, got 3; install samestep 7.5 to read it"
        in rejected_by(check, snapshot)
    )


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "a\n", 7, None]
)
def test_no_path_leaves_the_directory(snapshot, complete, name):
    body = json.loads(complete[NAME])
    body["files"][0][0] = name
    put(snapshot, {NAME: signed(body)})
    assert "manifest.json does not describe a snapshot" in rejected_by(load, snapshot)


def test_a_tensor_larger_than_its_file_is_never_allocated(snapshot, complete):
    body = json.loads(complete[NAME])
    body["tensors"]["model/weight"] = [["float32", [2**50], [0]], [[0, 0, 2**50, 0]]]
    put(snapshot, {NAME: signed(body)})
    assert "manifest.json places pieces outside of" in rejected_by(load, snapshot)


def test_pieces_of_a_file_do_not_overlap(snapshot, complete):
    body = json.loads(complete[NAME])
    body["tensors"]["model/twin"] = body["tensors"]["model/weight"]
    put(snapshot, {NAME: signed(body)})
    assert "manifest.json places overlapping pieces of tensors in" in rejected_by(load, snapshot)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (2, 0, "bytes, got 0"),
        (2, 2**40, "bytes, got 1099511627776"),
        (2, 64, ", got 1"),
        (3, [], ", got 0"),
    ],
)
def test_every_segment_has_a_checksum(snapshot, complete, field, value, message):
    body = json.loads(complete[NAME])
    body["files"][0][field] = value
    put(snapshot, {NAME: signed(body)})
    assert message in rejected_by(load, snapshot)


def locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside JSON."""
    for key, inner in (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    ):
        yield value, key
        yield from locations(inner)


@given(data=st.data())
def test_a_false_manifest_is_rejected_or_read_without_harm(tmp_path_factory, complete, data):
    body = json.loads(complete[NAME])
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list(locations(body))))
        container[key] = data.draw(
            tagged_values
            | st.integers(-2, 2**70)
            | st.sampled_from(["complex64", "bool", "model/bias"])
        )
    path = put(tmp_path_factory.mktemp("run") / "step-00000002", {**complete, NAME: signed(body)})
    try:
        load(path)
    except SnapshotError as error:
        # no other error may occur, but false content may also be valid
        assert str(path) in str(error)  # noqa: PT017


@given(data=st.data())
@example(data=None)
def test_a_false_data_file_is_rejected_or_read_without_harm(tmp_path_factory, complete, data):
    body = json.loads(complete[NAME])
    name = body["files"][0][0]
    if data is None:
        content = (2**63 - 1).to_bytes(8, "little") + complete[name][8:]
    else:
        start = data.draw(st.integers(0, len(complete[name])))
        content = (
            complete[name][:start]
            + data.draw(st.binary(max_size=20))
            + complete[name][data.draw(st.integers(start, len(complete[name]))) :]
        )
    body["files"][0][1:] = [len(content), len(content) or 1, [checksum(content)]]
    path = put(
        tmp_path_factory.mktemp("run") / "step-00000002",
        {**complete, name: content, NAME: signed(body)},
    )
    try:
        load(path)
    except SnapshotError as error:
        # no other error may occur, but changed values are valid
        assert str(path) in str(error)  # noqa: PT017


@given(
    garbage=st.binary()
    | tagged_values.map(lambda value: canonical(value).encode())
    | st.just(b"[" * 100_000)
    | st.just(b"9" * 10_000)
)
def test_garbage_is_not_a_manifest(tmp_path_factory, garbage):
    rejected_by(check, put(tmp_path_factory.mktemp("run") / "step-00000002", {NAME: garbage}))


@pytest.mark.parametrize("segment_bytes", [64, 100, 4096])
@pytest.mark.parametrize("examine", [check, load])
def test_damage_of_any_segment_is_found_and_named(tmp_path, monkeypatch, segment_bytes, examine):
    monkeypatch.setattr(part, "SEGMENT_BYTES", segment_bytes)
    save_once(tmp_path, 2, small_state(2))
    path = tmp_path / "step-00000002"
    (data,) = path.glob("tensors*")
    size = data.stat().st_size
    for index in range(0, size, 10):
        flip_byte(data, index)
        start = index // segment_bytes * segment_bytes
        assert (
            f"{data.name} is damaged: bytes {start} to {min(start + segment_bytes, size)} do"
            in rejected_by(examine, path)
        )
        flip_byte(data, index)
    assert exact(load(path).state) == exact(small_state(2))


def test_a_file_that_shrinks_during_a_read_is_rejected(snapshot, complete, monkeypatch):
    monkeypatch.setattr(read, "file_size", lambda path: len(complete[path.name]))
    cut(next(snapshot.glob("tensors*")), 10)
    assert "the file ends early" in rejected_by(load, snapshot)


def test_the_newest_complete_snapshot_is_found_and_others_are_reported(tmp_path):
    with team(tmp_path) as (writers, _):
        for step in (1, 2, 30):
            save(writers, step, small_state(step))
    (tmp_path / "step-00000040").mkdir()
    flip_byte(next((tmp_path / "step-00000030").glob("tensors*")), -1)
    reports = []
    assert (
        find_newest(tmp_path, lambda kind, **fields: reports.append((kind, fields)))
        == tmp_path / "step-00000002"
    )
    assert [(kind, fields["path"]) for kind, fields in reports] == [
        ("snapshot_rejected", str(tmp_path / "step-00000040")),
        ("snapshot_rejected", str(tmp_path / "step-00000030")),
    ]
    assert "never committed" in reports[0][1]["reason"]
    assert "damaged" in reports[1][1]["reason"]


def test_without_snapshots_none_is_found(tmp_path):
    assert find_newest(tmp_path, print) is None
    assert find_newest(tmp_path / "none", print) is None


def test_snapshots_are_listed_in_order_of_steps(tmp_path):
    for name in (
        "step-99999999",
        "step-100000000",
        "step-00000007",
        "step-7",
        "step-000000008",
        "step-0000000a",
        "other",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_snapshots(tmp_path)] == [
        "step-00000007",
        "step-99999999",
        "step-100000000",
    ]


def test_one_object_is_loaded_alone(snapshot):
    assert exact(load(snapshot, ["scheduler"]).state) == exact(
        {"scheduler": small_state(2)["scheduler"]}
    )
    assert rejected_by(lambda path: load(path, ["optimizer"]), snapshot).endswith(
        "it has no optimizer; it has model, scheduler"
    )


def test_tensors_are_independent_of_the_files(snapshot, complete):
    state = load(snapshot).state
    for name in complete:
        (snapshot / name).write_bytes(bytes(len(complete[name])))
    state["model"]["bias"] += 1
    assert torch.equal(state["model"]["weight"], small_state(2)["model"]["weight"])


def test_the_public_reader_returns_the_newest_complete_snapshot_or_that_of_a_step(tmp_path):
    for step in (1, 2, 3):
        save_once(tmp_path, step, small_state(step), workers=2)
    cut(next((tmp_path / "step-00000003").glob("tensors*")), 10)  # as if it were being written
    newest = ss.read_snapshot(str(tmp_path))
    assert (newest.step, newest.path) == (2, tmp_path / "step-00000002")
    assert exact(newest.state) == exact(small_state(2))
    partial = ss.read_snapshot(tmp_path, step=1, objects=["model"])
    assert exact(partial.state) == exact({"model": small_state(1)["model"]})
    assert ss.read_snapshot(tmp_path / "step-00000001").step == 1
    (tmp_path / "step-00000001").rename(tmp_path / "copy")
    assert ss.read_snapshot(tmp_path / "copy", step=1).step == 1


def test_the_public_reader_finds_the_next_snapshot_if_a_run_removes_the_newest(
    tmp_path, monkeypatch
):
    original, steps = read.load, [2, 3, 4]

    def after_a_step(path, *args):
        if steps:  # the run goes on, and keeps one snapshot
            save_once(tmp_path, steps.pop(0), small_state(2))
            read.remove(path)
        return original(path, *args)

    save_once(tmp_path, 1, small_state(1))
    monkeypatch.setattr(read, "load", after_a_step)
    assert ss.read_snapshot(tmp_path, objects=["model"]).step == 4
    assert not steps


@pytest.mark.parametrize(
    ("path", "step", "objects", "message"),
    [
        ("none", None, None, "expected the directory of a run or snapshot, got .*none"),
        ("empty", None, None, "empty has no complete snapshot"),
        ("", 7, None, "there is no snapshot .*step-00000007"),
        ("step-00000001", 2, None, "expected a snapshot of step 2, got .*step-00000001 of 1"),
        ("", None, ["ema"], "it has no ema; it has model, scheduler"),
        ("", 2, None, "is damaged"),
        ("", None, None, "is damaged"),  # no older one instead, silently
    ],
)
def test_what_the_public_reader_refuses(tmp_path, path, step, objects, message):
    (tmp_path / "empty").mkdir()
    for number in (1, 2):
        save_once(tmp_path, number, small_state(number))
    if message == "is damaged":
        flip_byte(next((tmp_path / "step-00000002").glob("tensors*")), -1)
    with pytest.raises(SnapshotError, match=message):
        ss.read_snapshot(tmp_path / path, step, objects)
