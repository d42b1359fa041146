"""`samestep submit kubernetes` writes valid manifests, and its pods find each other."""

from __future__ import annotations

import argparse
import stat
from importlib.util import find_spec

import pytest
import yaml

from samestep.cli import main
from samestep.cluster import find_process
from samestep.config import TOKEN
from samestep.launch import local as command
from tests.needs import needs

COMMAND = ("submit", "kubernetes", "--image", "here/train:1", "--output", "-")
CLAIM = ("--claim", "runs:/runs", "--dir", "/runs/one")
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def written(capsys):
    """Return a function that returns the written manifests by their kinds."""

    def write(*arguments, then=("train.py",)):
        assert main([*COMMAND, *CLAIM, *arguments, *then]) == 0
        output = capsys.readouterr().out
        assert "&id" not in output  # no anchors, which some tools cannot read
        return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(output)}

    return write


def fits(manifest):
    """Check a manifest against the schema of its kind, which allows no unknown field."""
    needs(
        "the Python package kubernetes_validate",
        is_present=find_spec("kubernetes_validate") is not None,
    )
    import kubernetes_validate

    kubernetes_validate.validate(manifest, "1.37", strict=True)


def container_of(manifest):
    """Return the container of a job's first pod, and the pod."""
    pod = manifest["spec"]["template"]["spec"]
    return pod["containers"][0], pod


def job_of(manifests):
    return next(
        manifest for kind, manifest in manifests.items() if kind not in {"Service", "Secret"}
    )


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_manifests_fit_the_schemas(nodes, workers, written):
    manifests = written("--nodes", str(nodes), "-n", str(workers), "--lanes", "8")
    for manifest in manifests.values():
        fits(manifest)
    assert ("Service" in manifests) == (nodes > 1)
    assert ("Secret" in manifests) == (nodes > 1)
    container, pod = container_of(job_of(manifests))
    assert container["image"] == "here/train:1"
    assert {"name": "SAMESTEP_LANES", "value": "8"} in container["env"]
    assert {"name": "SAMESTEP_DIR", "value": "/runs/one"} in container["env"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert {path: volumes[name] for name, path in mounts.items()} == {
        "/dev/shm": {"emptyDir": {"medium": "Memory"}},
        "/runs": {"persistentVolumeClaim": {"claimName": "runs"}},
    }


def test_an_unknown_field_is_found(written):
    manifest = job_of(written())
    manifest["spec"]["color"] = "blue"
    with pytest.raises(Exception, match="color"):
        fits(manifest)


def environment_of(container, more):
    """Return the variables of a pod's worker: the manifest's and those that the cluster adds."""
    variables = {variable["name"]: variable.get("value", 16 * "x") for variable in container["env"]}
    return {**IN_POD, **more, **variables}


def test_the_only_worker_of_a_pod_knows_its_rank(written):
    container, _ = container_of(job_of(written("--nodes", "3")))
    assert container["command"] == ["python", "train.py"]
    for index in range(3):
        place = find_process(environment_of(container, {"JOB_COMPLETION_INDEX": str(index)}))
        assert (
            place.rank,
            place.world_size,
            place.local_rank,
            place.local_world_size,
            place.address,
        ) == (index, 3, 0, 1, "train-0.train")


def test_one_pod_with_one_worker_has_a_world_size_of_one(written):
    container, _ = container_of(job_of(written()))
    assert find_process(environment_of(container, {"JOB_COMPLETION_INDEX": "0"})).world_size == 1


def test_the_service_leads_to_the_first_pod_before_it_is_ready(written):
    manifests = written("--nodes", "2", "--name", "big")
    service, job = manifests["Service"], manifests["Job"]["spec"]
    assert service["metadata"]["name"] == job["template"]["spec"]["subdomain"] == "big"
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_several_workers_per_pod_are_started_by_samestep_run(written):
    manifests = written("--nodes", "2", "-n", "4", then=("-m", "recipes.vit", "--epochs", "3"))
    container, _ = container_of(job_of(manifests))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert container["command"][:2] == ["samestep", "run"]
    options = parser.parse_args(container["command"][2:])
    assert (options.workers, options.nodes, options.master) == (4, "2", "vit-0.vit:29400")
    assert (options.module, options.script, options.arguments) == (
        True,
        "recipes.vit",
        ["--epochs", "3"],
    )
    (token,) = [
        variable["valueFrom"]["secretKeyRef"]
        for variable in container["env"]
        if variable["name"] == TOKEN
    ]
    secret = manifests["Secret"]
    assert secret["metadata"]["name"] == token["name"]
    assert len(secret["stringData"][token["key"]]) == 64

    alone, _ = container_of(job_of(written("-n", "2")))
    assert alone["command"] == ["samestep", "run", "-n", "2", "train.py"]
    assert TOKEN not in [variable["name"] for variable in alone["env"]]


def test_only_preempted_pods_are_restarted(written):
    job = written("--grace-period", "45")["Job"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 45
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"] == {"containerName": "worker", "operator": "In", "values": [143]}


def test_arguments_are_not_expanded_by_kubernetes(written):
    container, _ = container_of(
        job_of(written("--resume", "auto", then=("train.py", "$(HOME)", "$HOME", "it's")))
    )
    assert container["command"] == ["python", "train.py", "$$(HOME)", "$HOME", "it's"]


@pytest.mark.parametrize(
    "text", ["a: b # c", '"\\"', "- a\n---\nb", "\x7fé\u2028😀", "@{token}", ""]
)
def test_values_arrive_as_they_are(text, written):
    manifests = written("--nodes", "2", "--name", text or "a", then=("train.py", text))
    container, _ = container_of(manifests["Job"])
    assert container["command"] == ["python", "train.py", text]
    assert {manifest["metadata"]["name"] for manifest in manifests.values()} == {
        text or "a",
        f"{text or 'a'}-token",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "never"], "--resume must be auto, got never"),
        (["--dir", "runs/one"], "got runs/one, which is lost with its pod"),
        (["--dir", "/runs-of-others/one"], "got /runs-of-others/one, which is lost with its pod"),
        (["--claim", "data:data"], "--claim must be CLAIM:PATH with an absolute path"),
        (["--claim", "data"], "--claim must be CLAIM:PATH with an absolute path, got data"),
    ],
)
def test_values_with_which_a_job_would_lose_its_run_are_reported(arguments, words, capsys):
    assert main([*COMMAND, *CLAIM, *arguments, "train.py"]) == 2
    assert words in capsys.readouterr().err


def test_only_the_owner_can_read_the_manifests(tmp_path):
    file = tmp_path / "job.yaml"
    for _ in ("new", "a file that others could read"):
        pods = ("--nodes", "2", "-n", "4")
        assert main([*COMMAND, *CLAIM, *pods, "--output", str(file), "train.py"]) == 0
        assert "kind: Secret" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)
