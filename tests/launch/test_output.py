from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from samestep.launch import output as outputs
from samestep.launch.output import Outputs
from samestep.launch.screen import FileStream, Screen, standard_screens
from tests.launch.processes import SOON_SECONDS, for_ever

FORK = multiprocessing.get_context("fork")
EVERY_BYTE = bytes(byte for byte in range(256) if byte not in b"\r\n")


class Host:
    """A launcher's outputs, and workers that print."""

    def __init__(self, folder):
        self.outputs = Outputs()
        self.processes = []
        self._folder = folder

    def fork(self, rank, body):
        """Start a worker."""
        with self.outputs.pipes_of(rank) as pipes:
            self.processes.append(FORK.Process(target=lambda: (pipes.take_over(), body())))
            self.processes[-1].start()
        return self.processes[-1]

    def run(self, rank, body):
        """Run a worker to its end, but do not drain what it printed."""
        process = self.fork(rank, body)
        while process.exitcode is None:
            self.pump(0.005)
        self.pump()

    def pump(self, seconds=0.0):
        self.outputs.forward(wait(self.outputs.files(), seconds))

    def out(self):
        return (self._folder / "out").read_bytes()

    def err(self):
        return (self._folder / "err").read_bytes()

    def close(self):
        for process in self.processes:
            process.join(SOON_SECONDS)
        self.outputs.close()


@pytest.fixture
def host(tmp_path, monkeypatch):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        monkeypatch.setattr(
            outputs,
            "standard_screens",
            lambda: (Screen(FileStream(out.fileno())), Screen(FileStream(err.fileno()))),
        )
        host = Host(tmp_path)
        yield host
        host.outputs.close()


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def put(data, stream=1):
    """Return a body that prints bytes."""

    def body():
        left = data
        while left:
            left = left[os.write(stream, left) :]

    return body


def log(folder, rank=0):
    return (folder / "logs" / f"worker-{rank}.log").read_bytes()


def say(text, file=None):
    print(text, file=file)


def open_files():
    """Return the open files of this process."""
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def test_bytes_of_rank_0_are_printed_unchanged_and_immediately(host):
    for part in (b"10%", b"\r20%", b"\r\n", EVERY_BYTE):
        before = host.out()
        host.run(0, put(part))
        assert host.out() == before + part


def test_lines_of_other_ranks_start_with_the_rank(host):
    host.run(3, put(b"one\ntwo\n\nthr"))
    host.outputs.drain()
    assert host.out() == b"[3] one\n[3] two\n[3] \n[3] thr\n"


def test_stdout_and_stderr_stay_apart(host):
    host.run(0, lambda: (say("out"), say("err", file=sys.stderr)))
    host.run(1, lambda: (say("out"), say("err", file=sys.stderr)))
    assert (host.out(), host.err()) == (b"out\n[1] out\n", b"err\n[1] err\n")


def test_a_line_printed_in_parts_stays_together(host):
    parts, pumped = FORK.Semaphore(0), FORK.Semaphore(0)

    def body():
        for part in (b"a ", b"line\nand ", b"another\n"):
            os.write(1, part)
            parts.release()
            pumped.acquire()

    host.fork(12, body)
    seen = []
    for _ in range(3):
        parts.acquire()
        host.pump()
        seen.append(host.out())
        pumped.release()
    assert seen == [b"", b"[12] a line\n", b"[12] a line\n[12] and another\n"]
    host.close()


def test_a_line_of_another_rank_does_not_end_up_in_an_unfinished_one_of_rank_0(host):
    host.run(0, put(b"50% "))
    host.run(1, put(b"hello\n"))
    host.run(0, put(b"of 10"))
    host.run(2, put(b"unfinished"))
    host.outputs.drain()
    host.run(0, put(b" steps\n"))
    assert host.out() == b"50% \n[1] hello\nof 10\n[2] unfinished\n steps\n"


