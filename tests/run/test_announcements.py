"""The lines that a run writes to stderr when it starts, resumes, stops and finishes."""

from __future__ import annotations

import logging
import os

import pytest
import torch

import samestep as ss
from tests.jobs import classify, images
from tests.python import run_python


def train(**options):
    with ss.init(lanes=2, **options) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(16), 4, epochs=1):
            run.backward(classify, model, batch)
            optimizer.step()


def lines(workers, *flags, **variables):
    command = ("-m", "samestep", "run", "-n", workers, *flags)
    done = run_python(
        *(*command, "-m", "tests.run.test_announcements"),
        check=True,
        env={**os.environ, **variables},
    )
    return done.stderr.splitlines()


def test_a_run_says_where_it_stands_on_stderr(tmp_path):
    folder = tmp_path / "one"
    where = f"{folder} (watch: samestep watch {folder})"
    assert lines(2, "--dir", str(folder), "--stop-after", "3") == [
        f"samestep: 2 workers, 2 lanes, {where}",
        "samestep: stopped at step 3, snapshot saved; run the same command to resume",
    ]
    assert lines(1, "--dir", str(folder)) == [
        f"samestep: resumed at step 3, 1 worker (was 2), 2 lanes, {where}",
        "samestep: finished after 4 steps",
    ]
    assert lines(1, "--dir", str(folder))[1:] == [
        f"samestep: nothing left to do: the run in {folder} already finished at step 4"
    ]
    assert lines(1, "--dir", str(folder), "--read-only", "true") == [
        f"samestep: resumed at step 4, 1 worker, 2 lanes; reads {folder}, and saves nothing",
        "samestep: finished; nothing was saved",
    ]


def test_a_run_without_a_directory_says_what_is_lost():
    assert lines(1, "--stop-after", "1") == [
        "samestep: 1 worker, 2 lanes; without a directory (--dir), nothing is saved",
        "samestep: stopped at step 1; nothing was saved",
    ]


def test_scripts_that_set_up_logging_get_log_records(caplog):
    with caplog.at_level(logging.INFO, "samestep"):
        train()
    assert [record.message for record in caplog.records][1:] == ["finished after 4 steps"]


@pytest.mark.parametrize("level", ["", "INFO", "WARNING", "ERROR"])
def test_a_script_or_library_that_only_logs_warnings_hides_nothing(level):
    """A level of the logger itself is a wish to see less."""
    name = {"": "samestep: ", "INFO": "INFO:samestep:"}.get(level)
    end = [f"{name}finished after 4 steps"] if name else []
    printed = lines(1, LOGGER_LEVEL=level, LOGS="1")
    assert printed[1:] == end, printed


if __name__ == "__main__":
    if os.environ.get("LOGS"):
        logging.basicConfig()
        logging.getLogger("samestep").setLevel(os.environ["LOGGER_LEVEL"] or logging.NOTSET)
    train()
