"""`breakpoint()` and `input()` in workers."""

from __future__ import annotations

import os
import pty
from contextlib import suppress
from pathlib import Path

import pytest

from tests.python import start_python

DEBUG = "import pdb; pdb.Pdb().set_trace()"  # what `breakpoint()` does where pytest is not loaded
SCRIPT = """
import samestep as ss

with ss.init(lanes=2) as run:
    step = 41 + run.world_size
    {call}
    run.print("goes on")
"""


def run_script(folder, call, workers, stdin):
    (folder / "train.py").write_text(SCRIPT.format(call=call))
    reader, writer = os.pipe()
    arguments = ("-m", "samestep", "run", "-n", str(workers), "--device=cpu", "train.py")
    with start_python(*arguments, stdin=stdin, stdout=writer, stderr=writer, cwd=folder) as process:
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as output:
            text = output.read()
    return process.returncode, text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_single_worker_reads_from_the_terminal_or_a_pipe(is_terminal, tmp_path):
    keyboard, stdin = pty.openpty() if is_terminal else reversed(os.pipe())
    os.write(keyboard, b"p 'step is', step\nc\n")
    status, text = run_script(tmp_path, DEBUG, 1, stdin)
    for file in (keyboard, stdin):
        with suppress(OSError):
            os.close(file)
    assert (status, "goes on" in text) == (0, True), text
    assert "('step is', 42)" in text  # behind a prompt, which a line of the launcher may follow


@pytest.mark.parametrize("call", [DEBUG, "input()"])
@pytest.mark.parametrize("workers", [1, 2])
def test_others_say_what_to_do(call, workers, tmp_path):
    with Path(os.devnull).open("rb") as nothing:
        status, text = run_script(tmp_path, call, workers, nothing)
    assert status == 1
    assert f"this is one of {workers}. Start the script with python or samestep run -n 1" in text
