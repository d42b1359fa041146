from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster import find_process
from samestep.cluster.launchers import port_of
from samestep.errors import ConfigError
from tests.cluster.started import PRINT, ROOT, TRAIN, printed, trained
from tests.needs import needs
from tests.slurm import slurm

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[07-08]",
}


def test_a_task_of_a_step_is_a_worker():
    process = find_process(TASK)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        3,
        4,
        0,
        1,
    )
    assert (process.address, process.port, process.started_by) == ("n07", port_of(7, 2), "slurm")
    assert process.source == "SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=4"


def test_a_step_on_one_host_uses_the_loopback():
    assert (
        find_process(
            {
                **TASK,
                "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_STEP_NODELIST": "n07",
            }
        ).address
        == "127.0.0.1"
    )


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("3,1", [3, 1]),
        ("2(x2)", [2, 2]),
        ("1(x2),2", [1, 1, 2]),
        ("4", [4]),
        ("1,2(x1),1", [1, 2, 1]),
    ],
)
def test_local_workers_are_counted_node_by_node(text, workers):
    environment = {**TASK, "SLURM_STEP_TASKS_PER_NODE": text, "MASTER_ADDR": "n07"}
    nodes = [{**environment, "SLURM_NODEID": str(node)} for node in range(len(workers) + 1)]
    assert [find_process(node).local_world_size for node in nodes[:-1]] == workers
    with pytest.raises(
        ConfigError,
        match=f"SLURM_NODEID must be a node of SLURM_STEP_TASKS_PER_NODE=.*, got '{len(workers)}'",
    ):
        find_process(nodes[-1])


def test_the_address_can_be_set():
    assert find_process({**TASK, "MASTER_ADDR": "10.0.0.7"}).address == "10.0.0.7"
    assert find_process({**TASK, "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "?"},
    ],
)
def test_a_step_of_one_task_is_ignored(changed):
    assert find_process({**TASK, **changed}).started_by == "alone"
    plain = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert find_process({**TASK, **changed, **plain}) == find_process(plain)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"SLURM_STEP_TASKS_PER_NODE": "3,x"},
            "SLURM_STEP_TASKS_PER_NODE must be numbers such as .*, got '3,x'",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,2"}, "whose sum is 4"),
        (
            {"SLURM_STEP_NODELIST": "n[1-"},
            r"SLURM_STEP_NODELIST must be a list of hosts such as .*, got 'n\[1-'",
        ),
        ({"SLURM_STEP_NODELIST": "a" * 64}, "must be a list of hosts"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID must be a whole number, got '-1'"),
        (
            {"SLURM_PROCID": "4"},
            "SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=4, .*=0, .* contradict each other; .* srun",
        ),
        (
            {"SLURM_LOCALID": "1"},
            "SLURM_LOCALID=1, SLURM_STEP_TASKS_PER_NODE=3,1 at SLURM_NODEID=1 contradict each",
        ),
        (
            {"SLURM_NTASKS": "2"},
            "SLURM_STEP_NUM_TASKS=4, left over from .*, contradicts SLURM_NTASKS=2; .* srun",
        ),
        (
            {"SLURM_NODEID": "0"},
            "SLURM_PROCID=3 of .* does not say where rank 0 listens, and MASTER_ADDR is not set; ",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            "SLURM_PROCID=3 and RANK=0 contradict .*; unset the variables of RANK, .* torchrun",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "2"},
            "SLURM_STEP_NUM_TASKS=4 and WORLD_SIZE=2 contradict each other",
        ),
        ({"LOCAL_RANK": "3"}, "SLURM_LOCALID=0 and LOCAL_RANK=3 contradict each other"),
    ],
)
def test_invalid_variables_of_slurm_are_named(changed, message):
    with pytest.raises(ConfigError, match=message):
        find_process({**TASK, **changed})


def test_variables_of_torchrun_that_agree_are_no_conflict():
    same = {"RANK": "3", "WORLD_SIZE": "04", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert find_process({**TASK, **same}) == find_process(TASK)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n[07-09,11-13],m5", "n07"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("r[1-2]-n[9-10]", "r1-n9"),
        ("gpu[8]-ib.cluster,gpu9", "gpu8-ib.cluster"),
        ("n[1-999999999999][1-999999999999]", "n11"),
    ],
)
def test_the_first_host_of_a_list_has_rank_0(text, host):
    assert find_process({**TASK, "SLURM_STEP_NODELIST": text}).address == host


@pytest.mark.parametrize(
    "text",
    ["", ",", ",n1", "n[", "n[]", "n[1,]", "n[x]", "n[1]]", "n 1", "n1\n", "n" + "[1]" * 5000],
)
def test_an_invalid_list_of_hosts_is_an_error(text):
    with pytest.raises(ConfigError, match=r"must be a list of hosts such as n\[1-3,07\]"):
        find_process({**TASK, "SLURM_STEP_NODELIST": text})


