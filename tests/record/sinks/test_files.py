from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError, RecordError
from samestep.record.cursor import Cursor
from samestep.record.files import EventChunk, find_chunks
from samestep.record.sinks import files as module
from samestep.record.sinks.files import FunctionDestination, StorageDestination
from samestep.record.source import open_source
from samestep.storage import StorageError
from tests.snapshot.faulty import URL, failing, faulty_storage


@pytest.fixture
def far():
    with faulty_storage() as files:
        yield files


@pytest.fixture
def run(tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "events.jsonl").touch()
    return tmp_path


def log(run, *events):
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def destination(run, url=URL):
    return StorageDestination(url, run, open_source(run), Cursor(run))


def pass_on(run, sink, offset=None):
    """Send what a run has, as a sender does; return up to where."""
    offset = sink.open() if offset is None else offset
    while lines := open_source(run).read(offset):
        sink.send(offset, lines)
        offset += len(lines)
    return offset


def stream(url=URL):
    """Return all that can be read at a URL."""
    source, data = open_source(url), b""
    while lines := source.read(len(data)):
        data += lines
    return data


def parts_there(far):
    return find_chunks(
        {
            path.rpartition("/")[2]: len(file.getvalue())
            for path, file in far.store.items()
            if "/record/" in path
        }
    )


def test_each_piece_becomes_a_part(far, run):
    sink, end = destination(run), None
    for step in range(3):
        log(run, {"step": step})
        end = pass_on(run, sink, end)
    assert stream() == (run / "events.jsonl").read_bytes()
    assert parts_there(far) == [EventChunk(0, 12), EventChunk(12, 24), EventChunk(24, 36)]


def test_an_image_is_there_before_the_part_that_names_it(far, run):
    (run / "images").mkdir()
    (run / "images" / "a.png").write_bytes(b"pixels")
    (run.parent / "secret").write_text("secret")
    gone = {"event": "image", "path": "images/gone.png"}
    log(
        run,
        {"event": "image", "path": "images/a.png"},
        gone,
        {"event": "image", "path": "../secret"},
        {"event": "image"},
    )
    sink = destination(run)
    pass_on(run, sink)
    assert [path for operation, path in far.calls if operation == "pipe_file"] == [
        "images/a.png",
        f"record/{parts_there(far)[0].path[7:]}",
    ]
    assert b"".join(open_source(URL).open_image("images/a.png")[1]) == b"pixels"
    assert sink.dropped == 3


def test_images_that_arrived_are_not_sent_again_with_a_part_that_did_not(far, run):
    (run / "images").mkdir()
    for name in "ab":
        (run / "images" / f"{name}.png").write_bytes(b"pixels")
        log(run, {"event": "image", "path": f"images/{name}.png"})
    sink = destination(run)
    offset = sink.open()

    def refuse(operation, path):
        if path == "images/b.png":
            raise ConnectionError("reset")

    far.before = staticmethod(refuse)
    with pytest.raises(StorageError, match=r"did not take .*images/b\.png"):
        pass_on(run, sink, offset)
    far.before = staticmethod(lambda operation, path: None)
    pass_on(run, sink, offset)
    assert [path for operation, path in far.calls if operation == "pipe_file"][:2] == [
        "images/a.png",
        "images/b.png",
    ]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 6)), min_size=1, max_size=8)
)
def test_whatever_fails_and_whoever_is_killed_each_byte_is_there_once(tmp_path_factory, plan):
    """Each turn some events are logged, the process may be another one (which knows no more than is on file), and a call may fail."""
    run = tmp_path_factory.mktemp("run")
    (run / "record").mkdir()
    (run / "events.jsonl").touch()
    with faulty_storage() as far, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SMALL_CHUNKS", 3)
        sink, end = destination(run), None
        for number, (events, killed, fails_after) in enumerate(plan):
            log(run, *({"step": [number, event]} for event in range(events)))
            if killed:
                sink, end = destination(run), None
            calls = [fails_after]

            def fail_once(operation, path, calls=calls):
                calls[0] -= 1
                if calls[0] == 0:
                    raise ConnectionError("reset")

            far.before = staticmethod(fail_once)
            try:
                end = pass_on(run, sink, end)
            except StorageError:
                end = None if end is None else end
                assert (run / "events.jsonl").read_bytes().startswith(stream())
        far.before = staticmethod(lambda operation, path: None)
        sink = destination(run)
        pass_on(run, sink)
        assert stream() == (run / "events.jsonl").read_bytes()


def test_many_small_parts_become_one(far, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 4)
    sink, end = destination(run), None
    counts = []
    for step in range(20):
        log(run, {"step": step})
        end = pass_on(run, sink, end)
        counts.append(len(parts_there(far)))
        assert stream() == (run / "events.jsonl").read_bytes()
    assert max(counts) == 4
    assert far.calls.count(("rm", "record/" + EventChunk(0, 12).path[7:])) == 1


