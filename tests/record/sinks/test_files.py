from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.record.cursor import Cursor
from samestep.record.files import EventChunk, find_chunks
from samestep.record.sinks import files as module
from samestep.record.sinks.files import MANIFEST, FunctionDestination, StorageDestination
from samestep.record.source import open_source
from samestep.snapshot.manifest import NAME
from samestep.storage import StorageError
from tests.snapshot.faulty import URL, failing, faulty_storage


@pytest.fixture
def remote():
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


def send_all(run, sink, offset=None):
    """Send a run's events, as a sender does; return the offset after them."""
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


def stored_chunks(remote):
    return find_chunks(
        {
            path.rpartition("/")[2]: len(file.getvalue())
            for path, file in remote.store.items()
            if "/record/" in path
        }
    )


def test_each_send_writes_a_chunk(remote, run):
    sink, end = destination(run), None
    for step in range(3):
        log(run, {"step": step})
        end = send_all(run, sink, end)
    assert stream() == (run / "events.jsonl").read_bytes()
    assert stored_chunks(remote) == [EventChunk(0, 12), EventChunk(12, 24), EventChunk(24, 36)]


def test_an_image_is_written_before_the_chunk_that_names_it(remote, run):
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
    send_all(run, sink)
    assert [path for operation, path in remote.calls if operation == "pipe_file"] == [
        "images/a.png",
        f"record/{stored_chunks(remote)[0].path[7:]}",
    ]
    assert b"".join(open_source(URL).open_image("images/a.png")[1]) == b"pixels"
    assert sink.dropped == 3


def test_images_are_not_sent_again_when_a_chunk_is_retried(remote, run):
    (run / "images").mkdir()
    for name in "ab":
        (run / "images" / f"{name}.png").write_bytes(b"pixels")
        log(run, {"event": "image", "path": f"images/{name}.png"})
    sink = destination(run)
    offset = sink.open()

    def refuse(operation, path):
        if path == "images/b.png":
            raise ConnectionError("reset")

    remote.before = staticmethod(refuse)
    with pytest.raises(StorageError, match=r"cannot write .*images/b\.png"):
        send_all(run, sink, offset)
    remote.before = staticmethod(lambda operation, path: None)
    send_all(run, sink, offset)
    assert [path for operation, path in remote.calls if operation == "pipe_file"][:2] == [
        "images/a.png",
        "images/b.png",
    ]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 6)), min_size=1, max_size=8)
)
def test_each_byte_is_stored_once_despite_failures_and_kills(tmp_path_factory, plan):
    """In each round events are logged, the process may be restarted, and a call may fail."""
    run = tmp_path_factory.mktemp("run")
    (run / "record").mkdir()
    (run / "events.jsonl").touch()
    with faulty_storage() as remote, pytest.MonkeyPatch.context() as patch:
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

            remote.before = staticmethod(fail_once)
            try:
                end = send_all(run, sink, end)
            except StorageError:
                end = None if end is None else end
                assert (run / "events.jsonl").read_bytes().startswith(stream())
        remote.before = staticmethod(lambda operation, path: None)
        sink = destination(run)
        send_all(run, sink)
        assert stream() == (run / "events.jsonl").read_bytes()


def test_many_small_chunks_are_merged(remote, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 4)
    sink, end = destination(run), None
    counts = []
    for step in range(20):
        log(run, {"step": step})
        end = send_all(run, sink, end)
        counts.append(len(stored_chunks(remote)))
        assert stream() == (run / "events.jsonl").read_bytes()
    assert max(counts) == 4
    assert remote.calls.count(("rm", "record/" + EventChunk(0, 12).path[7:])) == 1


def test_large_chunks_are_not_merged(remote, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 2)
    monkeypatch.setattr(module, "FULL_BYTES", 12)
    sink, end = destination(run), None
    for step in range(9):
        log(run, {"step": step})
        end = send_all(run, sink, end)
    assert len(stored_chunks(remote)) == 9
    assert ("rm", "record/" + EventChunk(0, 12).path[7:]) not in remote.calls


