from __future__ import annotations

import pytest

from samestep.errors import RecordError
from samestep.record.cursor import FILE, Cursor, lock
from tests.faults import full_disk


@pytest.fixture
def run(tmp_path):
    (tmp_path / "record").mkdir()
    return tmp_path


def test_what_is_kept_is_there_for_the_next(run):
    kept = Cursor(run)
    kept.save("a", 1)
    kept.save("s3://b/c", 2**40)
    kept.save("a", 3)
    again = Cursor(run)
    assert (again.get("a"), again.get("s3://b/c"), again.get("other")) == (3, 2**40, None)
    assert [path.name for path in (run / "record").iterdir()] == ["cursor.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"a": "b"}',
        '{"a": 1.5}',
        '{"a": true}',
        '{"a": null}',
        "\0",
        "\N{SNOWMAN}",
    ],
)
def test_a_file_that_says_something_else_says_nothing(run, text):
    (run / FILE).write_text(text)
    assert Cursor(run).get("a") is None


def test_a_full_disk_stops_nobody():
    with full_disk(4096) as disk:
        (disk / "record").mkdir()
        (disk / "filled").write_bytes(b"x" * 4096)
        kept = Cursor(disk)
        kept.save("a", 1)
        assert kept.get("a") == 1
        assert Cursor(disk).get("a") is None


def test_one_holds_the_lock_until_it_closes_it(tmp_path):
    held = lock(tmp_path)
    assert lock(tmp_path) is None
    held.close()
    lock(tmp_path).close()


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(
        RecordError, match=r"record/lock cannot be written: .*; pass a run's directory"
    ):
        lock(tmp_path / "nowhere")
