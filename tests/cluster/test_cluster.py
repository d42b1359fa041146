from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster import STARTED_BY, ProcessInfo, find_process
from samestep.cluster.launchers import HYDRA, NEEDED, OPEN_MPI, SUBMITIT, TRAIN_JOB, VARIABLES
from samestep.errors import ConfigError

SECOND_OF_FOUR = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
ADDRESS = {name: SECOND_OF_FOUR[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
PLAIN = {name: SECOND_OF_FOUR[name] for name in NEEDED}
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
MPI = dict(zip(OPEN_MPI, ("1", "2", "1", "2"), strict=True))


def test_without_variables_a_worker_is_alone():
    assert find_process({"HOME": "/root"}) == ProcessInfo(0, 1, 0, 1, "127.0.0.1", 0, "alone")


@pytest.mark.parametrize(
    ("extra", "started_by"),
    [
        ({}, "variables"),
        ({STARTED_BY: "samestep"}, "samestep"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ],
)
def test_variables_of_torchrun_are_read(extra, started_by):
    process = ProcessInfo(1, 4, 1, 2, "10.0.0.7", 29500, started_by, "RANK=1 of WORLD_SIZE=4")
    assert find_process({**SECOND_OF_FOUR, **extra}) == process


@pytest.mark.parametrize(
    "other", [TASK, MPI, {**POD, "JOB_COMPLETION_INDEX": "3"}, {"PMI_RANK": "3", "PMI_SIZE": "9"}]
)
@pytest.mark.parametrize("extra", [{STARTED_BY: "samestep"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_the_innermost_launcher_wins(other, extra):
    assert find_process({**SECOND_OF_FOUR, **other, **extra}) == find_process(
        {**SECOND_OF_FOUR, **extra}
    )


def test_without_local_variables_all_workers_are_on_one_host():
    process = find_process(PLAIN)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        1,
        4,
        1,
        4,
    )


@given(
    st.sets(st.sampled_from(VARIABLES), min_size=1).filter(
        lambda names: not names.issuperset(NEEDED)
    )
)
def test_missing_variables_are_named_with_those_that_are_set(given_names):
    with pytest.raises(ConfigError, match="unset all to run one worker alone") as caught:
        find_process({name: SECOND_OF_FOUR[name] for name in given_names})
    was_set, _, missing = str(caught.value).split(";")[0].partition(" is set and ")
    assert was_set == ", ".join(
        f"{name}={SECOND_OF_FOUR[name]}" for name in VARIABLES if name in given_names
    )
    assert missing == ", ".join(name for name in NEEDED if name not in given_names) + " is not"


@pytest.mark.parametrize("name", [name for name in VARIABLES if name != "MASTER_ADDR"])
@pytest.mark.parametrize("text", ["", "one", "-1", "1.0", " 1", "²", "9" * 5000])
def test_an_invalid_number_is_named(name, text):
    with pytest.raises(
        ConfigError, match=re.escape(f"{name} must be a whole number, got {text!r};")
    ):
        find_process({**SECOND_OF_FOUR, name: text})


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "4"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"RANK": "0"},
    ],
)
def test_contradictions_are_reported_with_all_values(changed):
    (name, value) = next(iter(changed.items()))
    with pytest.raises(ConfigError, match=f"{name}={value}.*contradict"):
        find_process({**SECOND_OF_FOUR, **changed})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(
            ("MASTER_ADDR", text, "a host name or an address")
            for text in ("", "two words", "a\n", "a" * 64, "a..b", "\ud800")
        ),
        *(("MASTER_PORT", text, "a port from 1 to 65535") for text in ("0", "65536")),
    ],
)
def test_an_invalid_address_is_named(name, text, expected):
    with pytest.raises(ConfigError, match=re.escape(f"{name} must be {expected}, got {text!r};")):
        find_process({**SECOND_OF_FOUR, name: text})


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_every_rank_of_a_cluster_is_read(hosts, local_workers, data):
    workers = hosts * local_workers
    rank = data.draw(st.integers(0, workers - 1))
    environment = {
        **SECOND_OF_FOUR,
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank % local_workers),
        "LOCAL_WORLD_SIZE": str(local_workers),
    }
    process = find_process(environment)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        rank,
        workers,
        rank % local_workers,
        local_workers,
    )


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", **ADDRESS},
            "JOB_COMPLETION_INDEX=1 of WORLD_SIZE=4",
        ),
        ({**POD, **PLAIN, "PET_NPROC_PER_NODE": "auto"}, "RANK=1 of WORLD_SIZE=4"),
        ({**POD, **PLAIN, "JOB_COMPLETION_INDEX": "0"}, "RANK=1 of WORLD_SIZE=4"),
        (
            dict(zip(TRAIN_JOB, ("1", "4", "10.0.0.7", "29500"), strict=True)) | POD,
            "PET_NODE_RANK=1 of PET_NNODES=4",
        ),
    ],
    ids=["an Indexed Job", "a PyTorchJob", "a rank wins over an index", "a TrainJob"],
)
def test_a_pod_is_a_host_of_one_worker(variables, source):
    assert find_process(variables) == ProcessInfo(
        1, 4, 0, 1, "10.0.0.7", 29500, "kubernetes", source
    )