def test_a_line_of_the_launcher_starts_on_a_new_line(host):
    host.run(0, put(b"50%", stream=2))
    host.outputs.print("all start again")
    host.outputs.print("and again")
    assert host.err() == b"50%\nsamestep: all start again\nsamestep: and again\n"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (b"\r10%\r20%\r100%\nnext\n", b"[1] 100%\n[1] next\n"),
        (b"for\r\nWindows\r\n", b"[1] for\n[1] Windows\n"),
        (b"\r10%\r20%", b"[1] 20%\n"),
        (b"\r10%\r20%\r", b"[1] 20%\n"),
    ],
)
def test_the_final_state_of_other_ranks_progress_bars_is_shown(host, printed, expected):
    host.run(1, put(printed))
    host.outputs.drain()
    assert host.out() == expected


def test_a_progress_bar_that_never_ends_its_line_takes_no_memory(host):
    host.run(1, put(b"".join(b"\r%06d" % step for step in range(100_000))))
    host.outputs.drain()
    assert host.out() == b"[1] 099999\n"


def test_a_megabyte_without_a_newline_is_printed(host):
    megabyte = 4096 * EVERY_BYTE
    host.run(0, put(megabyte))
    assert host.out() == megabyte
    host.run(1, put(megabyte))
    host.outputs.drain()
    assert host.out().removeprefix(megabyte).replace(b"\n", b"").replace(b"[1] ", b"") == megabyte
    assert (
        max(map(len, host.out().removeprefix(megabyte).splitlines(keepends=True))) < 3 * 64 * 1024
    )


def test_lines_reach_the_screen_before_a_worker_is_killed(host):
    def body():
        say("a line")
        say("errors", file=sys.stderr)
        os.write(1, b"and half of")
        os.kill(os.getpid(), signal.SIGKILL)

    host.run(1, body)
    host.outputs.drain()
    assert (host.out(), host.err()) == (b"[1] a line\n[1] and half of\n", b"[1] errors\n")


def test_every_character_can_be_printed(host):
    host.run(0, lambda: say("\udcff and ✓"))
    assert host.out() == "\\udcff and ✓\n".encode()


