"""The end of a worker's log, as the page shows it."""

from __future__ import annotations

import socket

import pytest

from samestep.errors import RecordError
from samestep.watch.view import LOG_BYTES, LOG_LINES
from tests.python import run_python
from tests.watch.serving import serving
from tests.watch.writing import started, view_of

SECONDS = 300

SCRIPT = """
import samestep as ss

with ss.init() as run:
    print(f"hello from {run.rank}")
    if run.rank == 1:
        raise LookupError("no such thing <b>")
    run.barrier("waiting")
"""


@pytest.fixture
def view(tmp_path):
    return view_of(tmp_path, started())


@pytest.fixture
def write_log(tmp_path):
    """Return a function that appends bytes to the log of a worker."""

    def write(rank, data):
        (tmp_path / "logs").mkdir(exist_ok=True)
        with (tmp_path / "logs" / f"worker-{rank}.log").open("ab") as file:
            file.write(data)

    return write


def lines(view, worker=0, **options):
    return view.log(worker, **options)["lines"]


def test_without_logs(view):
    assert view.log(0) == {"workers": [], "size": 0, "cut": False, "lines": []}


def test_new_lines_follow(view, write_log):
    write_log(0, b"one\ntwo\n")
    write_log(10, b"other\n")
    assert view.log(0) == {"workers": [0, 10], "size": 8, "cut": False, "lines": ["one", "two"]}
    assert lines(view, have=8) is None
    write_log(0, b"three")
    assert lines(view, have=8) == ["one", "two", "three"]
    assert lines(view, worker=10) == ["other"]
    assert lines(view, worker=3) == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"0 %\r50 %\r100 %\ndone\n", ["100 %", "done"]),
        (b"\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]0;title\x07\x1bM\n", ["red link"]),
        (b"\xff\xfe\xc3\xa9 \x1b\n", ["\N{REPLACEMENT CHARACTER}" * 2 + "é \x1b"]),
        (b"<script>alert(1)</script>\n\n", ["<script>alert(1)</script>", ""]),
    ],
)
def test_lines_are_what_a_terminal_shows(view, write_log, data, expected):
    write_log(0, data)
    assert lines(view) == expected


def test_only_the_end_of_a_long_log_is_read(view, write_log, monkeypatch):
    write_log(0, b"".join(b"line %d\n" % number for number in range(100_000)))
    read, source = [], view.source.read_log
    monkeypatch.setattr(
        view.source, "read_log", lambda *place: read.append(place) or source(*place)
    )
    log = view.log(0)
    assert log["lines"] == [f"line {number}" for number in range(100_000 - LOG_LINES, 100_000)]
    assert log["cut"]
    assert read == [(0, log["size"] - LOG_BYTES, log["size"])]
    assert lines(view, search="LINE 99 000") == ["line 99000"]  # all words, in any case
    assert lines(view, search="line 1000x") == []


def test_only_logs_are_read(tmp_path, view, write_log):
    outside = tmp_path.parent / f"{tmp_path.name}-secret"
    outside.write_text("secret")
    write_log(1, b"mine\n")
    (tmp_path / "logs" / "worker-0.log").symlink_to(outside)
    for name in ("worker-02.log", "worker--3.log", "worker-4.log.old", "other-5.log"):
        (tmp_path / "logs" / name).write_text("secret")
    (tmp_path / "logs" / "worker-6.log").mkdir()
    assert view.log(0) == {"workers": [1], "size": 0, "cut": False, "lines": []}
    with pytest.raises(RecordError):
        view.source.read_log(0, 0, 6)
    with pytest.raises(RecordError):
        view.source.read_log(1, 0, 6)  # a shorter log replaced it


def test_the_logs_folder_may_not_be_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "worker-0.log").write_text("secret")
    run = tmp_path / "run"
    view = view_of(run, started())
    (run / "logs").symlink_to(tmp_path / "elsewhere")
    assert view.log(0)["workers"] == []


def test_the_traceback_of_a_failed_worker_is_in_its_log(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = ("run", "-n", "2", "--dir", folder, script)
    ended = run_python("-m", "samestep", *command, timeout=SECONDS)
    assert ended.returncode != 0
    with serving(folder) as server:
        log = server.json("/api/log", id=".", worker=1)
        assert log["workers"] == [0, 1]
        assert "hello from 1" in log["lines"]
        assert log["lines"][0].startswith("=== worker 1, attempt 1, ")
        end = log["lines"].index("Traceback (most recent call last):")
        reason, host = "LookupError: no such thing <b>", socket.gethostname()
        assert log["lines"][end - 1] == f"=== worker 1 ended: {reason} [step 0, host {host}] ==="
        assert log["lines"][-1] == reason
        assert str(script) in log["lines"][end + 1]
        matching_log = server.json("/api/log", id=".", worker=0, search="HELLO")
        assert matching_log["lines"] == ["hello from 0"]
        assert server.json("/api/log", id=".", worker=0, have=matching_log["size"])["lines"] is None