@pytest.mark.parametrize("variables", [{"JOB_COMPLETION_INDEX": "3"}, POD])
def test_a_pod_without_a_world_size_runs_alone(variables):
    assert find_process(variables).started_by == "alone"


def test_a_pod_with_local_variables_has_several_workers():
    assert find_process({**POD, **SECOND_OF_FOUR}) == find_process(SECOND_OF_FOUR)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4"},
            "INDEX=1, WORLD_SIZE=4 is set and MASTER_ADDR, MASTER_PORT is not",
        ),
        (
            {**POD, "WORLD_SIZE": "4", **ADDRESS},
            "WORLD_SIZE=4, .* is set and JOB_COMPLETION_INDEX is not",
        ),
        (
            {**POD, "PET_NNODES": "1:4"},
            "PET_NNODES=1:4 is set and PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT is not; ",
        ),
        (
            {**POD, **PLAIN, "PET_NPROC_PER_NODE": "2"},
            "PET_NPROC_PER_NODE must be 1 if a pod runs one worker, got '2'",
        ),
        (
            {"JOB_COMPLETION_INDEX": "4", "WORLD_SIZE": "4", **ADDRESS},
            "JOB_COMPLETION_INDEX=4, WORLD_SIZE=4.*contradict each other",
        ),
    ],
)
def test_a_pod_with_missing_variables_is_an_error(variables, message):
    with pytest.raises(ConfigError, match=message):
        find_process(variables)


