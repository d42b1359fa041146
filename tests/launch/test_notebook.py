from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

DEFINES = """
import multiprocessing, os, signal, threading
import torch
import samestep as ss

def body(number):
    with ss.init(lanes=2) as run:
        total = sum(run.all_gather(run.rank + number))
        print("worker", run.rank, "has", total)
        if number == 13 and run.rank == 1:
            raise ValueError("unlucky")
        return torch.tensor(total)

def press_stop():
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()
"""
FAILS = "ss.launch(body, 13, workers=2)"
IS_STOPPED = "ss.launch(press_stop, workers=2)"
WORKS = """
print("from the notebook")
assert multiprocessing.active_children() == []
ss.launch(body, 20, workers=2)
"""


@pytest.fixture(scope="module")
def executed():
    """Return the cells of a notebook that launches three times, with what they showed."""
    cells = [
        nbformat.v4.new_code_cell(source.strip()) for source in (DEFINES, FAILS, IS_STOPPED, WORKS)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    return NotebookClient(notebook, timeout=300, allow_errors=True).execute().cells


def outputs_of(cell, kind, name=None):
    return [
        output
        for output in cell.outputs
        if output.output_type == kind and name in {None, output.get("name")}
    ]


def lines(cell):
    return "".join(output.text for output in outputs_of(cell, "stream", "stdout")).splitlines()


def test_a_failure_is_shown_with_what_workers_printed(executed):
    [error] = outputs_of(executed[1], "error")
    assert error.ename == "WorkerError"
    assert error.evalue.startswith("worker 1 failed first: ValueError: unlucky")
    assert sorted(lines(executed[1])) == ["[1] worker 1 has 27", "worker 0 has 27"]


@pytest.mark.long
def test_the_stop_button_stops_the_workers(executed):
    [error] = outputs_of(executed[2], "error")
    assert error.ename == "KeyboardInterrupt"


def test_a_launch_after_others_prints_and_returns_its_result(executed):
    first, *others = lines(executed[3])
    assert first == "from the notebook"
    assert sorted(others) == ["[1] worker 1 has 41", "worker 0 has 41"]
    [result] = outputs_of(executed[3], "execute_result")
    assert result.data["text/plain"] == "tensor(41)"
    log = "".join(output.text for output in outputs_of(executed[3], "stream", "stderr"))
    assert [line.split()[0] for line in log.splitlines()] == ["samestep:"] * 2