def test_large_parts_stay_as_they_are(far, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 2)
    monkeypatch.setattr(module, "FULL_BYTES", 12)
    sink, end = destination(run), None
    for step in range(9):
        log(run, {"step": step})
        end = pass_on(run, sink, end)
    assert len(parts_there(far)) == 9
    assert ("rm", "record/" + EventChunk(0, 12).path[7:]) not in far.calls


def test_what_a_killed_merge_left_twice_is_removed(far, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 2)
    sink, end = destination(run), None
    for step in range(2):
        log(run, {"step": step})
        end = pass_on(run, sink, end)
    log(run, {"step": 2})
    far.before = staticmethod(failing(1, ConnectionError("reset"), "rm"))
    with pytest.raises(StorageError, match="did not remove"):
        pass_on(run, sink, end)
    assert parts_there(far) == [EventChunk(0, 12), EventChunk(0, 24), EventChunk(12, 24)]
    pass_on(run, destination(run))
    assert parts_there(far) == [EventChunk(0, 24), EventChunk(24, 36)]


def test_a_run_that_goes_on_in_a_new_directory_goes_on_in_its_url(far, run, tmp_path_factory):
    log(run, {"event": "started", "step": 0})
    pass_on(run, destination(run))
    before = stream()
    other = tmp_path_factory.mktemp("other")
    (other / "record").mkdir()
    for step in range(3):
        log(other, {"event": "resumed", "step": step})
        pass_on(other, destination(other))  # each time by another process
        assert stream() == before + (other / "events.jsonl").read_bytes()


def test_a_url_that_was_emptied_gets_all_again(far, run):
    log(run, {"step": 0}, {"step": 1})
    pass_on(run, destination(run))
    far.store.clear()
    pass_on(run, destination(run))
    assert stream() == (run / "events.jsonl").read_bytes()


def test_a_directory_that_was_emptied_goes_on_after_what_was_sent(far, run):
    log(run, {"step": 0}, {"step": 1})
    pass_on(run, destination(run))
    before = stream()
    (run / "events.jsonl").unlink()
    log(run, {"step": 2})
    pass_on(run, destination(run))
    assert stream() == before + (run / "events.jsonl").read_bytes()


passed = []


def note(path):
    """Be the user's function."""
    passed.append((path.relative_to(path.parents[1]).as_posix(), path.read_bytes()))
    if note.error is not None:
        raise note.error


note.error = None


@pytest.fixture
def run_with_image(run):
    passed.clear()
    note.error = None
    (run / "images").mkdir()
    (run / "images" / "a.png").write_bytes(b"pixels")
    (run / "secret").write_bytes(b"secret")
    (run / "events.jsonl").write_bytes(LINES)
    return run


LINES = b'{"event":"image","path":"images/a.png"}\n{"event":"image","path":"images/../secret"}\n'
PART = f"record/{0:020d}-{len(LINES):020d}.jsonl"


def function_of(run, name=f"{__name__}:note"):
    return FunctionDestination(name, run, open_source(run), Cursor(run))


def test_it_is_given_images_and_parts_and_no_part_stays(run_with_image):
    function = function_of(run_with_image)
    assert function.open() == 0
    function.send(0, LINES)
    assert passed == [("images/a.png", b"pixels"), (PART, LINES)]
    assert function.dropped == 1
    assert sorted(path.name for path in (run_with_image / "record").iterdir()) == ["cursor.json"]
    assert function_of(run_with_image).open() == len(LINES)


@pytest.mark.parametrize(
    ("error", "told"), [(OSError("no route"), OSError), (SystemExit(3), RecordError)]
)
def test_what_it_raises_leaves_the_part_to_be_passed_again(run_with_image, error, told):
    function = function_of(run_with_image)
    function.open()
    function.send(0, LINES[: LINES.index(b"\n") + 1])
    note.error = error
    with pytest.raises(told):
        function.send(40, LINES[40:])
    assert sorted(path.name for path in (run_with_image / "record").iterdir()) == ["cursor.json"]
    assert function_of(run_with_image).open() == LINES.index(b"\n") + 1


def test_a_part_that_a_kill_left_behind_is_removed(run_with_image):
    (run_with_image / PART).write_bytes(LINES)
    assert function_of(run_with_image).open() == 0
    assert not (run_with_image / PART).exists()


def test_a_function_that_is_not_there_is_told(run_with_image):
    with pytest.raises(
        ConfigError,
        match="transfer must name an importable module:function, got 'nowhere:send'",
    ):
        function_of(run_with_image, "nowhere:send").open()
