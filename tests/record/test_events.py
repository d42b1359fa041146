from __future__ import annotations

import json
import math
import resource
import shutil
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.errors import RecordError
from samestep.record.events import FILE_NAME, EventFile, read_events
from tests.faults import full_disk

TEXTS_LIKE_NUMBERS = st.sampled_from(
    ["nan", "inf", "-inf", "\\nan", "\\\\-inf", "NaN", "-nan", "inf\n"]
)
TEXTS = TEXTS_LIKE_NUMBERS | st.text(st.characters(exclude_categories=[]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("record") / "events.jsonl"


def write(file, events):
    file.unlink(missing_ok=True)
    append(file, events)


def append(file, events):
    opened = EventFile(file)
    for event in events:
        opened.append(event)
    opened.close()


def same(first, second):
    """Return whether values and types are equal; nan equals nan, and 0.0 differs from -0.0."""
    return repr(first) == repr(second)


@given(st.lists(EVENTS, max_size=3))
def test_events_round_trip(file, events):
    write(file, events)
    assert same(list(read_events(file)), events)


@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_every_line_is_strict_json(file, events):
    def refuse(constant):
        raise AssertionError(constant)

    write(file, events)
    lines = file.read_bytes().splitlines()
    assert len(lines) == len(events)
    for line in lines:
        json.loads(line.decode("ascii"), parse_constant=refuse)


@given(st.lists(EVENTS, max_size=3), st.data())
def test_a_truncated_file_reads_as_a_prefix_and_can_be_appended_to(file, events, data):
    write(file, events)
    content = file.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:size])
    kept = list(read_events(file))
    assert same(kept, events[: len(kept)])
    assert len(kept) >= content[:size].count(b"\n")
    append(file, [{"event": "resumed"}])
    assert same(list(read_events(file)), [*kept, {"event": "resumed"}])


def test_opening_again_appends(tmp_path):
    file = tmp_path / "run" / "events.jsonl"
    append(file, [{"step": 1}])
    before = file.read_bytes()
    append(file, [{"step": 2}])
    assert file.read_bytes().startswith(before)
    assert [event["step"] for event in read_events(tmp_path / "run")] == [1, 2]


def test_invalid_lines_are_skipped(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"step": 1}\n{"st\n\n7\n\xff\xfe\n\x00\x00\n{"step": 2}\n')
    assert list(read_events(file)) == [{"step": 1}, {"step": 2}]


def test_non_finite_numbers_are_written_as_strings(tmp_path):
    file = tmp_path / "events.jsonl"
    append(file, [{"loss": math.inf, "name": "inf"}])
    assert json.loads(file.read_text()) == {"loss": "inf", "name": "\\inf"}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_values_that_are_not_json_raise_and_write_nothing(tmp_path, value):
    file = EventFile(tmp_path / "events.jsonl")
    with pytest.raises(RecordError, match="expected an event of numbers, strings"):
        file.append({"value": value})
    file.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_an_unwritable_directory_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RecordError, match=r"taken.*events\.jsonl.*choose a writable directory"):
        EventFile(tmp_path / "taken" / "events.jsonl")


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"cannot read a record at .*events\.jsonl"):
        list(read_events(tmp_path))


def test_a_short_write_raises_and_later_events_are_intact(tmp_path):
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(
            RecordError,
            match=r"short write to .*events\.jsonl: wrote 5 of 11 bytes; .*full\? Free some space",
        ):
            file.append({"step": 2})
        with pytest.raises(RecordError, match=r"events\.jsonl cannot be written"):
            file.append({"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.append({"step": 4})
    file.close()
    assert list(read_events(path)) == [{"step": 1}, {"step": 4}]


def test_a_full_disk_raises():
    with full_disk(4096) as disk:
        file = EventFile(disk / "events.jsonl")
        file.append({"filled": "x" * (4096 - len('{"filled":""}\n'))})
        with pytest.raises(
            RecordError,
            match=r"events\.jsonl cannot be written: No space left on device\. Free some space",
        ):
            file.append({"step": 2})
        file.close()


def removed(folder):
    shutil.rmtree(folder)


def moved(folder):
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder):
    moved(folder)
    append(folder / "events.jsonl", [{"event": "of another run"}])


@pytest.mark.parametrize("fault", [removed, moved, replaced])
def test_a_removed_moved_or_replaced_file_raises(fault, tmp_path):
    file = EventFile(tmp_path / "run" / "events.jsonl")
    file.append({"step": 1})
    fault(tmp_path / "run")
    with pytest.raises(
        RecordError, match=r"events\.jsonl was removed or moved.*Restart in the directory"
    ):
        file.append({"step": 2})
    file.close()
    left = [list(read_events(path)) for path in sorted(tmp_path.glob("*/events.jsonl"))]
    assert (
        left
        == {
            removed: [],
            moved: [[{"step": 1}]],
            replaced: [[{"step": 1}], [{"event": "of another run"}]],
        }[fault]
    )


def test_a_newer_format_is_refused_with_the_version_to_install(tmp_path):
    with ss.init(dir=tmp_path):
        pass
    file = tmp_path / FILE_NAME
    version = metadata.version("samestep")
    mark = f'"format":1,"samestep":"{version}"'
    assert mark in file.read_text()
    file.write_text(file.read_text().replace(mark, '"format":2,"samestep":"7.5"'))
    with pytest.raises(
        RecordError, match=r"format 1 or less, got 2; install samestep 7\.5 or newer"
    ):
        list(read_events(tmp_path))


def test_the_name_of_a_new_record_is_durable_before_a_snapshot(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("samestep.record.events.sync", synced.append)
    EventFile(tmp_path / FILE_NAME).close()
    assert synced == [tmp_path]
