"""`samestep submit kubernetes`: manifests of an Indexed Job."""

from __future__ import annotations

import argparse
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from samestep.config import TOKEN
from samestep.errors import ConfigError, LaunchError
from samestep.launch.cluster_spec import MAX_NODES
from samestep.tools.submit.slurm import (
    GRACE_SECONDS,
    PRINTED,
    STOPPED,
    Training,
    add_training_arguments,
    check_matches,
    find_program,
    training_of,
    write_job,
)

SUMMARY: Final = "write manifests of a job that restarts its pods after a snapshot, and apply them"
NAMESPACE: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035, because services have the job's name
MOST_LABEL: Final = 63
QUANTITY: Final = r"\d+(\.\d+)?([KMGT]i?)?"
PORT: Final = "29400"
WORKER: Final = "worker"  # name of the container
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  a mount point, not a temporary file

Manifest = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep submit kubernetes` to its parser."""
    parser.usage = "%(prog)s --image IMAGE --dir DIR [--OPTION VALUE ...] [-m] script ..."
    parser.epilog = (
        "Without --apply and --output, the manifests are printed. Pods get --grace-period seconds "
        f"(default here: {GRACE_SECONDS}) to exit."
    )
    add = parser.add_argument
    add("--image", required=True, help="container image with samestep and the script")
    add("--namespace", help="namespace of the job (default: that of kubectl)")
    claim = (
        "PersistentVolumeClaim that all pods mount at a path (default: the run's directory); "
        "may be repeated, for example for a data set"
    )
    add("--claim", action="append", default=[], metavar="CLAIM[:PATH]", help=claim)
    add("--apply", action="store_true", help="pass the manifests to kubectl")
    add_training_arguments(parser, "pod")


def main(arguments: argparse.Namespace) -> int:
    """Write the manifests, and apply them with --apply."""
    text = as_yaml(manifests(arguments))
    write_job(text, arguments.output or (None if arguments.apply else PRINTED), private=True)
    return apply(text) if arguments.apply else 0


def as_yaml(documents: Sequence[Manifest]) -> str:
    """Return documents as YAML. Raises `LaunchError` if PyYAML is missing."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        text = "writing manifests requires PyYAML: pip install 'samestep[kubernetes]'"
        raise LaunchError(text) from None
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=120))


def apply(text: str) -> int:
    """Pass manifests to kubectl and return its exit status."""
    command = [find_program("kubectl"), "apply", "--filename=-"]
    return subprocess.run(command, input=text, text=True, check=False).returncode


@dataclass(frozen=True)
class Pods:
    """The pods of a job, all alike. `claims` are names of volume claims by their paths."""

    training: Training
    image: str
    gpus: str | None
    claims: Mapping[str, str]

    @property
    def token_name(self) -> str | None:
        """Name of the secret with which several pods authenticate, None for a single pod."""
        return f"{self.training.name}-token" if self.training.nodes > 1 else None

    def spec(self, master: str) -> Manifest:
        """Return the spec of a pod; the first one has the host name `master`."""
        training = self.training
        options = {**training.environment, "SAMESTEP_DIR": training.directory}
        values = {name: _literal(value) for name, value in options.items()}
        if training.nodes > 1 and training.workers_per_node == 1:
            world_size = str(training.nodes)
            values |= {"WORLD_SIZE": world_size, "MASTER_ADDR": master, "MASTER_PORT": PORT}
        variables: list[Manifest] = [{"name": name, "value": values[name]} for name in values]
        if self.token_name:
            secret = {"name": self.token_name, "key": "token"}
            variables.append({"name": TOKEN, "valueFrom": {"secretKeyRef": secret}})
        # loader processes share more than the default of 64 MiB
        shared: Manifest = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        volumes = {SHARED_MEMORY: shared}
        for number, (path, claim) in enumerate(self.claims.items()):
            source = {"persistentVolumeClaim": {"claimName": claim}}
            volumes[path] = {"name": f"claim-{number}", **source}
        mounts = [{"name": each["name"], "mountPath": path} for path, each in volumes.items()]
        worker = {
            "name": WORKER,
            "image": self.image,
            "command": self._command(master),
            "env": variables,
            **self._resources(),
            "volumeMounts": mounts,
        }
        return {
            "terminationGracePeriodSeconds": training.grace_seconds,
            "containers": [worker],
            "volumes": list(volumes.values()),
        }

    def _command(self, master: str) -> list[str]:
        """Return the command of a pod: its only worker, or `samestep run`, which joins `master`."""
        workers, nodes = self.training.workers_per_node, self.training.nodes
        arguments = [_literal(argument) for argument in self.training.arguments]
        if workers == 1:
            return ["python", *arguments]
        several = ["--nodes", str(nodes), "--master", f"{master}:{PORT}"] if nodes > 1 else []
        return ["samestep", "run", "-n", str(workers), *several, *arguments]

    def _resources(self) -> Manifest:
        training, cpus = self.training, self.training.cpus_per_worker
        cpu = None if cpus is None else str(cpus * training.workers_per_node)
        limits = {"cpu": cpu, "memory": training.memory, "nvidia.com/gpu": self.gpus}
        amounts = {name: value for name, value in limits.items() if value is not None}
        return {"resources": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would replace by a variable of the container."""
    return text.replace("$(", "$$(")


def manifests(arguments: argparse.Namespace) -> list[Manifest]:
    """Return the manifests of a job. Raises `ConfigError` for values that Kubernetes refuses."""
    training = training_of(arguments)
    last_pod = f"{training.name}-{training.nodes - 1}"
    expected = "a DNS label of a-z, 0-9 and -, with a letter first"
    check_matches("--name", training.name, LABEL, expected)
    if len(last_pod) > MOST_LABEL:
        too_long = f"{last_pod} has more than {MOST_LABEL} characters"
        raise ConfigError(f"--name must be shorter, got {training.name}: {too_long}")
    check_matches("--namespace", arguments.namespace, NAMESPACE, "a DNS label of a-z, 0-9 and -")
    check_matches("--memory", training.memory, QUANTITY, "a quantity such as 64Gi")
    check_matches("--gpus", arguments.gpus, r"[1-9]\d*", "a number")
    check_matches("--dir", training.directory, r"/.*", "an absolute path in the pods")
    if training.environment.get("SAMESTEP_RESUME", "auto") != "auto":
        raise ConfigError(
            f"--resume must be auto, got {arguments.resume}: restarted pods would resume there"
        )
    if training.workers_per_node > 1 and training.nodes > MAX_NODES:
        raise ConfigError(
            f"--nodes must be at most {MAX_NODES} with several workers in a pod, got "
            f"{training.nodes}; use -n 1, so that each pod is a worker with the Job's own rank"
        )
    pods = Pods(training, arguments.image, arguments.gpus, claims_of(arguments.claim, training))
    manifests = indexed_job(pods)
    if pods.token_name:
        token = {"stringData": {"token": secrets.token_hex(32)}}
        manifests.insert(0, {**_manifest("v1", "Secret", pods.token_name), **token})
    if arguments.namespace:
        for manifest in manifests:
            manifest["metadata"]["namespace"] = arguments.namespace
    return manifests


def claims_of(texts: Sequence[str], training: Training) -> dict[str, str]:
    """Return claims by their paths. Raises `ConfigError` if the run is lost with its pods."""
    claims: dict[str, str] = {}
    for text in texts:
        claim, colon, path = text.partition(":")
        path = (path if colon else training.directory).rstrip("/")
        if not claim or not path.startswith("/") or path in claims:
            expected = "CLAIM or CLAIM:PATH with a unique absolute path"
            raise ConfigError(f"--claim must be {expected}, got {text}")
        claims[path] = claim
    outlives_pods = any(f"{training.directory}/".startswith(f"{path}/") for path in claims)
    if not outlives_pods and (training.nodes > 1 or "SAMESTEP_REMOTE" not in training.environment):
        raise ConfigError(
            "--dir must be in the path of a claim (--claim CLAIM[:PATH]), or a single pod must "
            f"have --remote URL, got {training.directory}, which is lost with its pod"
        )
    return claims


def _manifest(version: str, kind: str, name: str, spec: Manifest | None = None) -> Manifest:
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
    return manifest if spec is None else {**manifest, "spec": spec}


def indexed_job(pods: Pods) -> list[Manifest]:
    """Return an Indexed Job, and the headless service through which its pods find the first one."""
    name, nodes = pods.training.name, pods.training.nodes
    address, label = f"{name}-0.{name}", {"app.kubernetes.io/name": name}
    ignored = (
        {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"onExitCodes": {"containerName": WORKER, "operator": "In", "values": [STOPPED]}},
    )
    pod = {**pods.spec(address), "restartPolicy": "Never", "subdomain": name}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # for failures that the policy does not ignore
        "podFailurePolicy": {"rules": [{"action": "Ignore", **rule} for rule in ignored]},
        "template": {"metadata": {"labels": label}, "spec": pod},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(label)}
    services = [_manifest("v1", "Service", name, service)] if nodes > 1 else []
    return [*services, _manifest("batch/v1", "Job", name, job)]
