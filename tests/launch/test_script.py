from __future__ import annotations

import json
import os

import pytest
import torch

from samestep import cli
from samestep.errors import ConfigError, WorkerError
from samestep.launch import local
from samestep.launch.local import run_script
from tests.faults import full_disk
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


def samestep_run(*words, **options):
    """Run a command; return its status and the lines of its stderr."""
    done = run_python("-m", "samestep", "run", *words, **options)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("end", "is_told"),
    [("0", True), ("None", True), ("3", False), ("'batch_sise: unknown'", False)],
)
def test_a_script_that_succeeds_without_a_run_warns_that_workers_are_alone(end, is_told, folder):
    (folder / "alone.py").write_text(f"raise SystemExit({end})")
    _, lines = samestep_run("-n", "2", folder / "alone.py")
    warning = "alone.py ended without calling samestep.init, so each of the 2 workers ran all"
    assert any(warning in line for line in lines) is is_told


def test_a_script_that_joins_a_run_gets_no_warning(folder):
    (folder / "joined.py").write_text("import samestep\nwith samestep.init(): pass")
    status, lines = samestep_run("-n", "2", folder / "joined.py")
    assert status == 0
    assert not any("without calling samestep.init" in line for line in lines)


JOINS = "import samestep, sys\n{}\nwith samestep.init(lanes=2): pass"


@pytest.mark.parametrize(
    ("before", "after", "late"),
    [
        ([], ["-n", "2"], "-n 2"),
        ([], ["-n2"], "-n2"),
        ([], ["--lanes=4", "data", "--keep-last", "3"], "--lanes=4 --keep-last 3"),
        (["-n", "2"], ["-n", "3"], ""),
        ([], ["x", "--", "-n", "2"], ""),
        ([], ["--epochs", "3", "-x", "-m", "--help"], ""),
        ([], ["--dir", "my runs", "--seed", "-1"], "--dir 'my runs' --seed"),
    ],
)
def test_options_that_came_too_late_are_named(before, after, late, folder):
    script = folder / "train.py"
    script.write_text(JOINS.format(""))
    status, lines = samestep_run(*before, script, *after)
    assert status == 0
    expected = f"{late} came after {script}, which gets all arguments after it; write options"
    assert any(expected in line for line in lines) is bool(late)


@pytest.mark.parametrize(
    "read",
    [
        "'-n' in sys.argv",
        "words = sys.argv[1:]",
        "sys.argv[-2]",
        "[*sys.argv]",
        "",
        "len(sys.argv) > 1 and sys.argv[1]",
        "[sys.argv[0], *sys.argv[:2]]",
    ],
)
def test_a_script_that_reads_its_arguments_knows_them(read, folder):
    script = folder / "train.py"
    script.write_text(JOINS.format(read))
    _, lines = samestep_run(script, "0.1", "-n", "2")
    reads_others = read == "" or "[0]" in read or "[1]" in read
    assert any("came after" in line for line in lines) is reads_others


def test_the_arguments_are_a_plain_list_wherever_they_are_copied(folder):
    script = folder / "train.py"
    read = "import pickle; print(type(pickle.loads(pickle.dumps(sys.argv))).__name__)"
    for words, kind in ((["x"], "list"), (["-n", "2"], "ScriptArguments")):
        script.write_text(JOINS.format(f"{read}; print(type(sys.argv).__name__)"))
        done = run_python("-m", "samestep", "run", script, *words, check=True)
        assert done.stdout.split() == ["list", kind]


def test_a_script_that_refuses_a_late_option_gets_advice():
    recipe = "recipes/vit/train.py"
    status, lines = samestep_run(recipe, "--dir", "runs/x", "epochs=1", "--keep-last", "3")
    assert status == 2
    assert lines[-3].endswith("error: unrecognized arguments: --keep-last 3")
    assert lines[-1].startswith(f"--keep-last 3 came after {recipe}, which gets all arguments")


def test_an_option_that_the_run_refuses_is_wrong_use(folder):
    (folder / "train.py").write_text(JOINS.format(""))
    status, (line,) = samestep_run("-n", "3", folder / "train.py")
    assert status == ConfigError.status
    assert "ConfigError: lanes must be at least the number of workers (3), got 2" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_directory_that_cannot_be_written_is_one_line(workers, folder):
    (folder / "train.py").write_text(JOINS.format(""))
    with full_disk(1) as disk:
        (disk / "run").mkdir()
        (disk / "large").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
        for place, reason in (
            ("/proc/run", "No such file or directory; choose a writable directory"),
            (disk / "run", "No space left on device; free some space there"),
        ):
            command = ("-n", workers, "--dir", place, folder / "train.py")
            status, (line,) = samestep_run(*command)
            assert status == 1
            assert line.endswith(f"RecordError: cannot write a record to {place}: {reason}")


LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module("samestep", run_name="__main__")
"""


@pytest.mark.parametrize("limit", [1 << 10, 1 << 16, 1 << 21])
def test_a_limit_of_files_is_named_with_what_is_needed(limit, folder):
    (folder / "train.py").write_text(JOINS.format(""))
    (folder / "limited.py").write_text(LIMITED)
    done = run_python(folder / "limited.py", limit, "run", "-n", "2", folder / "train.py")
    (line,) = done.stderr.splitlines()
    assert done.returncode == ConfigError.status
    assert f"files may have {limit} bytes (ulimit -f)" in line


@pytest.fixture
def counted(monkeypatch):
    """Return what `samestep run` starts on a host with 4 cores and some GPUs."""

    def start(gpus, *flags):
        calls = []
        monkeypatch.setattr(local, "count_gpus", lambda: gpus)
        monkeypatch.setattr(local, "usable_cores", lambda: 4)
        monkeypatch.setattr(
            local, "run_script", lambda *arguments, **_: calls.append((arguments[2], arguments[3]))
        )
        assert cli.main(["run", *flags, "train.py"]) == 0
        return calls[0][0]

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
def test_gpus_that_do_not_exist_are_an_error(text, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(local, "count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"GPUs of this host, 0 to 0, got .* with CUDA"):
        local.choose_gpus(text)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


@pytest.mark.parametrize("devices", [None, "3"])
def test_gpus_of_a_host_that_has_none_are_an_error(devices, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices or "")
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(local, "count_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=r"--gpus 0,1 needs GPUs, .* leave out"):
        local.choose_gpus("0,1")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == devices


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
