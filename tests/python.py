"""Python programs in forks of a process that has imported torch: `python SCRIPT`, `python -m …`.

A program starts in milliseconds; with `subprocess`, importing torch takes seconds. It has its own
arguments, environment, folder, files and terminal. What a program needs of the start of Python
(hash seeds, flags such as -O, modules that must not be loaded) is tested with `subprocess`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from typing_extensions import Self

from samestep.host import end_with_parent
from tests.huge_pages import use_huge_pages

MAX_REQUEST = 1 << 17  # bytes
FILES = 4  # stdin, stdout, stderr, and the pipe for the process id and the exit status
# packages of this repository that a program imports itself
OWN_PACKAGES = ("benchmarks", "recipes", "tests")
FIXED = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=2"}

_connection: socket.socket | None = None
_running: list[PythonProcess] = []
_forgotten: list[ModuleType] = []  # of the server, which still runs one of them
_path: list[str] = []  # of a new Python, after the folder of its program


def start_server() -> None:
    """Fork the server from this process; it ends with it."""
    global _connection
    program = "import json, sys; print(json.dumps(sys.path[1:]))"
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _path[:] = json.loads(subprocess.check_output([sys.executable, "-c", program], env=others))
    _connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads belong to pytest-xdist
        if os.fork() == 0:
            _connection.close()
            end_with_parent(pid)
            _or_exit(lambda: _serve(theirs))
    theirs.close()


def stop_server() -> None:
    """Let the server end."""
    if _connection is not None:
        _connection.close()


def running() -> dict[int, str]:
    """Return the programs that this process has started and that still run, by process id."""
    return {
        process.pid: "python, from start_python"
        for process in [*_running]
        if process.poll() is None
    }


class PythonProcess:
    """A running program, with the interface of `subprocess.Popen`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = os.fdopen(pipe, "rb", buffering=0)
        self._text = b""
        self._read(None)
        self.pid = int(self._text.partition(b"\n")[0])
        self.returncode: int | None = None
        _running.append(self)

    def _read(self, seconds: float | None) -> bool:
        """Read until the next line is complete; return whether it is in time."""
        lines = self._text.count(b"\n")
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._text.count(b"\n") == lines:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._pipe], [], [], left)[0]:
                return False
            data = self._pipe.read(64)
            assert data, "the server of Python programs has died"
            self._text += data
        return True

    def poll(self) -> int | None:
        """Return the exit status, None while the program runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if self._text.count(b"\n") < 2 and not self._read(timeout):
                raise subprocess.TimeoutExpired("python", timeout or 0.0)
            self.returncode = int(self._text.split(b"\n")[1])
            self._pipe.close()
            _running.remove(self)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the program if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def start_python(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
) -> PythonProcess:
    """Start `python WORDS…`; files are open ones, None for this process's, or DEVNULL."""
    assert _connection is not None, "tests/conftest.py starts the server"
    request = {
        "words": [*map(str, words)],
        "folder": str(cwd or Path.cwd()),
        "environment": {**FIXED, **(os.environ if env is None else env)},
    }
    ours, theirs = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        files = [
            number
            if file is None
            else nothing
            if file == subprocess.DEVNULL
            else file
            if isinstance(file, int)
            else file.fileno()
            for number, file in enumerate((stdin, stdout, stderr))
        ]
        message = json.dumps(request).encode()
        assert len(message) < MAX_REQUEST, "the environment is too large"
        socket.send_fds(_connection, [message], [*files, theirs])
    finally:
        os.close(nothing)
        os.close(theirs)
    return PythonProcess(ours)


def run_python(
    *words: object,
    check: bool = False,
    merges: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS…` to its end; return its status and its output as text.

    With `merges`, stdout has the output of both. With `check`, failures raise `AssertionError`.
    """
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        files = {"stdout": stdout, "stderr": stdout if merges else stderr}
        with start_python(*words, **files, **options) as process:
            try:
                status = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess([*map(str, words)], status, *texts)
    if check and status:
        raise AssertionError(f"{done.args} ended with status {status}:\n{done.stderr}")
    return done


def fork_what_tools_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what `samestep.tools.started` starts, such as the runs of `samestep verify`."""

    def start(command: Sequence[str], **options: Any) -> PythonProcess:
        assert command[0] == sys.executable
        if options["stderr"] == subprocess.STDOUT:
            options["stderr"] = options["stdout"]
        return start_python(*command[1:], **options)

    names = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr("samestep.tools.subprocess", SimpleNamespace(**names))


def _serve(connection: socket.socket) -> None:
    """Fork a program for each request until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this process
    _forget_own_packages()
    use_huge_pages()
    while True:
        data, files, *_ = socket.recv_fds(connection, MAX_REQUEST, FILES)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            connection.close()
            _watch(json.loads(data), files)
        for file in files:
            os.close(file)


def _forget_own_packages() -> None:
    """Let programs import them; here, because a program would copy all memory that this changes."""
    own = [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]
    _forgotten.extend(sys.modules.pop(name) for name in own)


def _or_exit(body: Callable[[], object]) -> None:
    """Run the body of a fork; no exception of it may reach what this process was forked from."""
    try:
        body()
    except BaseException:  # noqa: BLE001
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
    finally:
        os._exit(1)


def _watch(request: Mapping[str, Any], files: list[int]) -> None:
    """Run the program in a fork of this process, and report its process id and status."""
    *standard, report = files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.close(report)
        _or_exit(lambda: os._exit(_run(request, standard)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # of a group: for the program
    for file in (0, 1, 2, *standard):
        os.close(file)
    os.write(report, f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(report, f"{status}\n".encode())
    os._exit(0)


def _run(request: Mapping[str, Any], files: list[int]) -> int:
    """Make this process what a new Python would be, and run the program; return its status."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _restore_python()
    first, *rest = request["words"]
    try:
        if first == "-m":
            sys.orig_argv = [sys.executable, *request["words"]]
            sys.argv = rest
            sys.path = [str(Path.cwd()), *_given_path(), *_path]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = sys.orig_argv = request["words"]
            sys.path = [str(Path(first).resolve().parent), *_given_path(), *_path]
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001  as Python itself does
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _given_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _restore_python() -> None:
    """Undo what pytest and its plugins have changed in this process."""
    atexit._clear()
    faulthandler.disable()
    gc.enable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in {signal.SIGPIPE, signal.SIGXFSZ}
        with suppress(OSError):  # of the C library
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.fdopen(number, "r" if number == 0 else "w", -1, "utf-8", closefd=False)
        if isinstance(file, io.TextIOWrapper) and number:
            file.reconfigure(
                line_buffering=number == 2 or file.isatty(),
                errors="backslashreplace" if number == 2 else "strict",
            )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    # it rewrites assertions, and cannot find the code of a module to run
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)
    ]
    logging.root.handlers[:] = []
    logging.root.setLevel(logging.WARNING)