def test_the_launchers_buffered_output_is_printed_once(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        host = Host(tmp_path)
        say("the launcher's")
        host.run(1, lambda: say("the worker's"))
        host.close()
    assert host.out() == b"the launcher's\n[1] the worker's\n"


def test_no_file_of_a_finished_worker_stays_open(host):
    before = open_files()
    host.run(0, put(b"0"))
    host.run(1, put(b"1"))
    while host.outputs.files():
        host.pump()
    for process in host.processes:
        process.close()
    host.outputs.drain()
    assert open_files() - before == set()


def test_a_worker_has_no_files_of_others(host, run_folder):
    host.outputs.forward([], str(run_folder))
    held = FORK.SimpleQueue()
    before = open_files()
    with host.outputs.pipes_of(0):
        others = open_files() - before
    host.fork(1, lambda: held.put(open_files()))
    assert len(others) == 3
    assert held.get() & others == set()
    held.close()
    host.close()


def test_a_workers_child_does_not_delay_its_end(host):
    child = FORK.Value("i")

    def body():
        os.write(1, b"last line")
        if (pid := os.fork()) == 0:
            for_ever()
        child.value = pid

    host.run(1, body)
    assert len(host.outputs.files()) == 2
    host.outputs.drain()
    assert (host.outputs.files(), host.out()) == ([], b"[1] last line\n")
    os.kill(child.value, signal.SIGKILL)


def test_a_workers_child_may_print_forever(host):
    def body():
        if os.fork() == 0:
            with suppress(BrokenPipeError):
                while True:
                    os.write(1, b"on and on\n")
            os._exit(0)

    host.run(1, body)
    host.outputs.drain()
    assert host.outputs.files() == []
    assert set(host.out().splitlines()) <= {
        b"[1] on and on",
        *(b"[1] on and on"[:length] for length in range(4, 13)),
    }


@pytest.fixture
def narrow(monkeypatch):
    """Print to a pipe that is not read yet; yield its reading end."""
    reading, writing = os.pipe()
    monkeypatch.setattr(outputs, "standard_screens", lambda: 2 * (Screen(FileStream(writing)),))
    yield reading
    for end in (reading, writing):
        with suppress(OSError):
            os.close(end)


def read_all(file):
    os.set_blocking(file, False)
    data = b""
    with suppress(BlockingIOError):
        while part := os.read(file, 2**20):
            data += part
    return data


def test_a_blocked_screen_delays_only_the_worker_that_prints(narrow, tmp_path):
    host = Host(tmp_path)
    # more than the screen, the worker's pipe and the launcher take together
    lines = [b"%06d\n" % line for line in range(40_000)]
    worker = host.fork(0, put(b"".join(lines)))
    for _ in range(10):
        host.pump(SOON_SECONDS)
    assert worker.is_alive()
    seen = b""
    while len(seen) < len(b"".join(lines)):
        seen += read_all(narrow)
        host.pump()
    assert seen == b"".join(lines)
    host.close()


def test_a_blocked_screen_does_not_delay_an_urgent_end(narrow, tmp_path):
    host, questions = Host(tmp_path), []
    host.outputs = Outputs(is_urgent=lambda: questions.append("?") or len(questions) > 3)
    for rank in range(2):
        host.fork(rank, put(65536 * b"."))
    host.close()
    assert len(questions) > 3
    assert len(read_all(narrow)) >= 65536


def test_workers_and_logs_continue_after_the_reader_is_gone(narrow, tmp_path, run_folder):
    os.close(narrow)
    host = Host(tmp_path)
    host.outputs.forward([], str(run_folder))
    host.run(0, put(2**20 * b"."))
    host.close()
    assert host.processes[0].exitcode == 0
    assert log(run_folder).count(b".") == 2**20


def test_without_any_standard_file_workers_still_print_to_their_logs(run_folder):
    def launcher():
        for number in range(3):
            os.close(number)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
        other = os.open(run_folder / "other", os.O_CREAT | os.O_RDWR)
        assert other == 0
        os.dup(other)  # 1, as if it were stdout
        host = Host(None)
        host.outputs.forward([], str(run_folder))
        host.run(0, lambda: (say("out"), say("err", file=sys.stderr)))
        host.close()

    process = FORK.Process(target=launcher)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert sorted(log(run_folder).splitlines()[1:]) == [b"err", b"out"]
    assert (run_folder / "other").read_bytes() == b""


def test_a_log_has_the_complete_output_after_a_title(host, run_folder):
    host.run(3, put(b"before\r"))
    host.outputs.forward([], "")
    host.outputs.forward([], str(run_folder))
    host.run(0, put(EVERY_BYTE))
    host.run(3, put(b"and after", stream=2))
    title, *lines = log(run_folder, 3).split(b"\n")
    assert title.startswith(b"=== worker 3, attempt 1, 20")
    assert lines[0] == b"before\r"
    assert log(run_folder).split(b"\n", 1)[1] == EVERY_BYTE


def test_a_log_is_continued_by_each_attempt_and_each_launch(host, run_folder):
    for _launch in range(2):
        for _attempt in range(2):
            host.outputs.forward([], str(run_folder))
            host.run(0, put(b"half a line"))
            host.outputs.drain()
        host.outputs = Outputs()
    attempts = [
        line.split(b",")[1] for line in log(run_folder).splitlines() if line.startswith(b"===")
    ]
    assert attempts == [b" attempt 1", b" attempt 2"] * 2
    assert log(run_folder).splitlines()[1::2] == 4 * [b"half a line"]


def test_output_before_the_directory_is_known_is_bounded(host, run_folder):
    host.run(0, put(b"first" + 2**20 * b"." + b"last"))
    host.outputs.forward([], str(run_folder))
    _, kept = log(run_folder).split(b"\n")
    assert len(kept) == 256 * 1024
    assert kept.endswith(b".last")


def test_another_directory_gets_the_output_from_then_on(host, run_folder, tmp_path):
    (tmp_path / "other").mkdir()
    go_on = FORK.Semaphore(0)
    host.fork(0, lambda: (say("one"), go_on.acquire(), say("two")))
    wait(host.outputs.files(), SOON_SECONDS)
    host.pump()
    host.outputs.forward([], str(run_folder))
    host.outputs.forward([], str(tmp_path / "other"))
    go_on.release()
    host.close()
    assert log(run_folder).splitlines()[1:] == [b"one"]
    assert log(tmp_path / "other").splitlines()[1:] == [b"two"]


def directory_is_removed(folder):
    shutil.rmtree(folder)


def log_is_a_link(folder):
    shutil.rmtree(folder / "logs")
    (folder / "logs").mkdir()
    (folder / "logs" / "worker-1.log").symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("happens", "next_rank", "reason"),
    [
        (directory_is_removed, 0, "was removed"),
        (directory_is_removed, 1, "No such file"),
        (log_is_a_link, 1, "not a regular file"),
    ],
)
def test_a_log_error_is_reported_once(host, run_folder, happens, next_rank, reason):
    go_on = FORK.Semaphore(0)
    host.outputs.forward([], str(run_folder))
    host.fork(0, lambda: (go_on.acquire(), say("more")))
    happens(run_folder)
    if next_rank == 1:
        host.run(1, put(b"another\n"))
    go_on.release()
    host.close()
    [line] = host.err().decode().splitlines()
    assert line.startswith(f"samestep: cannot write worker logs in {run_folder}: ")
    assert reason in line
    assert set(host.out().splitlines()) >= {b"more"}


