"""A program that is forked behaves like one that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.python import run_python, start_python

STATE = """
import json, logging, os, signal, sys, threading, warnings
print(json.dumps({
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "path": sys.path,
    "name": __name__,
    "variable": os.environ.get("OF_THE_TEST"),
    "input": sys.stdin.read(),
    "terminal": [sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty()],
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
    "logging": [len(logging.root.handlers), logging.root.level],
    "errors": [kind for kind, *_ in warnings.filters if kind == "error"],
    "threads": threading.active_count(),
    "own": "tests.python" in sys.modules,
}))
"""
ENDS = {
    "raise SystemExit(3)": 3,
    "raise SystemExit('text')": 1,
    "raise SystemExit": 0,
    "1 / 0": 1,
    "import os; os._exit(7)": 7,
    "import os; os.kill(os.getpid(), 9)": -9,
    "import atexit; atexit.register(print, 'at the end')": 0,
    "import sys; sys.stdout.write('no newline')": 0,
    "import threading, time; threading.Thread(target=time.sleep, args=(0.1,)).start()": 0,
}


def test_a_program_finds_what_python_gives_it(tmp_path):
    script = tmp_path / "state.py"
    script.write_text(STATE)
    environment = {**os.environ, "OF_THE_TEST": "1", "PYTHONPATH": "/nowhere"}
    environment.pop("PYTHONUNBUFFERED", None)
    words = [str(script), "--flag", "x y"]
    options = {"cwd": tmp_path, "env": environment}
    command = [sys.executable, *words]
    real = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=True, **options
    )
    assert json.loads(run_python(*words, check=True, **options).stdout) == json.loads(real.stdout)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_python_ends_it(end, tmp_path):
    script = tmp_path / "end.py"
    script.write_text(end)
    real = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    done = run_python(script)
    assert (done.returncode, done.stdout) == (real.returncode, real.stdout)
    assert done.returncode == ENDS[end]
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_module_is_run_like_python_m(tmp_path):
    (tmp_path / "there.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    done = run_python("-m", "there", "x", cwd=tmp_path, check=True)
    assert done.stdout == f"__main__ ['x'] {tmp_path}\n"


def test_a_signal_reaches_the_program_and_its_end_is_awaited(tmp_path):
    script, ready = tmp_path / "sleeps.py", tmp_path / "ready"
    script.write_text(f"import time, pathlib; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)")
    with start_python(script) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    process.kill()  # it has ended


def test_a_failure_is_raised_with_its_output(tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('no luck')")
    with pytest.raises(AssertionError, match=r"status 1:\n(?s:.*)ValueError: no luck"):
        run_python(tmp_path / "fails.py", check=True)
