"""`samestep submit slurm` writes a script that Slurm accepts, and its job resumes when stopped."""

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
from samestep.config import merge
from tests.jobs import events, image_job, left_by, left_in
from tests.slurm import slurm
from tests.workers import free_port

ROOT = Path(__file__).parents[2]
SOON_SECONDS = 240.0  # a busy machine starts Python slowly
# When it runs for the first time, the job waits in step 2 until the signal arrives.
TRAIN = """
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import samestep
from tests.jobs import image_job

def wait_for_signal(step):
    if step == 2 and "SLURM_RESTART_COUNT" not in os.environ:
        (pathlib.Path(sys.argv[1]) / f"ready-{{os.environ['SLURM_PROCID']}}").touch()
        while not signal.getsignal(signal.SIGTERM).__self__.signal:
            time.sleep(0.01)

with samestep.init() as run:
    image_job(run, hook=wait_for_signal, loader_workers=1)
"""


@pytest.fixture
def script(capsys, tmp_path):
    """Return a function that returns the script."""

    def write(*arguments):
        command = ["submit", "slurm", "--dir", str(tmp_path / "run"), "--output", "-", *arguments]
        assert main([*command, "train.py"]) == 0
        return capsys.readouterr().out

    return write


def directives(text):
    return [
        shlex.split(line.removeprefix("#SBATCH "))[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    ]


def test_the_script_has_all_options(script, tmp_path):
    text = script(*("--nodes", "2", "-n", "4", "--grace-period", "90.5", "--lanes", "8"))
    assert directives(text) == [
        "--nodes=2",
        "--ntasks-per-node=4",
        "--open-mode=append",
        "--signal=TERM@91",
        "--requeue",
    ]
    assert set(text.splitlines()) >= {
        "export SAMESTEP_LANES=8",
        "export SAMESTEP_GRACE_PERIOD=90.5",
        f"export SAMESTEP_DIR={shlex.quote(f'{tmp_path}/run')}",
    }


def test_the_default_options_are_accepted_by_samestep_init(script):
    exports = [line.removeprefix("export ") for line in script().splitlines() if "=" in line]
    variables = dict(line.split("=", 1) for line in exports if line.startswith("SAMESTEP_"))
    assert merge({}, variables).grace_period == 120


@pytest.mark.parametrize("argument", ["b $c", "it's", 'a "b"', "--x=#1", "a\nb", "`id`"])
def test_arguments_and_directories_arrive_as_they_are(argument, tmp_path, capsys):
    directory = tmp_path / argument.replace("\n", "%")
    command = ["submit", "slurm", "--dir", str(directory), "--output", "-"]
    assert main([*command, "-m", "show", argument]) == 0
    text = capsys.readouterr().out
    stand_ins = 'srun() { shift 2; printf \'%s\\0\' "$SAMESTEP_DIR" "$@"; }\n'
    completed = subprocess.run(
        ["bash", "-c", stand_ins + text], capture_output=True, text=True, check=True
    )
    expected = [str(directory), sys.executable, "-m", "show", argument, ""]
    assert completed.stdout.split("\0") == expected


def test_workers_get_the_cpus_that_sbatch_was_asked_for(script):
    stand_ins = 'srun() { echo "${SRUN_CPUS_PER_TASK:-all}"; }\n'
    for asked, given in ({}, "all"), ({"SLURM_CPUS_PER_TASK": "6"}, "6"):
        command = ["bash", "-c", stand_ins + script()]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=asked)
        assert done.stdout == f"{given}\n"


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, ""), (1, 0, ""), (137, 0, ""), (143, 0, "requeue 7\n"), (143, 1, "requeue 7\n")],
)
def test_only_a_job_that_was_stopped_with_a_snapshot_is_requeued(
    status, restarts, requeued, script
):
    stand_ins = (
        f'srun() {{ echo "resume: $SAMESTEP_RESUME"; return {status}; }}\n'
        'scontrol() { echo "$@"; }\n'
    )
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
        (["--grace-period", "0"], "must be above 0 and at most 65535 seconds, got 0"),
        (["--grace-period", "70000"], "must be above 0 and at most 65535 seconds, got 70000"),
        (["--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["-n", "0"], "--workers must be at least 1, got 0"),
        (["--lanes", "many"], "--lanes"),
        (["--output", "/no/such/folder"], "cannot write --output /no/such/folder"),
    ],
)
def test_values_that_make_no_job_are_reported(arguments, words, capsys, tmp_path):
    command = ["submit", "slurm", "--dir", str(tmp_path), "--output", "-", *arguments]
    assert main([*command, "train.py"]) == 2
    assert words in capsys.readouterr().err


