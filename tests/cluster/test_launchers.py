"""The first recipe under the launchers of torch and accelerate, with the bits of one worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import samestep as ss
from tests.cluster.started import ROOT
from tests.jobs import fingerprint
from tests.needs import needs
from tests.ports import free_port

ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1")
LAUNCHERS = {
    "torch": ("-m", "torch.distributed.launch", "--nproc-per-node=2", "--master-port={port}"),
    # starts torchrun, here without GPUs
    "accelerate": (*ACCELERATE, "--multi_gpu", "--main_process_port={port}"),
    "accelerate with mpirun": (
        *(*ACCELERATE, "--cpu", "--main_process_port={port}", "--mpirun_hostfile=hosts"),
    ),
}


def left(directory, *launcher):
    """Train 10 steps; return the status, what was printed, and the hashes of the state."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "SAMESTEP_DIR": str(directory / "run"),
        "SAMESTEP_STOP_AFTER": "10",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_orte_tmpdir_base": str(directory),
    }
    done = subprocess.run(
        [sys.executable, *launcher, ROOT / "recipes/first/train.py"],
        cwd=directory,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, fingerprint(ss.read_snapshot(directory / "run").state)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return left(tmp_path_factory.mktemp("alone"))[2]


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_recipe_leaves_the_bits_of_one_worker(name, alone, tmp_path):
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    if "mpirun" in name:
        needs("mpirun")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    launcher = [word.format(port=free_port()) for word in LAUNCHERS[name]]
    status, output, state = left(tmp_path, *launcher)
    assert status == 0, output
    assert "2 workers" in output
    assert state == alone
