from __future__ import annotations

import pytest

from samestep.errors import ConfigError, RecordError
from samestep.record.cursor import Cursor
from samestep.record.sinks.files import FunctionDestination
from samestep.record.source import open_source

passed = []


def note(path):
    """Be the user's function."""
    passed.append((path.relative_to(path.parents[1]).as_posix(), path.read_bytes()))
    if note.error is not None:
        raise note.error


note.error = None


@pytest.fixture
def run(tmp_path):
    passed.clear()
    note.error = None
    (tmp_path / "record").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"pixels")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "events.jsonl").write_bytes(LINES)
    return tmp_path


LINES = b'{"event":"image","path":"images/a.png"}\n{"event":"image","path":"images/../secret"}\n'
PART = f"record/{0:020d}-{len(LINES):020d}.jsonl"


def destination(run, name=f"{__name__}:note"):
    return FunctionDestination(name, run, open_source(run), Cursor(run))


def test_it_is_given_images_and_parts_and_no_part_stays(run):
    function = destination(run)
    assert function.open() == 0
    function.send(0, LINES)
    assert passed == [("images/a.png", b"pixels"), (PART, LINES)]
    assert function.dropped == 1
    assert sorted(path.name for path in (run / "record").iterdir()) == ["cursor.json"]
    assert destination(run).open() == len(LINES)


@pytest.mark.parametrize(
    ("error", "told"), [(OSError("no route"), OSError), (SystemExit(3), RecordError)]
)
def test_what_it_raises_leaves_the_part_to_be_passed_again(run, error, told):
    function = destination(run)
    function.open()
    function.send(0, LINES[: LINES.index(b"\n") + 1])
    note.error = error
    with pytest.raises(told):
        function.send(40, LINES[40:])
    assert sorted(path.name for path in (run / "record").iterdir()) == ["cursor.json"]
    assert destination(run).open() == LINES.index(b"\n") + 1


def test_a_part_that_a_kill_left_behind_is_removed(run):
    (run / PART).write_bytes(LINES)
    assert destination(run).open() == 0
    assert not (run / PART).exists()


def test_a_function_that_is_not_there_is_told(run):
    with pytest.raises(
        ConfigError,
        match="transfer must name an importable module:function, got 'nowhere:send'",
    ):
        destination(run, "nowhere:send").open()
