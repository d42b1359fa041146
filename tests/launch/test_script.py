from __future__ import annotations

import json

import pytest

from samestep.errors import ConfigError, WorkerError
from samestep.launch.local import run_script

WRITE = """
import json, os, pathlib, sys
import neighbour
facts = [__name__, sys.argv, sys.path[0], neighbour.NAME, os.environ["SAMESTEP_LANES"]]
pathlib.Path(os.environ["HOME"], "facts-" + os.environ["RANK"]).write_text(json.dumps(facts))
"""
FAIL = """
import os
def step():
    raise KeyError("lost")
print("worker", os.environ["RANK"])
if os.environ["RANK"] == "1":
    step()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'")
    (tmp_path / "write.py").write_text(WRITE)
    (tmp_path / "fail.py").write_text(FAIL)
    return tmp_path


def facts(folder):
    return [json.loads((folder / f"facts-{rank}").read_text()) for rank in range(2)]


def test_a_script_is_run_as_python_runs_it(folder):
    script = str(folder / "write.py")
    run_script(script, ["--lanes", "3", "-x"], 2, {"lanes": 4})
    assert facts(folder) == 2 * [
        ["__main__", [script, "--lanes", "3", "-x"], str(folder), "next door", "4"]
    ]


def test_a_module_is_run_as_python_runs_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run_script("write", ["-x"], 2, {"lanes": 4}, as_module=True)
    assert facts(folder) == 2 * [
        ["__main__", [str(folder / "write.py"), "-x"], str(folder), "next door", "4"]
    ]


def test_a_traceback_starts_in_the_script_and_workers_print_none(folder, capfd):
    with pytest.raises(WorkerError) as caught:
        run_script(str(folder / "fail.py"), [], 2, {})
    assert str(caught.value).splitlines() == [
        "worker 1 failed first: KeyError: 'lost'",
        "Traceback (most recent call last):",
        f'  File "{folder / "fail.py"}", line 7, in <module>',
        "    step()",
        f'  File "{folder / "fail.py"}", line 4, in step',
        '    raise KeyError("lost")',
        "KeyError: 'lost'",
    ]
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["[1] worker 1", "worker 0"]
    assert printed.err == ""


def test_a_missing_script_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"script .*train\.py' does not exist"):
        run_script(str(tmp_path / "train.py"), [], 2, {})


def test_a_missing_module_is_the_workers_error():
    with pytest.raises(WorkerError, match="No module named"):
        run_script("nowhere.to.be.found", [], 1, {}, as_module=True)
