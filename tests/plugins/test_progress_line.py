"""The line with the progress of a loop, on a real terminal and in its parts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from samestep.plugin import EndedStep
from samestep.plugins import progress_line
from samestep.plugins.progress_line import ProgressLine
from tests.terminal import shown, started

# It trains until the test creates files: `print` to print, `stop` to end the loop.
SCRIPT = """
import logging
import os
import sys
import time
from pathlib import Path

import samestep, torch

def loss(model, batch):
    return model(batch.float()[:, None]).square().mean()

def wanted(run, name):  # on all workers
    return run.all_gather(Path(name).exists())[0]

handler = logging.StreamHandler()  # it has the stream from before the run
with samestep.init(lanes=2) as run:
    model = run.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in run.batches(list(range(8)), 4, epochs=100000):
        run.backward(loss, model, batch)
        optimizer.step()
        time.sleep(0.01)
        if wanted(run, "print"):
            run.barrier("removing the file")
            if run.is_main:
                print("one line")
                sys.stderr.write("and another\\n")
                handler.emit(logging.makeLogRecord({"msg": "a record"}))
                os.remove("print")
            run.barrier("going on")
        if wanted(run, "stop"):
            break
    run.evaluate(lambda model, batch: {"mean": batch.float().mean()}, model, list(range(8)), 4)
    run.print("the end")
