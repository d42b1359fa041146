from __future__ import annotations

from samestep.tools.doctor import launchers
from tests.tools.doctor.fabricated import case_of, told

ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_NTASKS": "2",
}


def test_a_process_of_no_launcher_is_told_so(tmp_path):
    section = launchers.examine(case_of(tmp_path, commands={"srun": "", "sinfo": ""}))
    assert section.facts["commands"] == ["sinfo", "srun"]
    assert section.facts["this_process"] == "of no launcher"
    assert not section.findings


def test_a_worker_of_torchrun_knows_its_place(tmp_path):
    environment = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    section = launchers.examine(
        case_of(
            tmp_path, environment={**environment, "TORCHELASTIC_RUN_ID": "x", "PASSWORD": "secret"}
        )
    )
    assert (
        section.facts["this_process"] == "worker 3 of 8, started by torchrun; they meet at n1:29500"
    )
    assert section.facts["variables"] == {**environment, "TORCHELASTIC_RUN_ID": "x"}


def test_variables_that_are_left_over_have_to_go(tmp_path):
    section = launchers.examine(case_of(tmp_path, environment={"RANK": "0"}))
    assert "RANK=0 is set and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not" in told(
        section, "change"
    )
    assert "unset all to run one worker alone" in told(section, "change")


def test_a_task_of_slurm_knows_its_place(tmp_path):
    section = launchers.examine(case_of(tmp_path, environment=STEP, commands={"srun": ""}))
    assert section.facts["this_process"].startswith("worker 1 of 2, started by slurm")
    assert section.facts["variables"]["SLURM_JOB_ID"] == "7"
    assert "this is job 7 of Slurm" in told(section, "good")


def test_a_batch_script_of_several_tasks_is_told_to_use_srun(tmp_path):
    section = launchers.examine(
        case_of(
            tmp_path, environment={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, commands={"srun": ""}
        )
    )
    assert "job 7 of Slurm with 4 tasks" in told(section, "note")
    assert "srun python train.py" in told(section, "note")


def test_a_job_without_srun_is_noted(tmp_path):
    section = launchers.examine(
        case_of(tmp_path, environment={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"})
    )
    assert "srun is not found" in told(section, "note")


def test_a_pod_tells_its_namespace_and_that_it_needs_no_token(tmp_path):
    files = {f"{ACCOUNT}/namespace": "lab\n", f"{ACCOUNT}/token": "secret"}
    section = launchers.examine(
        case_of(tmp_path, files=files, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    )
    assert section.facts["pod"] == {"namespace": "lab", "service_account": True}
    assert "automountServiceAccountToken: false" in told(section, "note")
    assert "secret" not in str(section)
