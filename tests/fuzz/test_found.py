"""Regression tests for bugs that fuzzing found."""

from __future__ import annotations

import json
import os
import pickle
import socket
from dataclasses import asdict

import numpy as np
import pytest

from recipes import settings
from recipes.detect.coco import AnnotationError, read_annotations
from recipes.vit.config import Settings
from recipes.vit.pretrained import PretrainedError, read_parameters
from samestep.cluster import ProcessInfo
from samestep.comm import rendezvous
from samestep.comm.link import MAX_BYTES, Frames, Link, Seal
from samestep.comm.rendezvous import OUTCOME
from samestep.comm.status import Heartbeat
from samestep.errors import SnapshotError, WorldError
from samestep.host import anonymous_file
from samestep.record.cursor import FILE, Cursor
from samestep.record.events import read_events
from samestep.record.files import DirectoryLock, EventChunk
from samestep.record.source import open_source
from samestep.snapshot import memory_slot
from samestep.snapshot.files import checksum
from samestep.watch.view import TAIL_BYTES, View
from tests.fuzz.network import BEAT, INFOS, _Client, _Gathered

BILLIONS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def rejected(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(settings.SettingsError) as caught:
        settings.read(Settings, [str(path)])
    return str(caught.value)


def test_an_event_nested_too_deeply_is_ignored_like_a_torn_one(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [
        '{"event": "started"}',
        '{"event": ' + "[" * 100_000,
        '{"event": ' + 900 * "[" + 900 * "]" + "}",
        '{"event": "finished"}',
    ]
    path.write_text("\n".join(lines))
    assert [event["event"] for event in read_events(path) if isinstance(event["event"], str)] == [
        "started",
        "finished",
    ]


def test_settings_nested_too_deeply_are_refused(tmp_path):
    assert "cannot be read as YAML" in rejected(tmp_path, "[" * 10_000)
    with pytest.raises(settings.SettingsError, match="expected int for epochs"):
        settings.read(Settings, ["epochs=" + "[" * 10_000])


@pytest.mark.parametrize("base", ["/dev/zero", "a\\0b"])
def test_a_base_that_is_not_a_file_is_rejected(tmp_path, base):
    assert "cannot be read as YAML" in rejected(tmp_path, f'base: "{base}"')


def test_settings_larger_than_a_megabyte_are_rejected(tmp_path):
    message = f"more than {settings.LARGEST} bytes"
    assert message in rejected(tmp_path, "#" * (settings.LARGEST + 1))


@pytest.mark.parametrize("ending", ["epochs: *j", "model: *j", "unknown: *j"])
def test_few_lines_that_expand_to_billions_of_values_have_a_short_error(tmp_path, ending):
    assert len(rejected(tmp_path, BILLIONS + ending)) < 10_000


def test_an_integer_beyond_all_floats_is_refused(tmp_path):
    message = rejected(tmp_path, f"optimizer: {{learning_rate: 1{'0' * 400}}}")
    assert "expected float for optimizer.learning_rate" in message


def test_a_number_too_long_to_print_is_not_printed(tmp_path):
    assert "pretrained=a long number: expected Path | None" in rejected(
        tmp_path, "pretrained: 0x" + 5000 * "f"
    )


@pytest.mark.parametrize("size", [-32769, 2**31 - 1])
def test_the_element_size_of_a_pickled_array_is_ignored(tmp_path, size):
    array = np.ones((2, 3), np.float32)
    written = pickle.dumps({"classifier.weight": array}, 2)
    unsaid, said = (b"NNNJ" + number.to_bytes(4, "little", signed=True) for number in (-1, size))
    assert unsaid in written
    path = tmp_path / "damaged.pdparams"
    path.write_bytes(written.replace(unsaid, said))
    assert read_parameters(path)["head.weight"].tolist() == array.T.tolist()


def test_a_pickle_cannot_reserve_memory_for_missing_objects(tmp_path):
    path = tmp_path / "damaged.pdparams"
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(PretrainedError, match="object number 2147483647 exceeds"):
        read_parameters(path)


def test_the_name_of_a_part_has_only_ascii_digits(tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / f"{20 * chr(0x660)}-{19 * chr(0x660)}{chr(0x661)}.jsonl").write_bytes(
        b"\n"
    )
    assert open_source(tmp_path).version() == (0, ())


def test_the_end_of_a_record_may_be_in_several_small_parts(tmp_path):
    line = b'{"event": "started", "time": 1}\n'
    size = len(line)
    (tmp_path / "record").mkdir()
    view = View(open_source(tmp_path))
    for number in range(3):
        (tmp_path / EventChunk(number * size, (number + 1) * size).path).write_bytes(line)
        assert view.advance()
        assert not view.advance(), "it started again"
    assert view.summary()["attempts"] == 3


def test_parts_that_contradict_each_other_are_read_to_their_end(tmp_path):
    first, second = (
        b'{"event": "started", "time": %d, "torch": "%s"}\n' % (time, 2 * TAIL_BYTES * b"2")
        for time in (1, 2)
    )
    size = len(first)
    (tmp_path / "record").mkdir()
    for part, data in (
        (EventChunk(0, 2 * size), first + first),
        (EventChunk(size, 3 * size), second + second),
    ):
        (tmp_path / part.path).write_bytes(data)
    view = View(open_source(tmp_path))
    view.refresh()
    assert view.summary()["attempts"] == 3
    assert not view.refresh()


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 100_000, '{"a": -1}'])
def test_invalid_progress_is_ignored(tmp_path, text):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(text)
    assert Cursor(tmp_path).get("a") is None