def test_a_removed_run_directory_is_not_created_again(host, run_folder):
    run_folder.rmdir()
    host.outputs.forward([], str(run_folder))
    host.run(0, put(b"."))
    assert not run_folder.exists()


def test_a_replaced_stream_gets_text(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        host = Host(tmp_path)
        host.run(0, put("✓".encode()[:2]))
        host.run(0, put("✓".encode()[2:] + b"\xff\n"))
        host.run(1, put(b"err", stream=2))
        host.close()
    assert (out.getvalue(), err.getvalue()) == ("✓\\xff\n", "[1] err\n")


def test_a_replaced_stream_gets_the_characters_of_its_encoding(tmp_path):
    latin = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(latin, "latin-1")) as stream:
        host = Host(tmp_path)
        host.run(0, lambda: say("é ✓"))
        host.run(1, lambda: say("é ✓"))
        host.close()
        stream.flush()
        assert latin.getvalue() == "é \\u2713\n[1] é \\u2713\n".encode("latin-1")


def test_a_replaced_stream_may_be_closed(tmp_path):
    with redirect_stdout(io.StringIO()) as stream:
        host = Host(tmp_path)
        stream.close()
        host.run(0, lambda: say("not read"))
        host.close()
    assert host.processes[0].exitcode == 0


def test_a_second_stream_on_stdout_may_be_deleted(host):
    def launcher():
        sys.stdout = os.fdopen(1, "w")
        host.run(0, lambda: say("here"))
        host.close()

    process = FORK.Process(target=launcher)
    process.start()
    process.join()
    assert host.out() == b"here\n"


def test_a_line_on_stdout_does_not_continue_a_bar_on_stderr():
    reading, writing = os.pipe()
    screen = Screen(FileStream(writing))
    out, err = 1, 2
    for data, writer in (
        (b"\r 50%", err),
        (b"\r100%", err),
        (b"score ", out),
        (b"1\n", out),
        (b"\r100%", err),
    ):
        screen.write(data, writer)
    screen.write_lines(b"[1] hello\n")
    assert os.read(reading, 1000) == b"\r 50%\r100%\nscore 1\n\r100%\n[1] hello\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("together", [True, False])
def test_one_terminal_for_both_streams_is_one_screen(monkeypatch, tmp_path, together):
    def launcher():
        for number, name in ((1, "out"), (2, "out" if together else "err")):
            os.dup2(os.open(tmp_path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        host = Host(tmp_path)
        host.run(0, put(b"50%", stream=2))
        host.run(1, put(b"hello\n"))
        host.close()
        assert len(set(standard_screens())) == 2 - together

    process = FORK.Process(target=launcher)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "out").read_bytes() == (b"50%\n[1] hello\n" if together else b"[1] hello\n")