NAMES = (
    *VARIABLES,
    *OPEN_MPI,
    *HYDRA,
    *TRAIN_JOB,
    *TASK,
    *POD,
    "JOB_COMPLETION_INDEX",
    "PET_NPROC_PER_NODE",
    "PMIX_NAMESPACE",
    *SUBMITIT,
    STARTED_BY,
)
TEXTS = (
    "",
    "0",
    "1",
    "2",
    "4",
    "-1",
    "x",
    "3,1",
    "2(x2)",
    "n[1-2]",
    "n[2-1]",
    "[",
    "127.0.0.1",
    "29500",
    "9" * 20,
    "\ud800",
    "samestep",
)
WHOLE = (
    {},
    SECOND_OF_FOUR,
    SECOND_OF_FOUR | {STARTED_BY: "samestep"},
    TASK,
    MPI,
    dict(zip(HYDRA, ("1", "2", "1", "2"), strict=True)),
    {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", **ADDRESS},
    dict(zip(TRAIN_JOB, ("1", "4", "10.0.0.7", "29500"), strict=True)) | POD,
    dict(zip(SUBMITIT, ("1", "2", "1", "7"), strict=True)),
)


def any_environment(chance):
    """Return what one or two launchers set, with some variables changed, added or removed."""
    environment = {**chance.choice(WHOLE), **chance.choice(WHOLE)}
    environment |= {chance.choice(NAMES): chance.choice(TEXTS) for _ in range(chance.randrange(5))}
    for name in chance.sample(NAMES, chance.randrange(4)):
        environment.pop(name, None)
    return environment


def process_or_error(environment):
    try:
        return find_process(environment), None
    except ConfigError as error:
        return None, str(error)


def test_any_environment_gives_a_valid_process_or_an_error_with_advice():
    chance, counts = random.Random(5), Counter()
    for _ in range(50_000):
        environment = any_environment(chance)
        process, error = process_or_error(environment)
        if error:
            assert any(name in error for name in environment)
            assert "; " in error
            counts["error"] += 1
        else:
            assert 0 <= process.local_rank < process.local_world_size <= process.world_size
            assert process.local_rank <= process.rank < process.world_size
            assert process.started_by == "alone" or 0 < process.port < 2**16
            counts[process.started_by] += 1
    assert counts.keys() == {
        "error",
        "alone",
        "samestep",
        "variables",
        "mpi",
        "slurm",
        "submitit",
        "kubernetes",
    }
    assert min(counts.values()) > 100


@given(st.dictionaries(st.sampled_from(NAMES), st.text(), min_size=1))
def test_any_text_is_read_or_named(environment):
    process, error = process_or_error(environment)
    assert process or any(name in error for name in environment)


@pytest.mark.parametrize(
    "variable",
    ["AWS_BATCH_JOB_NUM_NODES=4", "FLUX_JOB_SIZE=4", 'SM_HOSTS=["algo-1","algo-2"]'],
)
def test_processes_of_other_launchers_do_not_train_alone(variable):
    name, _, value = variable.partition("=")
    with pytest.raises(ConfigError, match=rf"^{re.escape(variable)} .* would train alone. Add"):
        find_process({name: value})
    assert find_process({name: value, **SECOND_OF_FOUR}).world_size == 4
    assert find_process({name: '["algo-1"]' if name == "SM_HOSTS" else "1"}).started_by == "alone"


MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SPEC = '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}, "task": {}}'
ROWS = {  # the table of docs/launch.md: variables of the second of two workers of one host
    "torch.distributed.launch": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        "torchrun",
    ),
    "accelerate launch": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        | {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"},
        "torchrun",
    ),
    "DeepSpeed": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
        | {"CROSS_RANK": "0", "CROSS_SIZE": "1"},
        "variables",
    ),
    "Azure ML": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"},
        "variables",
    ),
    "Azure ML, MPI": (
        dict(zip(OPEN_MPI, ("1", "2", "1", "2"), strict=True))
        | {"PMIX_NAMESPACE": "7", "AZ_BATCH_MASTER_NODE": "10.0.0.7:6000"},
        "mpi",
    ),
    "Vertex AI": ({**MASTER, "RANK": "1", "WORLD_SIZE": "2", "CLUSTER_SPEC": SPEC}, "variables"),
    "SageMaker": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        | {"TORCHELASTIC_RUN_ID": "none", "SM_HOSTS": '["algo-1", "algo-2"]'},
        "torchrun",
    ),
    "submitit, local": (dict(zip(SUBMITIT, ("1", "2", "1", "7"), strict=True)), "submitit"),
    "Ray Train": (
        {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        | {"NODE_RANK": "0"},
        "variables",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_workers_of_each_launcher_join(row):
    variables, started_by = ROWS[row]
    process = find_process(variables)
    assert (process.rank, process.world_size, process.started_by) == (1, 2, started_by)
    # others compare their hosts (`locate`), so that no host is taken for another
    assert process.knows_host == ("LOCAL_WORLD_SIZE" in variables or started_by != "variables")
    assert process.port == (29500 if "MASTER_PORT" in variables else process.port)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"CLUSTER_SPEC": SPEC}, r"Add before the command: torchrun .* --nnodes HOSTS"),
        (
            {"SM_HOSTS": '["a", "b"]'},
            r"Add to the estimator's arguments: distribution=.*torch_dist",
        ),
        ({"FLUX_JOB_SIZE": "4"}, r"command: env RANK=\$FLUX_TASK_RANK WORLD_SIZE=\$FLUX_JOB_SIZE "),
        ({"JSM_NAMESPACE_SIZE": "4"}, r"command: env RANK=\$JSM_NAMESPACE_RANK "),
        ({"MV2_COMM_WORLD_SIZE": "4"}, r"command: env RANK=\$MV2_COMM_WORLD_RANK "),
        ({"AWS_BATCH_JOB_NUM_NODES": "2"}, r"torchrun .* --node-rank \$AWS_BATCH_JOB_NODE_INDEX "),
        (  # Lightning's, before it has made its group
            {**MASTER, "NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            r"RANK is not; .* or make torch.distributed's process group before samestep.init",
        ),
        (
            dict(zip(OPEN_MPI, ("1", "4", "1", "2"), strict=True)),
            r"does not say where rank 0 listens, and MASTER_ADDR and MASTER_PORT is not set; set",
        ),
    ],
)
def test_other_launchers_are_refused_with_the_line_to_add(variables, line):
    with pytest.raises(ConfigError, match=line):
        find_process(variables)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\u00b2", '{"cluster": {"a": 3}}', "x"])
def test_a_variable_of_something_else_is_no_cluster(text):
    assert find_process({"CLUSTER_SPEC": text}).started_by == "alone"
