from __future__ import annotations

import os
import subprocess

import pytest

from samestep.cluster import find_process
from samestep.cluster.launchers import HYDRA, OPEN_MPI
from samestep.errors import ConfigError
from tests.cluster.started import ROOT, TRAIN, printed, trained
from tests.needs import needs

ADDRESS = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
NAMESPACE = {"PMIX_NAMESPACE": "405667841"}
SLURM_DAEMON = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}


def process(names, *numbers):
    return dict(zip(names, map(str, numbers), strict=True))


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA])
@pytest.mark.parametrize("extra", [{}, SLURM_DAEMON])
def test_variables_of_mpirun_are_read(names, extra):
    info = find_process({**process(names, 2, 3, 0, 1), **ADDRESS, **extra})
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (2, 3, 0, 1)
    assert (info.address, info.port, info.started_by) == ("10.0.0.7", 1234, "mpi")
    assert info.source == f"{names[0]}=2 of {names[1]}=3"


def test_processes_of_one_host_use_the_loopback_and_a_port_per_job():
    info = find_process({**process(OPEN_MPI, 1, 3, 1, 3), **NAMESPACE})
    assert info.address == "127.0.0.1"
    assert 20_000 <= info.port < 29_000
    assert (
        find_process({**process(OPEN_MPI, 1, 3, 1, 3), "PMIX_NAMESPACE": "405667842"}).port
        != info.port
    )


def test_one_process_is_alone():
    assert find_process(process(OPEN_MPI, 0, 1, 0, 1)).started_by == "alone"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            process(OPEN_MPI, 2, 3, 0, 1) | NAMESPACE,
            "RANK=2 of .*SIZE=3 does not say where rank 0 listens, and MASTER_ADDR is not set",
        ),
        (process(OPEN_MPI, 1, 2, 1, 2), "and MASTER_PORT is not set; set rank 0"),
        (
            process(OPEN_MPI, 3, 3, 0, 1) | ADDRESS,
            "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=3, .* contradict each other",
        ),
        (
            process(OPEN_MPI, "x", 2, 0, 2),
            "OMPI_COMM_WORLD_RANK must be a whole number, got 'x'; start workers with mpirun",
        ),
        (
            process(OPEN_MPI[:2], 0, 2),
            "SIZE=2 is set and OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE is not; ",
        ),
        (
            process(HYDRA[:2], 0, 2),
            "PMI_RANK=0, PMI_SIZE=2 is set and MPI_LOCALRANKID, MPI_LOCALNRANKS is not; start",
        ),
        (
            process(OPEN_MPI, 1, 2, 1, 2) | NAMESPACE | {"RANK": "0"},
            "OMPI_COMM_WORLD_RANK=1 and RANK=0 contradict each other; unset",
        ),
    ],
)
def test_invalid_variables_of_mpirun_are_named(variables, message):
    with pytest.raises(ConfigError, match=message):
        find_process(variables)


def test_mpirun_trains_what_one_worker_trains(tmp_path):
    needs("mpirun")
    variables = {"PYTHONPATH": str(ROOT), "OMPI_MCA_orte_tmpdir_base": str(tmp_path)}
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *TRAIN]
    done = subprocess.run(
        mpirun,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers = printed(done.stdout)
    assert [
        (worker["rank"], worker["local_rank"], worker["local_world_size"], worker["started_by"])
        for worker in workers
    ] == [
        (0, 0, 2, "mpi"),
        (1, 1, 2, "mpi"),
    ]
    assert [worker["trained"] for worker in workers] == [trained()] * 2
