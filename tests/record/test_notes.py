from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.record.files import Notes


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path)


def test_tags_and_a_note_are_written_and_read(notes, tmp_path):
    assert notes.version() is None
    assert notes.read() == {"tags": [], "note": "", "locked": None}
    notes.write(["a", "é"], "two\nlines", None)
    written = {"tags": ["a", "é"], "note": "two\nlines", "locked": None}
    assert notes.read() == Notes(tmp_path).read() == written
    notes.write([], "", notes.version())
    assert notes.read() == {"tags": [], "note": "", "locked": None}
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


def test_an_edit_of_an_old_version_is_refused(notes, tmp_path):
    notes.write(["a"], "", None)
    old = notes.version()
    Notes(tmp_path).write(["b"], "", old)
    for version in (old, None):
        with pytest.raises(RecordError, match="was changed in the meantime"):
            notes.write(["c"], "", version)
    assert notes.read()["tags"] == ["b"]


def test_other_fields_are_kept(notes, tmp_path):
    file = tmp_path / "notes.json"
    file.write_text('{"format": 1, "tags": [], "note": "", "rating": 5}')
    notes.write(["a"], "", notes.version())
    assert json.loads(file.read_text())["rating"] == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"tags": ["a"], "no',
        "[]",
        "7",
        '{"format": 1, "tags": "a", "note": ""}',
        '{"format": 1, "tags": [["a"]], "note": ""}',
        '{"format": "x", "tags": [], "note": ""}',
        '{"format": 2, "tags": [], "note": ""}',
        "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_is_left_as_it_is(notes, tmp_path, text):
    file = tmp_path / "notes.json"
    file.write_text(text)
    content = notes.read()
    assert (content["tags"], content["note"]) == ([], "")
    assert "notes.json is " in content["locked"]
    with pytest.raises(RecordError, match=r"is damaged|is of a newer format"):
        notes.write(["b"], "", notes.version())
    assert file.read_text() == text


def test_links_are_not_followed(notes, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"format": 1, "tags": ["secret"], "note": ""}')
    (tmp_path / "notes.json").symlink_to(other)
    assert notes.read()["tags"] == []
    with pytest.raises(RecordError, match="must be a file"):
        notes.write(["b"], "", notes.version())
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    with pytest.raises(RecordError, match="must be a file"):
        Notes(tmp_path / "linked").write(["b"], "", None)
    assert not list((tmp_path / "real").iterdir())


def test_a_read_only_directory_says_so(notes, monkeypatch):
    monkeypatch.setattr("samestep.record.files.os.access", lambda *_: False)
    assert notes.read()["locked"] == "the run's directory is read-only"


def test_a_failed_write_keeps_the_old_file(notes, tmp_path, monkeypatch):
    notes.write(["a"], "old", None)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("samestep.storage.sync", full)
    with pytest.raises(RecordError, match="No space left"):
        notes.write(["b"], "new", notes.version())
    assert notes.read()["note"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


@pytest.mark.parametrize(
    ("tags", "note"),
    [
        ("a", ""),
        (["a b"], ""),
        (["a,b"], ""),
        ([""], ""),
        (["x" * 51], ""),
        (["\n"], ""),
        ([1], ""),
        (["a"] * 21, ""),
        ([], None),
        ([], "x" * 10_001),
    ],
)
def test_invalid_tags_and_notes_are_refused(notes, tags, note):
    with pytest.raises(ValueError, match="must"):
        notes.write(tags, note, None)
    assert notes.version() is None


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,formatagsnote1 ').map(str.encode))
def test_any_bytes_are_read_or_reported(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / "notes.json").write_bytes(data)
    assert Notes(folder).read()["locked"]