def test_a_job_without_a_directory_is_refused(capsys):
    assert main(["submit", "slurm", "--output", "-", "train.py"]) == 2
    assert "--dir is required" in capsys.readouterr().err


def eventually(poll, explain):
    """Return the result of `poll` as soon as it is true."""
    deadline = time.monotonic() + SOON_SECONDS
    while not (result := poll()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)  # each look starts a program of Slurm
    return result


class Cluster:
    """A real Slurm cluster with one test's jobs."""

    def __init__(self, started):
        self.run = started.run

    def submit(self, *arguments, sbatch=()):
        # Slurm's default port is the same for the first job of a test that runs at the same time
        port = str(free_port())
        assert main(["submit", "slurm", *map(str, arguments)]) == 0
        file = arguments[arguments.index("--output") + 1]
        return self.run("sbatch", "--parsable", *sbatch, file, MASTER_PORT=port).stdout.strip()

    def show(self, job):
        return self.run("scontrol", "show", "job", job).stdout

    def ends(self, job, state):
        """Wait until a job is in a state, and return how often it was restarted."""
        match = eventually(
            lambda: re.search(rf"(?s)JobState={state} .*Restarts=(\d+)", self.show(job)),
            lambda: self.explain(job),
        )
        return int(match[1])

    def start_again(self, job):
        """Start a requeued job, which Slurm would do after two minutes.

        It must not start in the same second in which its credential was revoked.
        """
        self.run("scontrol", "update", f"job={job}", "StartTime=now+2")

    def explain(self, job):
        """Return the state and the output of a job that failed a test."""
        state = self.show(job)
        output = Path(re.search("StdOut=(.*)", state)[1])
        return state + (output.read_text() if output.exists() else "no output")


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory() as directory, slurm(Path(directory)) as started:
        yield Cluster(started)


def test_a_preempted_job_snapshots_requeues_resumes_and_has_the_same_bits(cluster, tmp_path):
    train = tmp_path / "train it.py"
    train.write_text(TRAIN.format(root=str(ROOT)))
    directory = tmp_path / "a run"
    output = f"--output={tmp_path}/%j.out"
    options = ["--nodes", "2", "--lanes", "8", "--snapshot-every", "none"]
    options += ["--dir", directory, "--output", tmp_path / "a job.sh"]
    job = cluster.submit(*options, train, tmp_path, sbatch=[output, "--cpus-per-task=2"])
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit(3)")

    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, lambda: cluster.explain(job))
    cluster.run("scancel", "--signal=TERM", job)
    assert cluster.ends(job, "PENDING") == 1
    assert [event["signal"] for event in events(directory, "stopped")] == [15]
    cluster.start_again(job)
    options = ["--dir", tmp_path / "failing", "--output", tmp_path / "failing.sh"]
    assert cluster.ends(cluster.submit(*options, failing, sbatch=[output]), "FAILED") == 0
    assert cluster.ends(job, "COMPLETED") == 1

    assert [
        len(event["workers"])
        for event in events(directory)
        if event["event"] in {"started", "resumed"}
    ] == [2, 2]
    assert left_in(image_job, directory) == undisturbed
