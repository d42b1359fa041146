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


def run_cells(*sources):
    """Return the cells of a notebook, with what they showed."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
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


def test_a_failure_is_shown_with_what_workers_printed_and_a_later_launch_returns_its_result():
    _, failed, worked = run_cells(DEFINES, FAILS, WORKS)
    [error] = outputs_of(failed, "error")
    assert error.ename == "WorkerError"
    assert error.evalue.startswith("worker 1 failed first: ValueError: unlucky")
    assert sorted(lines(failed)) == ["[1] worker 1 has 27", "worker 0 has 27"]

    first, *others = lines(worked)
    assert first == "from the notebook"
    assert sorted(others) == ["[1] worker 1 has 41", "worker 0 has 41"]
    [result] = outputs_of(worked, "execute_result")
    assert result.data["text/plain"] == "tensor(41)"
    log = "".join(output.text for output in outputs_of(worked, "stream", "stderr"))
    assert [line.split()[0] for line in log.splitlines()] == ["samestep:"] * 2


@pytest.mark.long
def test_the_stop_button_stops_the_workers_and_a_later_launch_works():
    _, stopped, worked = run_cells(DEFINES, IS_STOPPED, WORKS)
    [error] = outputs_of(stopped, "error")
    assert error.ename == "KeyboardInterrupt"
    assert lines(worked)[0] == "from the notebook"