@pytest.mark.parametrize("text", ["[" * 300_000, "- " * 300_000, "? " * 300_000, "{a: " * 200_000])
def test_settings_that_would_overflow_the_stack_are_refused(tmp_path, text):
    assert "cannot be read as YAML" in rejected(tmp_path, text)
    with pytest.raises(settings.SettingsError, match="expected int for epochs"):
        settings.read(Settings, [f"epochs={text[:100_000]}"])


def test_a_frame_that_is_too_long_ends_a_connection_as_a_disconnect():
    ours, theirs = socket.socketpair()
    link = object.__new__(Link)
    link._frames, link._socket = Frames(MAX_BYTES), ours
    link._seal = Seal("token", b"", coordinator=False)
    with ours, theirs:
        theirs.sendall(b"\xff" * 8)
        for read in (link.poll, lambda: link.receive(5.0)):
            with pytest.raises(ConnectionAbortedError, match="at most 4194304 bytes"):
                read()


@pytest.mark.parametrize(
    "value", [7, "lost", [], {"failed": "lost"}, {"failed": 1, "expected": 2}, {"workers": [1]}]
)
def test_a_forged_outcome_is_named(value):
    process = ProcessInfo(0, 2, 0, 2, "127.0.0.1", 1, "variables")
    with pytest.raises(WorldError, match="another program uses MASTER_ADDR"):
        rendezvous._gather_infos(
            _Client({OUTCOME: json.dumps(value).encode()}, None), process, INFOS[0], 0.0
        )


@pytest.mark.parametrize("key", ["worker/0", "worker/1"])
def test_empty_forged_entries_do_not_end_in_an_endless_wait(monkeypatch, key):
    monkeypatch.setattr(rendezvous, "LINGER_SECONDS", 0.05)
    process = ProcessInfo(0, 2, 0, 2, "127.0.0.1", 1, "variables")
    forged = asdict(INFOS[1]) if key == "worker/0" else None
    values = {key: json.dumps(forged).encode(), OUTCOME: b"null"}
    with pytest.raises(WorldError):
        rendezvous._gather_infos(_Client(values, None), process, INFOS[0], 0.0)


@pytest.mark.parametrize(
    "changed",
    [{"pid": 10**400}, {"pid": -1}, {"at": 1e308}, {"stack": [1]}, {"step": "3"}, {"new": 1}],
)
def test_a_forged_status_is_ignored(changed):
    assert Heartbeat.read(asdict(BEAT)) == BEAT
    assert Heartbeat.read(asdict(BEAT) | changed) is None


@pytest.mark.parametrize("data", [b"[" * 100_000, b'[["a"], 1]', b"[1, 2]", b"3"])
def test_a_message_that_no_worker_sends_is_an_error(data):
    with pytest.raises(WorldError, match="while worker 1 was"):
        _Gathered(data, None).all_gather_json(1, "looking for a snapshot")


def test_a_lock_nested_too_deeply_names_no_holder(tmp_path):
    lock = object.__new__(DirectoryLock)
    with (tmp_path / "lock").open("w+b") as file:
        file.write(b"[" * 4096)
        file.flush()
        lock._file = file.fileno()
        assert lock._holder() == {}


def test_the_description_of_a_slot_with_another_structure_is_damage():
    text = b'{}\n{"specs": "none"}'
    file = anonymous_file("fuzz")
    header = memory_slot._HEADER.pack(b"samestep", 64, len(text), checksum(text).encode())
    with os.fdopen(file, "w+b") as slot:
        slot.write(header.ljust(64, b"\0") + text)
        slot.flush()
        with pytest.raises(SnapshotError, match="a memory slot is damaged"):
            memory_slot.read(file)


@pytest.mark.parametrize(
    "changed",
    [
        {"images": [{"id": 1, "file_name": "a", "width": 2**40, "height": 8}]},
        {"annotations": [{"image_id": 1, "category_id": 3, "bbox": [10**400, 0, 1, 1]}]},
        {
            "annotations": [
                {
                    "image_id": 1,
                    "category_id": 3,
                    "bbox": [0, 0, 1, 1],
                    "segmentation": [[1e300, 0, 1, 1, 2, 2]],
                }
            ]
        },
        None,
    ],
)
def test_annotations_beyond_all_sizes_are_refused(tmp_path, changed):
    plain = {
        "categories": [{"id": 3, "name": "cat"}],
        "images": [{"id": 1, "file_name": "a", "width": 8, "height": 8}],
        "annotations": [],
    }
    text = "[" * 100_000 if changed is None else json.dumps(plain | changed)
    (tmp_path / "annotations.json").write_text(text)
    with pytest.raises(AnnotationError):
        read_annotations(tmp_path / "annotations.json")
