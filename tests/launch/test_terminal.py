"""What a user sees on a terminal: the lines of a run, and errors with the diagnosis first."""

from __future__ import annotations

import os
import pty
import re
import signal

import pytest

from samestep import cli
from samestep.errors import ConfigError
from samestep.host import RED, colored
from tests.terminal import run_samestep, started

SCRIPT = """
import time
import samestep, torch

def loss(model, batch):
    return (FAULT) or model(batch.float()[:, None]).mean()

def train(run):
    model = run.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(list(range(8)), 4, epochs=2):
        run.backward(loss, model, batch)
        optimizer.step()

with samestep.init(OPTIONS) as run:
    train(run)
"""


def train(folder, *flags, workers=2, fault="None", options="lanes=2", colors=False):
    """Train; return the status and the printed lines."""
    script = SCRIPT.replace("FAULT", fault).replace("OPTIONS", options)
    (folder / "train.py").write_text(script)
    command = ["run", "-n", str(workers), *flags, "train.py"]
    status, text = run_samestep(*command, folder=folder, colors=colors)
    return status, text.splitlines()


def test_a_run_says_that_it_starts_stops_resumes_and_ends(tmp_path):
    where = "runs/one (watch: samestep watch runs/one)"
    assert train(tmp_path, "--dir", "runs/one", "--stop-after", "3") == (
        0,
        [
            f"samestep: 2 workers, 2 lanes, {where}",
            "samestep: stopped at step 3, snapshot saved; run the same command to resume",
        ],
    )
    assert train(tmp_path, "--dir", "runs/one", workers=1) == (
        0,
        [
            f"samestep: resumed at step 3, 1 worker (was 2), 2 lanes, {where}",
            "samestep: finished after 4 steps",
        ],
    )
    assert train(tmp_path, "--dir", "runs/one", workers=1) == (
        0,
        [
            f"samestep: resumed at step 4, 1 worker, 2 lanes, {where}",
            "samestep: nothing left to do: the run in runs/one already finished at step 4",
        ],
    )


def test_an_error_begins_with_the_diagnosis_and_its_traceback_ends_in_the_script(tmp_path):
    status, (_, first, title, *frames, last) = train(tmp_path, fault="3")
    assert status == 1
    diagnosis = "LossError: "
    assert first.startswith("samestep: error: worker ")
    assert diagnosis in first
    assert title == "Traceback (most recent call last):"
    assert frames[-1].strip() == "run.backward(loss, model, batch)"
    assert last.startswith(f"samestep.errors.{diagnosis}")


def test_an_invalid_option_is_only_the_diagnosis(tmp_path):
    status, (line,) = train(tmp_path, options="lane=2")
    assert status == ConfigError.status
    assert line.endswith("ConfigError: lane is not an option of samestep; did you mean lanes?")


@pytest.mark.long
def test_a_hang_names_the_worker_that_is_awaited(tmp_path):
    fault = "run.rank == 1 and run.step == 1 and time.sleep(3600)"
    status, lines = train(tmp_path, fault=fault, options="lanes=2, timeout=10.0", colors=True)
    assert status == 1
    assert any(line.startswith("\033[33msamestep:\033[0m stalled: ") for line in lines)
    lines = [re.sub(r"\033\[\d+m", "", line) for line in lines]
    said = [line for line in lines if line.startswith("samestep: ")]
    stalled, first = said[1:3]
    assert re.match(r"samestep: stalled: worker 0 has waited \d+ s at step 1 while ", stalled)
    awaited = "HangError: timed out after 10 s waiting for worker 1: worker 0 was "
    assert first.startswith(f"samestep: error: {awaited}")
    assert lines[-1].startswith("likely cause: ")


def test_samestep_alone_and_help_list_all_commands_and_a_misspelt_one_is_corrected(tmp_path):
    status, alone = run_samestep(folder=tmp_path)
    assert status == 0
    listed = alone.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(cli.COMMANDS)
    assert run_samestep("help", folder=tmp_path) == (0, alone)
    for words, expected in {
        "rum": "samestep: error: unknown command 'rum'; did you mean run?",
        "run --max-restart 3 x.py": "did you mean --max-restarts?",
        "watch --port 99999 .": "samestep: error: --port must be from 0 to 65535, got 99999",
    }.items():
        status, text = run_samestep(*words.split(), folder=tmp_path)
        assert status == 2
        assert text.splitlines()[-1].endswith(expected)


WAITS = """
import time
import samestep, torch

def wait():
    print("waits", flush=True)
    time.sleep(600)

BEFORE and wait()
with samestep.init(lanes=1, dir=DIRECTORY) as run:
    run.track(model=run.replicate(torch.nn.Linear(1, 1)))
    SAVES and run.snapshot()
    wait()
"""


@pytest.mark.parametrize(
    ("before", "directory", "saves", "expected"),
    [
        (True, "one", True, "before it had begun; nothing was saved"),
        (False, "", False, "at step 0; nothing was saved"),
        (False, "one", False, "at step 0, before the first snapshot in FOLDER/one"),
        (False, "one", True, "at step 0; the same command resumes from FOLDER/one/step-00000000"),
    ],
)
def test_ctrl_c_says_what_is_left_of_a_run(before, directory, saves, expected, tmp_path):
    script = WAITS.replace("BEFORE", str(before)).replace("SAVES", str(saves))
    (tmp_path / "waits.py").write_text(script.replace("DIRECTORY", repr(directory or None)))
    with started("-m", "samestep", "run", "waits.py", folder=tmp_path) as screen:
        screen.until("waits")
        screen.process.send_signal(signal.SIGINT)
        text = screen.read()
    assert screen.process.returncode == cli.EXIT_INTERRUPTED
    where = expected.replace("FOLDER", str(tmp_path))
    assert text.splitlines()[-1] == f"samestep: run was interrupted {where}"


@pytest.mark.long
def test_doctor_begins_with_the_verdict(tmp_path):
    status, text = run_samestep("doctor", folder=tmp_path, colors=True)
    verdict = r"\[32mno problems" if status == 0 else r"\[31m\d+ problems? to fix"
    assert re.match(rf"\033{verdict}\033\[0m\n", text)


FAILS_TWICE = """
import os, signal
import samestep as ss
with ss.init():
    if os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("once more")
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_warnings_and_errors_have_colors_on_a_terminal(tmp_path, is_terminal):
    (tmp_path / "fails.py").write_text(FAILS_TWICE)
    status, text = run_samestep(
        "run", "-n", "1", "fails.py", folder=tmp_path, is_terminal=is_terminal, colors=True
    )
    assert status == 1
    plain = re.sub(r"\033\[\d+m", "", text)
    assert "samestep: worker 0: killed by SIGKILL" in plain
    assert "samestep: error: worker 0 failed" in plain
    assert ("\033[33msamestep:\033[0m worker 0: killed" in text) is is_terminal
    assert ("samestep: \033[31merror:\033[0m worker 0 failed" in text) is is_terminal
    assert (plain != text) is is_terminal


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminals_can_be_without_colors(variables, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    reader, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        before = colored("text", RED, stream)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        after = colored("text", RED, stream)
    os.close(reader)
    assert (before, after) == ("\033[31mtext\033[0m", "text")
    assert colored("text", RED, stream) == colored("text", RED, None) == "text"