@given(st.integers(0, 10**9), st.integers(0, 289), st.integers(0, 30), st.integers(0, 30))
def test_nearby_jobs_and_steps_have_different_ports(job, later, step, other):
    assert 20_000 <= port_of(job, step) < 29_000
    assert (port_of(job, step) == port_of(job + later, other)) == (later == 0 and step == other)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield replace(cluster, environment={**cluster.environment, "PYTHONPATH": str(ROOT)})


def srun(cluster, *options, command=PRINT, **environment):
    """Return what the tasks of a step print, by rank."""
    return printed(cluster.run("srun", *options, *command, **environment).stdout)


@pytest.mark.long
def test_srun_trains_on_two_nodes_what_one_worker_trains(cluster):
    workers = srun(cluster, "-N2", "-n3", command=TRAIN)
    assert [
        (worker["rank"], worker["local_rank"], worker["local_world_size"]) for worker in workers
    ] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert {
        (worker["world_size"], worker["address"], worker["started_by"]) for worker in workers
    } == {(3, "127.0.0.1", "slurm")}
    assert [worker["trained"] for worker in workers] == [trained()] * 3


@pytest.mark.parametrize(
    ("options", "local"),
    [
        (("-N2", "-n4", "--mpi=pmi2"), [(0, 3), (1, 3), (2, 3), (0, 1)]),
        pytest.param(
            ("-N2", "-n4", "--distribution=cyclic"),
            [(0, 3), (0, 1), (1, 3), (2, 3)],
            marks=pytest.mark.long,
        ),
        pytest.param(("-N1", "-n3"), [(0, 3), (1, 3), (2, 3)], marks=pytest.mark.long),
        (("-N1", "-n1", *PRINT, ":", "-N1", "-n2"), [(0, 1), (0, 2), (1, 2)]),
    ],
    ids=["pmi2", "cyclic", "one node", "a step of two kinds"],
)
def test_every_distribution_of_tasks_gives_the_right_local_ranks(cluster, options, local):
    workers = srun(cluster, *options)
    assert [(worker["local_rank"], worker["local_world_size"]) for worker in workers] == local
    assert {worker["port"] for worker in workers} == {workers[0]["port"]}


def test_tasks_in_an_order_of_the_user_need_an_address(cluster, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.2\n127.0.0.1\n")
    hosts = str(tmp_path / "hosts")
    done = cluster.run(
        "srun", "-n2", "--distribution=arbitrary", *PRINT, check=False, SLURM_HOSTFILE=hosts
    )
    assert (
        "SLURM_PROCID=0 of SLURM_STEP_NUM_TASKS=2 does not say where rank 0 listens, and MASTER_AD"
        in done.stderr
    )
    assert (
        len(
            srun(
                cluster,
                "-n2",
                "--distribution=arbitrary",
                SLURM_HOSTFILE=hosts,
                MASTER_ADDR="127.0.0.2",
            )
        )
        == 2
    )


def test_variables_left_in_the_shell_are_found(cluster):
    done = cluster.run("srun", "-n2", *PRINT, check=False, RANK="0", WORLD_SIZE="1")
    assert (
        "ConfigError: SLURM_STEP_NUM_TASKS=2 and WORLD_SIZE=1 contradict each other" in done.stderr
    )
    assert "ConfigError: SLURM_PROCID=1 and RANK=0 contradict each other" in done.stderr
    assert done.stdout == ""


@pytest.mark.long
def test_without_srun_a_process_in_an_allocation_is_alone(cluster, tmp_path):
    shell = cluster.run("salloc", "-n2", *PRINT)
    assert [worker["started_by"] for worker in printed(shell.stdout)] == ["alone"]
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + " ".join(PRINT))
    cluster.run("sbatch", "--wait", "-n2", f"--output={tmp_path}/out", tmp_path / "job.sh")
    assert [worker["started_by"] for worker in printed((tmp_path / "out").read_text())] == ["alone"]


def test_a_step_that_an_allocation_inherits_is_not_its_own(cluster):
    command = "[ $SLURM_PROCID = 1 ] || salloc -n1 " + " ".join(PRINT)
    done = cluster.run("srun", "-n2", "bash", "-c", command, check=False)
    assert (
        "left over from the step that submitted this job, contradicts SLURM_NTASKS=1" in done.stderr
    )
    assert done.stdout == ""


@pytest.mark.long
def test_mpirun_in_an_allocation_sets_the_ranks(cluster, tmp_path):
    needs("mpirun")
    mpirun = ("mpirun", "--allow-run-as-root", "-x", "MASTER_ADDR=127.0.0.1", *PRINT)
    workers = printed(
        cluster.run("salloc", "-N2", "-n3", *mpirun, OMPI_MCA_orte_tmpdir_base=str(tmp_path)).stdout
    )
    assert [(worker["rank"], worker["local_rank"], worker["started_by"]) for worker in workers] == [
        (0, 0, "mpi"),
        (1, 1, "mpi"),
        (2, 0, "mpi"),
    ]
    assert {worker["port"] for worker in workers} == {workers[0]["port"]}
