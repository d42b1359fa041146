from __future__ import annotations

import json
import os

import pytest
import torch

from samestep import cli
from samestep.errors import ConfigError, WorkerError
from samestep.launch import local
from samestep.launch.local import run_script
from tests.python import run_python

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


LOSS = """
import samestep, torch

def train(run, model):
    for batch in run.batches(list(range(8)), 4, epochs=1):
        run.backward(lambda model, batch: 3, model, batch)

with samestep.init(lanes=2) as run:
    train(run, run.replicate(torch.nn.Linear(1, 1)))
"""


def test_the_traceback_of_an_error_of_samestep_ends_in_the_script(folder):
    (folder / "loss.py").write_text(LOSS)
    with pytest.raises(WorkerError) as caught:
        run_script(str(folder / "loss.py"), [], 1, {})
    first, _, *frames, last = str(caught.value).splitlines()
    assert first.startswith("worker 0 failed first: LossError: ")
    assert [line.strip() for line in frames if "File" not in line] == [
        "train(run, run.replicate(torch.nn.Linear(1, 1)))",
        "run.backward(lambda model, batch: 3, model, batch)",
    ]
    assert last.startswith("samestep.errors.LossError: ")


def test_an_invalid_option_is_one_line(folder):
    (folder / "option.py").write_text("import samestep\nsamestep.init(lane=2)")
    with pytest.raises(WorkerError) as caught:
        run_script(str(folder / "option.py"), [], 1, {})
    (line,) = str(caught.value).splitlines()
    assert line.endswith("lane is not an option of samestep; did you mean lanes?")


STUCK = """
import time
class Stuck:
    def __del__(self):
        time.sleep(1e6)
"""


def test_a_script_whose_objects_cannot_be_freed_is_ended(folder, capfd):
    (folder / "library.py").write_text(STUCK)
    # without functions of its own, whose names would keep the object
    (folder / "script.py").write_text("import library\nstuck = library.Stuck()")
    run_script(str(folder / "script.py"), [], 1, {"timeout": 0.5})
    assert "worker 0 was killed because its function returned" in capfd.readouterr().err


def test_a_missing_script_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"script .*train\.py' does not exist"):
        run_script(str(tmp_path / "train.py"), [], 2, {})


def test_a_missing_module_is_the_workers_error():
    with pytest.raises(WorkerError, match="No module named"):
        run_script("nowhere.to.be.found", [], 1, {}, as_module=True)


def test_a_script_without_a_run_warns_that_workers_are_alone(folder):
    (folder / "joined.py").write_text("import samestep\nwith samestep.init(): pass")
    (folder / "alone.py").write_text("raise SystemExit(0)")
    for script, count in (("alone.py", 1), ("joined.py", 0)):
        done = run_python("-m", "samestep", "run", "-n", "2", folder / script, check=True)
        warning = "alone.py ended without calling samestep.init, so each of the 2 workers ran all"
        assert done.stderr.count(warning) == count


@pytest.fixture
def counted(monkeypatch):
    """Return what `samestep run` starts on a host with 4 cores and some GPUs."""

    def start(gpus, *flags):
        found = []
        monkeypatch.setattr(local, "count_gpus", lambda: gpus)
        monkeypatch.setattr(local, "usable_cores", lambda: 4)
        monkeypatch.setattr(
            local, "run_script", lambda *given, **_: found.append((given[2], given[3]))
        )
        assert cli.main(["run", *flags, "train.py"]) == 0
        return found[0][0]

    return start


@pytest.mark.parametrize(
    ("gpus", "flags", "workers"),
    [
        (0, [], 1),
        (0, ["-n", "auto"], 4),
        (0, ["-n", "auto", "--threads", "2"], 2),
        (0, ["-n", "auto", "--threads", "8"], 1),
        (0, ["-n", "auto", "--lanes", "3"], 3),
        (8, ["-n", "auto"], 8),
        (8, ["-n", "auto", "--devices", "2"], 4),
        (8, ["-n", "auto", "--device", "cpu"], 4),
        (2, ["--gpus", "2,3"], 2),
        (2, ["--gpus", "2,3", "-n", "4"], 4),
        (2, ["--gpus", "2,3", "-n", "auto", "--mode", "dp"], 1),
    ],
)
def test_workers_are_as_many_as_devices(gpus, flags, workers, counted, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert counted(gpus, *flags) == workers
    expected = "6,7" if "--gpus" in flags else "4,5,6,7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("text", ["4", "1,1", "one", "1,", "0,1"])
def test_gpus_that_do_not_exist_are_an_error(text, counted, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(local, "count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match="--gpus must be different numbers of GPUs of this host"):
        local.choose_gpus(text)


def test_gpus_are_counted_in_another_process(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", os.getppid)
    assert local.count_gpus() == os.getpid()


def test_the_dir_of_a_script_serves_options_before_it(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import samestep as ss, sys\nwith ss.init(dir=sys.argv[1]) as run:\n"
        "    run.print(run.config.remote, run.dir)"
    )
    flags = ["--remote", "memory://one", str(script), str(tmp_path / "run")]
    assert cli.main(["run", *flags]) == 0
    assert f"memory://one {tmp_path / 'run'}" in capfd.readouterr().out


def test_flags_stand_anywhere_among_the_words_of_snapshots(tmp_path, capsys):
    words = ["export", "--object", "ema", str(tmp_path), str(tmp_path / "x.safetensors")]
    assert cli.main(["snapshots", *words]) == 1
    assert "no valid snapshot" in capsys.readouterr().err
