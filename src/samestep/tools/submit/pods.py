"""What a pod of a job runs, with what and where its files are, whichever kind of job it belongs to."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samestep.config import TOKEN
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.tools.submit.training import Training

PORT: Final = "29400"


@dataclass(frozen=True)
class Pods:
    """The pods of a job, all alike. `claims` are paths with the names of the claims that are mounted there."""

    training: Training
    image: str
    gpus: str | None
    claims: Mapping[str, str]

    @property
    def needs_token(self) -> bool:
        """Tell whether launchers of several pods meet, which know each other by a token."""
        return self.training.nodes > 1 and self.training.workers_per_node > 1

    def spec(
        self, container: str, *, master: str, place: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the spec of a pod with one container of that name; `place` is what tells it where it stands, if nobody else does."""
        options = {**self.training.environment, "SAMESTEP_DIR": self.training.directory}
        variables: list[dict[str, Any]] = [
            {"name": name, "value": _literal(value)} for name, value in options.items()
        ]
        if self.training.workers_per_node == 1:
            variables += [{"name": name, "value": value} for name, value in (place or {}).items()]
        if self.needs_token:
            secret = {"name": token_name(self.training.name), "key": "token"}
            variables.append({"name": TOKEN, "valueFrom": {"secretKeyRef": secret}})
        resources, volumes = self._resources(), self._volumes()
        return {
            "terminationGracePeriodSeconds": self.training.grace_seconds,
            "containers": [
                {
                    "name": container,
                    "image": self.image,
                    "command": self._command(master),
                    "env": variables,
                    **(
                        {"resources": {"requests": resources, "limits": dict(resources)}}
                        if resources
                        else {}
                    ),
                    "volumeMounts": [
                        {"name": volume["name"], "mountPath": path}
                        for path, volume in volumes.items()
                    ],
                }
            ],
            "volumes": list(volumes.values()),
        }

    def _command(self, master: str) -> list[str]:
        """Return the command of a pod: its only worker, or `samestep run`, which meets the others' at `master`."""
        arguments = [_literal(argument) for argument in self.training.arguments]
        if self.training.workers_per_node == 1:
            return ["python", *arguments]
        nodes = (
            ["--nodes", str(self.training.nodes), "--master", f"{master}:{PORT}"]
            if self.training.nodes > 1
            else []
        )
        return ["samestep", "run", "-n", str(self.training.workers_per_node), *nodes, *arguments]

    def _volumes(self) -> dict[str, dict[str, Any]]:
        """Return volumes by the paths at which they are mounted."""
        claims = {
            path: {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, (path, claim) in enumerate(self.claims.items())
        }
        # The usual 64 MiB are too few for what loader processes share.
        return {"/dev/shm": {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, **claims}  # noqa: S108

    def _resources(self) -> dict[str, str]:
        cpus = self.training.cpus_per_worker
        given = {
            "cpu": None if cpus is None else str(cpus * self.training.workers_per_node),
            "memory": self.training.memory,
            "nvidia.com/gpu": self.gpus,
        }
        return {name: value for name, value in given.items() if value is not None}


def claims_of(texts: Sequence[str], training: Training) -> dict[str, str]:
    """Read CLAIM[:PATH] as claims by their paths. Raises `ConfigError` where the run's snapshots would go with their pods."""
    claims: dict[str, str] = {}
    for text in texts:
        claim, colon, path = text.partition(":")
        path = (path if colon else training.directory).rstrip("/")
        if not claim or not path.startswith("/") or path in claims:
            raise ConfigError(
                f"--claim {text} was given; expected CLAIM or CLAIM:PATH, with an absolute path of its own"
            )
        claims[path] = claim
    outlives_pods = any(f"{training.directory}/".startswith(f"{path}/") for path in claims)
    if not outlives_pods and (training.nodes > 1 or "SAMESTEP_REMOTE" not in training.environment):
        raise ConfigError(
            f"--dir {training.directory} was given, which goes with its pod; expected it in a claim's path (--claim CLAIM[:PATH]), or "
            "for one pod also --remote URL"
        )
    return claims


def token_secret(name: str) -> dict[str, Any]:
    """Return a secret with a new token for the pods of a job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": token_name(name)},
        "stringData": {"token": secrets.token_hex(32)},
    }


def token_name(job: str) -> str:
    """Return the name of a job's secret."""
    return f"{job}-token"


def _literal(text: str) -> str:
    """Keep Kubernetes from taking $(NAME) for a variable of the container."""
    return text.replace("$(", "$$(")
