"""The programs of docs/guides.md: the same bits under each tool, and after a kill or a requeue."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import samestep as ss
from samestep.record import read_history
from tests.docs.blocks import ROOT, blocks_of
from tests.jobs import fingerprint
from tests.slurm import slurm

BLOCKS = {block.test: block.text for block in blocks_of(ROOT / "docs" / "guides.md")}
JOB = BLOCKS["file job.py"]
AT_STEP_30 = """
plain, calls = loss_fn, iter(range(10**6))

def loss_fn(model, batch):
    import os, pathlib, signal, time
    failed, manifest = pathlib.Path({failed!r}), pathlib.Path({manifest!r})
    if next(calls) == 2 * 30 and os.environ.get({variable!r}) == "1" and not failed.exists():
        while not manifest.exists():
            time.sleep(0.01)
        failed.touch()
        signal.raise_signal(signal.{signal})
    return plain(model, batch)
"""
# Each line of standard input adds a node with a CPU, or removes the last one. Ray gives up if a
# node takes 30 s to start, as on a busy machine.
RAY_CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node, nodes = {"num_cpus": 1, "object_store_memory": 80_000_000}, []

def retried(start, **options):
    for _ in range(5):
        try:
            return start(**node, **options)
        except Exception as error:
            print(error, file=sys.stderr)
    raise SystemExit("Ray's nodes did not start")

cluster = Cluster()
retried(cluster.add_node, include_dashboard=False)
nodes.append(retried(cluster.add_node))
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        nodes.append(retried(cluster.add_node))
    else:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    print(line, end="", flush=True)
cluster.shutdown()
"""
# Two workers wait at step 20 until a node is removed, whose worker then has another parent. The one
# that is left kills itself at step 40, once a node was added.
WITH_OTHER_NODES = """
import os, pathlib, signal, time

folder, plain, raylet = pathlib.Path({folder!r}), loss_fn, os.getppid()

def saved(step):
    return (folder / f"two/step-{{step:08}}/manifest.json").exists()

def wait_for(name):
    (folder / f"wants-{{name}}").touch()
    while not (folder / name).exists():
        time.sleep(0.01)

def loss_fn(model, batch):
    if saved(20) and not (folder / "removed").exists():
        wait_for("removed")
        while os.getppid() != raylet:
            time.sleep(0.01)
    if saved(40) and not (folder / "killed").exists():
        wait_for("added")
        (folder / "killed").touch()
        signal.raise_signal(signal.SIGKILL)
    return plain(model, batch)
"""
RAY_TRAIN = """
import sys
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from job import train

directory, storage = sys.argv[1:]
TorchTrainer(
    lambda: train(directory),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
).fit()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of a user, with the job."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def program(package):
    """Write the program for a package. Skip the test without the package."""
    if importlib.util.find_spec(package.partition("-")[0]) is None:
        pytest.skip(f"{package} is missing: run `make integrations`")
    Path("train.py").write_text(BLOCKS[f"not run: needs {package}"])


def train(*arguments, status=0, environment=None):
    """Run the program and return what it printed."""
    done = subprocess.run(
        [sys.executable, "train.py", *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == status, done.stdout
    return done.stdout


def state(directory):
    """Return the hashes of what a run has saved last, after all of its steps."""
    snapshot = ss.read_snapshot(directory)
    assert snapshot.step == 80
    return fingerprint({name: snapshot.state[name] for name in ("model", "optimizer")})


def alone(lr=0.01):
    """Return the hashes of the run on one worker, without any tool."""
    directory = f"alone-{lr}"
    command = f"from job import train; train({directory!r}, {lr})"
    subprocess.run([sys.executable, "-c", command], check=True)
    return state(directory)


def fail_once(signal, variable, directory):
    """Let rank 1 get a signal at step 30, once the snapshot of step 20 exists."""
    manifest = f"{directory}/step-00000020/manifest.json"
    failed = str(Path("failed").resolve())
    text = AT_STEP_30.format(signal=signal, variable=variable, manifest=manifest, failed=failed)
    Path("job.py").write_text(JOB + text)


def change(nodes, how):
    """Add or remove a node of the Ray cluster that a process holds."""
    nodes.stdin.write(f"{how}\n")
    nodes.stdin.flush()
    assert nodes.stdout.readline() == f"{how}\n"


@pytest.fixture
def change_nodes(monkeypatch):
    """Start a Ray cluster of two nodes with a CPU each; return a function that changes them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is missing: run `make integrations`")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("SAMESTEP_SNAPSHOT_EVERY", "20")
    command = [sys.executable, "-c", RAY_CLUSTER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.stdout.readline().strip())
        yield partial(change, nodes)