"""
PRINTED = ["one line", "and another", "a record"]
LINE = r"epoch [\d,]+/100,000  step [\d,]+/200,000  loss [\d.e-]+  .* samples/s  [\d:]+ left"


@pytest.mark.parametrize("launcher", [(), ("-m", "samestep", "run", "-n", "2")])
def test_a_loop_shows_one_line_that_mixes_with_no_output(launcher, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with started(*launcher, "train.py", folder=tmp_path) as screen:
        screen.until("samples/s")
        (tmp_path / "print").touch()
        screen.until("a record")
        screen.until("samples/s")  # it is there again
        (tmp_path / "stop").touch()
        lines, removed = shown(screen.read())
    assert screen.process.returncode == 0
    first, *printed, last = lines
    assert first.startswith("samestep: ")
    assert last.startswith("samestep: finished after ")
    assert printed == [*PRINTED, "the end"]
    assert any(re.fullmatch(LINE, line) for line in removed), removed
    assert all(line.startswith("epoch ") and len(line) < 100 for line in removed)


@pytest.mark.parametrize(
    ("is_terminal", "variables"),
    [(True, {"SAMESTEP_PROGRESS": "false"}), (True, {"TERM": "dumb"}), (False, {})],
)
def test_a_pipe_a_terminal_without_rows_and_an_option_show_no_line(
    is_terminal, variables, tmp_path, monkeypatch
):
    script = SCRIPT.replace("epochs=100000", "epochs=5").replace("import samestep, torch", HURRY)
    (tmp_path / "train.py").write_text(script)
    with started("train.py", folder=tmp_path, is_terminal=is_terminal, **variables) as screen:
        text = screen.read()
    assert "\r" not in text
    assert "\033" not in text
    assert text.splitlines()[1:] == ["the end", "samestep: finished after 10 steps"]


# where a line may be drawn, it is drawn at once
HURRY = """
import samestep, torch
import samestep.terminal
from samestep.plugins import progress_line
samestep.terminal.QUIET_SECONDS = progress_line.SECONDS = 0
"""


def test_in_a_hurry_each_step_shows_its_line(tmp_path):
    script = SCRIPT.replace("epochs=100000", "epochs=5").replace("import samestep, torch", HURRY)
    (tmp_path / "train.py").write_text(script)
    with started("train.py", folder=tmp_path) as screen:
        lines, removed = shown(screen.read())
    assert lines[1:] == ["the end", "samestep: finished after 10 steps"]
    assert ["  ".join(line.split("  ")[:2]) for line in removed[:10]] == [
        f"epoch {step // 2 + 1}/5  step {step + 1}/10" for step in range(10)
    ]
    assert removed[-1].endswith("  evaluating")


def test_an_error_leaves_no_line(tmp_path):
    script = SCRIPT.replace("import samestep, torch", HURRY).replace("time.sleep(0.01)", "1 / 0")
    (tmp_path / "train.py").write_text(script.replace("1 / 0", "run.step == 3 and 1 / 0"))
    with started("train.py", folder=tmp_path) as screen:
        lines, removed = shown(screen.read())
    assert lines[1] == "Traceback (most recent call last):"
    assert len(removed) == 3


@pytest.fixture
def loops(monkeypatch):
    """A line with a clock that the test sets, and the texts that it showed."""
    now, texts = [0.0], []
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    line = ProgressLine(lambda text, step: texts.append(text), stop_after=None)
    return SimpleNamespace(line=line, now=now, texts=texts)


def planned(**fields):
    return {"steps": 40, "epochs": 4, "steps_per_epoch": 10, "ends_with_epoch": False, **fields}


def batch_of(samples, epoch):
    return SimpleNamespace(counts=None if samples is None else [samples], epoch=epoch)


def take(loops, step, name="train", seconds=1.0, epoch=None, samples=8, losses=(0.25,)):
    loops.now[0] += seconds
    for loss in losses:
        loops.line.add({"loss": loss})
    epoch = (step - 1) // 10 if epoch is None else epoch
    loops.line.end_step(EndedStep(step, name, step, batch_of(samples, epoch)))


def test_evaluations_count_for_the_time_left_but_not_for_the_speed(loops):
    loops.line.begin_loop("train", planned())
    take(loops, 1, seconds=100)  # it compiles
    assert loops.texts == ["epoch 1/4  step 1/40  loss 0.25"]
    for step in range(2, 11):
        take(loops, step)
    assert loops.texts[-1] == "epoch 1/4  step 10/40  loss 0.25  8 samples/s  0:30 left"
    loops.now[0] += 9
    loops.line.evaluating()
    loops.line.evaluating(9.0)
    assert loops.texts[-1].endswith("0:30 left  evaluating")
    take(loops, 11)
    # 19 seconds for 10 steps, and 29 more steps
    assert loops.texts[-1] == "epoch 2/4  step 11/40  loss 0.25  8 samples/s  0:55 left"


def test_steps_within_a_moment_are_not_shown_but_counted(loops):
    loops.line.begin_loop("train", planned())
    for step in range(1, 21):
        take(loops, step, seconds=progress_line.SECONDS / 4)
    assert len(loops.texts) == 5
    assert "step 17/40" in loops.texts[-1]
    assert "  128 samples/s  " in loops.texts[-1]


@pytest.mark.parametrize(
    ("name", "fields", "step", "expected"),
    [
        ("warmup", {"epochs": 1}, 5, "warmup  step 5/40"),
        ("train", {"epochs": None}, 25, "epoch 3  step 25/40"),
        # a loop of one epoch in a loop of the script: its `steps` is the number of its last step
        ("train", {"epochs": None, "steps": 30, "ends_with_epoch": True}, 25, "epoch 3  step 5/10"),
        ("streams", {"epochs": None, "steps": None, "steps_per_epoch": None}, 7, "streams  step 7"),
    ],
)
def test_the_position_is_that_of_the_loop(name, fields, step, expected, loops):
    loops.line.begin_loop(name, planned(**fields))
    take(loops, step, name=name)
    assert loops.texts == [f"{expected}  loss 0.25"]


def test_streams_show_steps_and_a_step_of_several_losses_shows_them(loops):
    loops.line.begin_loop("play", planned(steps=None, epochs=None, steps_per_epoch=None))
    for step in range(1, 4):
        take(loops, step, name="play", samples=None, seconds=0.5, losses=(1.5, 1e-5, 3, 4))
    assert loops.texts[-1] == "play  step 3  loss 1.5 1e-05 3  2 steps/s"


def test_the_time_left_ends_with_the_epoch_or_where_the_run_stops(loops):
    loops.line.begin_loop("train", planned(epochs=None, steps=10, ends_with_epoch=True))
    for step in range(1, 5):
        take(loops, step, seconds=1200)
    assert loops.texts[-1].endswith("  2:00:00 left in epoch")
    texts = []
    line = ProgressLine(lambda text, step: texts.append(text), stop_after=6)
    line.begin_loop("train", planned())
    for step in range(1, 7):
        loops.now[0] += 1
        line.end_step(EndedStep(step, "train", step, batch_of(8, 0)))
    assert texts[-2].endswith("  0:01 left")
    assert texts[-1].endswith(" samples/s")
