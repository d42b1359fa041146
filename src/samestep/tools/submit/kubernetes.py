"""`samestep submit kubernetes`: manifests of an Indexed Job, a PyTorchJob or a TrainJob."""

from __future__ import annotations

import shutil
import subprocess
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, LaunchError
from samestep.tools.submit.pods import PORT, Pods, claims_of, token_secret
from samestep.tools.submit.training import (
    PRINTED,
    STOPPED,
    add_training_arguments,
    check_matches,
    hand_over,
    training_of,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

SUMMARY: Final = (
    "write the manifests of a job whose pods are started again after a snapshot, and apply them"
)
# RFC 1035, which names of services follow; RFC 1123 with a letter first
LABEL: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"
MOST_LABEL: Final = 63
QUANTITY: Final = r"\d+(\.\d+)?([KMGT]i?)?"

Manifest = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "%(prog)s --image IMAGE --dir DIR [--claim CLAIM[:PATH]] [--OPTION VALUE ...] [-m] script ..."
    parser.epilog = "Without --apply or --output the manifests are printed. --grace-period (default here: 120) is how long pods may take to end."
    parser.add_argument(
        "--image", required=True, help="container image with Python, samestep and the script"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="job",
        help="job: an Indexed Job, which any cluster has (default); or Kubeflow's",
    )
    parser.add_argument("--namespace", help="namespace of the job (default: kubectl's)")
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="CLAIM[:PATH]",
        help="PersistentVolumeClaim that all pods mount at a path (default: the run's directory); more than once, as for a data set",
    )
    parser.add_argument("--apply", action="store_true", help="hand the manifests to kubectl")
    add_training_arguments(parser, "pod")


def main(arguments: argparse.Namespace) -> int:
    """Write the manifests, and apply them if asked."""
    text = as_yaml(manifests(arguments))
    hand_over(text, arguments.output or (None if arguments.apply else PRINTED))
    return apply(text) if arguments.apply else 0


def apply(text: str) -> int:
    """Hand manifests to kubectl; return its exit status. Raises `LaunchError` where there is none."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise LaunchError(
            "kubectl was not found; write the manifests by --output, and apply the file where it is"
        )
    return subprocess.run(
        [kubectl, "apply", "--filename=-"], input=text, text=True, check=False
    ).returncode


def manifests(arguments: argparse.Namespace) -> list[Manifest]:
    """Return the manifests of a job. Raises `ConfigError` for what Kubernetes would not take."""
    training = training_of(arguments)
    last_pod = (
        f"{training.name}-master-0"
        if arguments.kind == "pytorchjob"
        else f"{training.name}-node-0-{training.nodes - 1}"
    )
    check_matches(
        "--name",
        training.name,
        LABEL,
        "lower-case letters, digits and hyphens, a letter first and no hyphen last (DNS-1123)",
    )
    if len(last_pod) > MOST_LABEL:
        raise ConfigError(
            f"--name {training.name} was given; expected fewer letters: a pod would be {last_pod}, of more than {MOST_LABEL}"
        )
    check_matches(
        "--namespace",
        arguments.namespace,
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        "a name of lower-case letters and digits",
    )
    check_matches("--memory", training.memory, QUANTITY, "a quantity such as 64Gi")
    check_matches("--gpus", arguments.gpus, r"[1-9]\d*", "a number")
    check_matches("--dir", training.directory, r"/.*", "an absolute path, as pods see it")
    if training.environment.get("SAMESTEP_RESUME", "auto") != "auto":
        raise ConfigError(
            f"--resume {arguments.resume} was given; expected auto: pods that are started again would start there and not go on"
        )
    pods = Pods(training, arguments.image, arguments.gpus, claims_of(arguments.claim, training))
    made = [
        *([token_secret(training.name)] if pods.needs_token else []),
        *KINDS[arguments.kind](pods),
    ]
    for manifest in made:
        manifest["metadata"].update(
            {"namespace": arguments.namespace} if arguments.namespace else {}
        )
    return made


def indexed_job(pods: Pods) -> list[Manifest]:
    """Return an Indexed Job, and the headless service by which its pods find the first of them."""
    name, nodes = pods.training.name, pods.training.nodes
    retried = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": "worker", "operator": "In", "values": [STOPPED]},
        },
    ]
    place = (
        {}
        if nodes == 1
        else {"WORLD_SIZE": str(nodes), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": PORT}
    )
    pod = {
        **pods.spec("worker", master=f"{name}-0.{name}", place=place),
        "restartPolicy": "Never",
        "subdomain": name,
    }
    job: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,  # of failures that are not ignored
            "podFailurePolicy": {"rules": retried},
            "template": {"metadata": {"labels": {"app.kubernetes.io/name": name}}, "spec": pod},
        },
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/name": name},
        },
    }
    return [job] if nodes == 1 else [service, job]


def pytorch_job(pods: Pods) -> list[Manifest]:
    """Return a PyTorchJob of Kubeflow's training operator, which sets the variables that a pod's only worker reads."""
    name, nodes = pods.training.name, pods.training.nodes

    def replicas(number: int) -> Manifest:
        spec = pods.spec("pytorch", master=f"{name}-master-0")
        # from 128 on: started again
        return {"replicas": number, "restartPolicy": "ExitCode", "template": {"spec": spec}}

    roles = {"Master": replicas(1), **({"Worker": replicas(nodes - 1)} if nodes > 1 else {})}
    spec = {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": roles}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": spec,
        }
    ]


def train_job(pods: Pods) -> list[Manifest]:
    """Return a TrainJob of Kubeflow's trainer for its runtime `torch-distributed`, whose retries are the runtime's."""
    pod = pods.spec("node", master="$(PET_MASTER_ADDR)")
    (container,) = pod["containers"]
    mounts = {"name": container["name"], "volumeMounts": container["volumeMounts"]}
    template = {"spec": {"template": {"spec": {**pod, "containers": [mounts]}}}}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}}}
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "env": container["env"],
        "numNodes": pods.training.nodes,
        "numProcPerNode": pods.training.workers_per_node,
        **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
    }
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "samestep", "trainingRuntimeSpec": patch}],
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": pods.training.name},
            "spec": spec,
        }
    ]


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Write documents as YAML. Raises `LaunchError` where PyYAML is missing."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise LaunchError(
            "manifests are written by PyYAML, which is not installed: pip install 'samestep[kubernetes]'"
        ) from None
    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=120)
    return text


KINDS: Final[dict[str, Callable[[Pods], list[Manifest]]]] = {
    "job": indexed_job,
    "pytorchjob": pytorch_job,
    "trainjob": train_job,
}