@pytest.mark.timeout(1200)
def test_ray_trains_on_as_many_nodes_as_there_are(change_nodes, folder):
    program("ray")
    expected = alone()
    Path("job.py").write_text(JOB + WITH_OTHER_NODES.format(folder=str(folder)))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(train, 4, folder / "two")
        for how, name in (("remove", "removed"), ("add", "added")):
            while not (folder / f"wants-{name}").exists() and not running.done():
                time.sleep(0.1)
            change_nodes(how)
            (folder / name).touch()
        printed = running.result()
    starts = [
        (len(event["workers"]), event.get("step", 0))
        for event in read_history(folder / "two")
        if event["event"] in {"started", "resumed"}
    ]
    assert starts == [(2, 0), (1, 20), (2, 40)]
    assert printed.count("starting again") == 2
    assert state("two") == expected


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("change_nodes")
def test_ray_train_starts_the_workers_again_after_a_kill(folder):
    expected = alone()
    fail_once("SIGKILL", "RANK", folder / "two")
    Path("train.py").write_text(RAY_TRAIN)
    printed = train(folder / "two", folder / "storage")
    places = re.findall(r"rank \d of \d, from step \d+", printed)
    # Ray Train may start them once more on a busy machine
    expected_places = {f"rank {rank} of 2, from step {step}" for rank in (0, 1) for step in (0, 20)}
    assert expected_places <= {*places}
    assert state("two") == expected


def test_hydra_sweeps_and_resumes(folder):
    program("hydra-core")
    rates = (0.01, 0.05)
    expected = [alone(lr) for lr in rates]
    swept = train(
        "--multirun", "lr=0.01,0.05", "hydra.hydra_logging.disable_existing_loggers=false"
    )
    assert swept.count("rank 1 of 2, from step 0") == len(rates)
    assert [state(f"runs/lr={lr}") for lr in rates] == expected
    assert (folder / "runs/lr=0.05/.hydra/config.yaml").read_text() == "lr: 0.05\nworkers: 2\n"
    assert "rank 0 of 1, from step 80" in train("lr=0.05", "workers=1")


def test_submitit_requeues_a_local_job_that_resumes(folder):
    program("submitit")
    expected = alone()
    fail_once("SIGUSR2", "SUBMITIT_LOCAL_GLOBALID", "one")
    train("local", 1, 2, "one", environment={"SAMESTEP_SNAPSHOT_EVERY": "20"})
    (log,) = (folder / "logs").glob("*_1_log.out")
    assert "rank 1 of 2, from step 3" in log.read_text()
    assert state("one") == expected


def test_submitit_trains_on_two_nodes_of_slurm(folder, tmp_path_factory):
    program("submitit")
    expected = alone()
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        train("slurm", 2, 1, "one", environment=dict(cluster.environment))
    assert state("one") == expected


@pytest.mark.long
def test_a_notebook_trains_and_resumes(folder):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for step in (0, 80):  # the second kernel finds a finished run
        cell = nbformat.v4.new_code_cell(BLOCKS["not run: needs a notebook"])
        notebook = nbformat.v4.new_notebook(cells=[cell])
        nbclient.NotebookClient(notebook, timeout=300).execute()
        printed = "".join(output.get("text", "") for output in cell.outputs)
        assert f"rank 0 of 2, from step {step}" in printed
    assert state("runs/notebook") == alone()
