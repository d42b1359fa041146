"""`samestep submit slurm` writes a script that Slurm takes, and whose job goes on after it was stopped."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from samestep.cli import main
from tests.jobs import events, image_job, left_by, left_in
from tests.slurm import slurm
from tests.workers import free_port

ROOT = Path(__file__).parents[2]
SOON_SECONDS = 45.0
# In its first life the job stands still in step 2 until the signal is there.
TRAIN = """
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import samestep
from tests.jobs import image_job

def wait_for_signal(step):
    if step == 2 and "SLURM_RESTART_COUNT" not in os.environ:
        (pathlib.Path(sys.argv[1]) / f"ready-{{os.environ['SLURM_PROCID']}}").touch()
        while not signal.getsignal(signal.SIGTERM).__self__.received:
            time.sleep(0.01)

with samestep.init() as run:
    image_job(run, hook=wait_for_signal, loader_workers=1)
"""


@pytest.fixture
def script(capsys, tmp_path):
    """Return a function that returns the script that would be submitted."""

    def write(*arguments):
        assert (
            main(
                [
                    "submit",
                    "slurm",
                    "--dir",
                    str(tmp_path / "run"),
                    *arguments,
                    "--dry-run",
                    "train.py",
                ]
            )
            == 0
        )
        return capsys.readouterr().out

    return write


def directives(text):
    return [
        shlex.split(line.removeprefix("#SBATCH "))[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    ]


def test_what_is_asked_for_is_in_the_script(script, tmp_path):
    text = script(
        *(
            "--nodes",
            "2",
            "-n",
            "4",
            "--gpus",
            "a100:4",
            "--cpus",
            "6",
            "--memory",
            "64G",
            "--time",
            "1-12:00:00",
            "--partition",
            "long",
        ),
        *(
            "--account",
            "me",
            "--name",
            "my job",
            "--grace-period",
            "90.5",
            "--sbatch=--qos=high",
            "--lanes",
            "8",
            "--setup",
            "module load python",
        ),
    )
    assert set(directives(text)) == {
        "--job-name=my job",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=6",
        "--gpus-per-node=a100:4",
        "--mem=64G",
        "--time=1-12:00:00",
        "--partition=long",
        "--account=me",
        f"--chdir={Path.cwd()}",
        f"--output={tmp_path}/run/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=TERM@91",
        "--qos=high",
    }
    lines = text.splitlines()
    started = lines.index("srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task=6 python train.py")
    assert set(lines[:started]) >= {
        "module load python",
        "export SAMESTEP_LANES=8",
        "export SAMESTEP_GRACE_PERIOD=90.5",
        f"export SAMESTEP_DIR={tmp_path}/run",
    }


def test_without_setup_workers_have_the_python_that_submits(script):
    assert shlex.join([sys.executable, "train.py"]) in script()


@pytest.mark.parametrize("argument", ["b $c", "it's", 'a "b"', "--x=#1", "a\nb", "`id`"])
def test_arguments_and_directories_arrive_as_they_are(argument, tmp_path, capsys):
    directory = tmp_path / argument.replace("\n", "%")
    assert (
        main(
            [
                "submit",
                "slurm",
                "--dir",
                str(directory),
                "--dry-run",
                "--setup",
                "true",
                "-m",
                "show",
                argument,
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert f"--output={directory}/slurm-%j.out".replace(
        str(directory), str(directory).replace("%", "%%")
    ) in directives(text)
    stand_ins = 'srun() { shift 2; printf \'%s\\0\' "$SAMESTEP_DIR" "$@"; }\n'
    shown = subprocess.run(
        ["bash", "-c", stand_ins + text], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split("\0") == [str(directory), "python", "-m", "show", argument, ""]


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, ""), (1, 0, ""), (137, 0, ""), (143, 0, "requeue 7\n"), (143, 1, "requeue 7\n")],
)
def test_only_a_job_that_was_stopped_with_a_snapshot_is_requeued(
    status, restarts, requeued, script
):
    stand_ins = f'srun() {{ echo "resume: $SAMESTEP_RESUME"; return {status}; }}\nscontrol() {{ echo "$@"; }}\n'
    environment = {
        "SLURM_JOB_ID": "7",
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }
    done = subprocess.run(
        ["bash", "-c", stand_ins + script("--resume", "never")],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == status
    assert done.stdout == f"resume: {'auto' if restarts else 'never'}\n{requeued}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--time", "soon"],
            "--time 'soon' was given; expected minutes, or a time such as 8:00:00",
        ),
        (["--memory", "64Gi"], "--memory '64Gi' was given; expected a size such as 64G"),
        (["--gpus", "all"], "--gpus 'all' was given; expected a number"),
        (
            ["--grace-period", "0"],
            "--grace-period 0 was given; expected seconds above 0 and at most 65535",
        ),
        (
            ["--grace-period", "70000"],
            "--grace-period 70000 was given; expected seconds above 0 and at most 65535",
        ),
        (["--dir", f"{__file__}/run"], "/run was given, and cannot be made"),
        (["--nodes", "0"], "--nodes 0 was given; expected at least 1"),
        (["-n", "0"], "--workers 0 was given; expected at least 1"),
        (["--name", "a\n#SBATCH --nodes=9"], "expected no backslash, line break"),
        (["--partition", "a\\"], "expected no backslash, line break"),
        (["--lanes", "many"], "--lanes='many' was given"),
        (
            ["--output", "/no/such/folder"],
            "--output /no/such/folder was given, and cannot be written",
        ),
    ],
)
def test_what_slurm_would_not_take_is_told(arguments, words, capsys, tmp_path):
    assert main(["submit", "slurm", "--dir", str(tmp_path), *arguments, "train.py"]) == 2
    assert words in capsys.readouterr().err


def test_a_script_can_be_written_for_later(tmp_path, script):
    file = tmp_path / "job.sh"
    assert (
        main(["submit", "slurm", "--dir", str(tmp_path / "run"), "--output", str(file), "train.py"])
        == 0
    )
    assert file.read_text() == script()
    assert (tmp_path / "run").is_dir()


def test_a_job_without_a_directory_is_refused(capsys):
    assert main(["submit", "slurm", "train.py"]) == 2
    assert "no --dir was given; expected a directory that all nodes see" in capsys.readouterr().err


def test_without_slurm_the_way_out_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "slurm", "--dir", str(tmp_path), "train.py"]) == 1
    assert "sbatch was not found" in capsys.readouterr().err


def eventually(look, explain):
    """Return what `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + SOON_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
    return found


class Cluster:
    """A real Slurm, and what is asked of it about a job."""

    def __init__(self, started):
        self.run = started.run

    def submit(self, *arguments):
        # the first job's own is that of the first job of a test that runs beside this one
        port = str(free_port())
        job = self.run(
            sys.executable, "-m", "samestep", "submit", "slurm", *arguments, MASTER_PORT=port
        ).stdout
        assert re.fullmatch(r"\d+\n", job)
        return job.strip()

    def show(self, job):
        return self.run("scontrol", "show", "job", job).stdout

    def ends(self, job, state):
        """Return how often a job was restarted, once it is in a state."""
        found = eventually(
            lambda: re.search(rf"(?s)JobState={state} .*Restarts=(\d+)", self.show(job)),
            lambda: self.explain(job),
        )
        return int(found[1])

    def start_again(self, job):
        """Start a requeued job, which Slurm does after two minutes: soon, but not in the second in which its credential was revoked."""
        self.run("scontrol", "update", f"job={job}", "StartTime=now+2")

    def explain(self, job):
        """Return all there is to know about a job that is not as it should be."""
        shown = self.show(job)
        output = Path(re.search("StdOut=(.*)", shown)[1])
        return shown + (output.read_text() if output.exists() else "no output")


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory() as directory, slurm(Path(directory)) as started:
        yield Cluster(started)


def test_a_preempted_job_snapshots_requeues_resumes_and_has_the_same_bits(cluster, tmp_path):
    train = tmp_path / "train it.py"
    train.write_text(TRAIN.format(root=str(ROOT)))
    directory = tmp_path / "a run"
    job = cluster.submit(
        "--nodes",
        "2",
        "--lanes",
        "8",
        "--snapshot-every",
        "none",
        "--name",
        "a job",
        "--dir",
        directory,
        train,
        tmp_path,
    )
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit(3)")

    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, lambda: cluster.explain(job))
    cluster.run("scancel", "--signal=TERM", job)
    assert cluster.ends(job, "PENDING") == 1
    assert [event["signal"] for event in events(directory, "stopped")] == [15]
    cluster.start_again(job)
    assert cluster.ends(cluster.submit("--dir", tmp_path / "failing", failing), "FAILED") == 0
    assert cluster.ends(job, "COMPLETED") == 1

    assert [
        len(event["workers"])
        for event in events(directory)
        if event["event"] in {"started", "resumed"}
    ] == [2, 2]
    assert left_in(image_job, directory) == undisturbed