def test_redundant_chunks_of_a_killed_merge_are_removed(remote, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SMALL_CHUNKS", 2)
    sink, end = destination(run), None
    for step in range(2):
        log(run, {"step": step})
        end = send_all(run, sink, end)
    log(run, {"step": 2})
    remote.before = staticmethod(failing(1, ConnectionError("reset"), "rm"))
    with pytest.raises(StorageError, match="cannot remove"):
        send_all(run, sink, end)
    assert stored_chunks(remote) == [EventChunk(0, 12), EventChunk(0, 24), EventChunk(12, 24)]
    send_all(run, destination(run))
    assert stored_chunks(remote) == [EventChunk(0, 24), EventChunk(24, 36)]


def test_a_run_resumed_in_a_new_directory_continues_at_its_url(remote, run, tmp_path_factory):
    log(run, {"event": "started", "step": 0})
    send_all(run, destination(run))
    before = stream()
    other = tmp_path_factory.mktemp("other")
    (other / "record").mkdir()
    for step in range(3):
        log(other, {"event": "resumed", "step": step})
        send_all(other, destination(other))  # each time by another process
        assert stream() == before + (other / "events.jsonl").read_bytes()


def test_an_emptied_url_receives_everything_again(remote, run):
    log(run, {"step": 0}, {"step": 1})
    send_all(run, destination(run))
    remote.store.clear()
    send_all(run, destination(run))
    assert stream() == (run / "events.jsonl").read_bytes()


def test_an_emptied_directory_continues_after_what_was_sent(remote, run):
    log(run, {"step": 0}, {"step": 1})
    send_all(run, destination(run))
    before = stream()
    (run / "events.jsonl").unlink()
    log(run, {"step": 2})
    send_all(run, destination(run))
    assert stream() == before + (run / "events.jsonl").read_bytes()


passed = []


def note(path):
    """The user's function."""
    folder, name = path.split("/")[-2:]  # as DeepLIIF's guide has it: a path is text
    passed.append((f"{folder}/{name}", Path(path).read_bytes()))
    if note.error is not None:
        raise note.error


@pytest.fixture(autouse=True)
def nothing_passed():
    """Let no test see what another passed, in whatever order they run."""
    passed.clear()
    note.error = None


@pytest.fixture
def run_with_image(run):
    (run / "images").mkdir()
    (run / "images" / "a.png").write_bytes(b"pixels")
    (run / "secret").write_bytes(b"secret")
    (run / "events.jsonl").write_bytes(LINES)
    return run


LINES = b'{"event":"image","path":"images/a.png"}\n{"event":"image","path":"images/../secret"}\n'
CHUNK = f"record/{0:020d}-{len(LINES):020d}.jsonl"


def function_destination(run, name=f"{__name__}:note"):
    return FunctionDestination(name, run, open_source(run), Cursor(run))


def test_the_function_receives_images_and_chunks_and_chunks_are_removed(run_with_image):
    function = function_destination(run_with_image)
    assert function.open() == 0
    function.send(0, LINES)
    assert passed == [("images/a.png", b"pixels"), (CHUNK, LINES)]
    assert function.dropped == 1
    assert sorted(path.name for path in (run_with_image / "record").iterdir()) == ["cursor.json"]
    assert function_destination(run_with_image).open() == len(LINES)


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(3)])
def test_after_an_exception_the_chunk_is_passed_again(run_with_image, error):
    function = function_destination(run_with_image)
    function.open()
    function.send(0, LINES[: LINES.index(b"\n") + 1])
    note.error = error
    with pytest.raises(type(error)):
        function.send(40, LINES[40:])
    assert sorted(path.name for path in (run_with_image / "record").iterdir()) == ["cursor.json"]
    assert function_destination(run_with_image).open() == LINES.index(b"\n") + 1


def test_a_chunk_left_by_a_killed_process_is_removed(run_with_image):
    (run_with_image / CHUNK).write_bytes(LINES)
    assert function_destination(run_with_image).open() == 0
    assert not (run_with_image / CHUNK).exists()


def snapshot(run, step, *names):
    folder = run / f"step-{step:08d}"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"data")
    return json.dumps({"event": "snapshot", "path": str(folder)}).encode() + b"\n"


def test_the_function_receives_the_files_of_snapshots_and_their_manifest_last(run):
    first = snapshot(run, 1, "tensors-0", MANIFEST, "zeros")
    removed = json.dumps({"event": "snapshot", "path": str(run / "step-00000002")}).encode() + b"\n"
    elsewhere = json.dumps({"event": "snapshot", "path": str(run.parent)}).encode() + b"\n"
    incomplete = snapshot(run, 3, "tensors-0")
    lines = first + removed + elsewhere + incomplete
    (run / "events.jsonl").write_bytes(lines)
    function = function_destination(run)
    function.open()
    function.send(0, lines)
    names = [name for name, _ in passed]
    assert names[:-1] == [f"step-00000001/{name}" for name in ("tensors-0", "zeros", MANIFEST)]
    assert names[-1].startswith("record/")


def test_after_an_exception_the_rest_of_a_snapshot_is_passed(run, monkeypatch):
    lines = snapshot(run, 1, "tensors-0", MANIFEST)
    (run / "events.jsonl").write_bytes(lines)
    function = function_destination(run)
    function.open()
    monkeypatch.setattr(function, "_function", failing_at(function._function, 1))
    with pytest.raises(OSError, match="no route"):
        function.send(0, lines)
    function.send(0, lines)
    assert [name.split("/")[1] for name, _ in passed][:2] == ["tensors-0", MANIFEST]


def failing_at(function, at):
    """Return a function that raises at call number `at`."""
    calls = iter(range(10**6))

    def called(path):
        if next(calls) == at:
            raise OSError("no route")
        function(path)

    return called


def test_the_manifest_has_its_name():
    assert MANIFEST == NAME


def test_a_missing_function_raises(run_with_image):
    with pytest.raises(
        ConfigError,
        match="transfer must name an importable module:function, got 'nowhere:send'",
    ):
        function_destination(run_with_image, "nowhere:send").open()
