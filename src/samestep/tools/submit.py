"""`samestep submit`: fills in `slurm.sh` or `kubernetes.yaml`, a job that resumes."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from samestep.config import PREFIX, TOKEN, merge
from samestep.errors import ConfigError
from samestep.launch.local import add_options, given_options

SYSTEMS: Final = {
    "slurm": "write a script, for sbatch, that requeues itself after a snapshot",
    "kubernetes": "write manifests, for kubectl, of a job that restarts its pods after a snapshot",
}
EXAMPLES: Final = """\
examples:
  samestep submit slurm --nodes 2 -n 4 --dir runs/one --output job.sh train.py --epochs 10
  sbatch --gpus-per-node=4 --cpus-per-task=8 --time=8:00:00 job.sh

  samestep submit kubernetes --nodes 4 --image train:1 --claim runs:/runs --dir /runs/one \\
      --output job.yaml train.py
  kubectl apply -f job.yaml

See also samestep submit slurm --help and samestep submit kubernetes --help.
"""
GRACE_SECONDS: Final = 120
MOST_GRACE_SECONDS: Final = 65535  # the limit of sbatch --signal
PLACE: Final = re.compile(r"@\{(\w+)\}")  # in a template, at most one in a line
PORT: Final = "29400"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep submit` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    systems = parser.add_subparsers(dest="system", metavar="slurm|kubernetes", required=True)
    for name, summary in SYSTEMS.items():
        node, needed = "node", "--dir DIR --output FILE"
        if name == "kubernetes":
            node, needed = "pod", f"--image IMAGE --claim CLAIM:PATH {needed}"
        system = systems.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            usage=f"%(prog)s {needed} [--OPTION VALUE ...] [-m] script ...",
            epilog=f"The default of --grace-period is {GRACE_SECONDS} seconds here.",
            allow_abbrev=False,
        )
        add = system.add_argument
        add("--output", required=True, metavar="FILE", help="file to write; - prints the job")
        add("--nodes", type=int, default=1, metavar="N", help=f"{node}s (default: 1)")
        workers = f"workers per {node} (default: 1)"
        add("-n", "--workers", type=int, default=1, metavar="N", help=workers)
        if name == "kubernetes":
            add("--name", help="name of the job (default: the name of the script)")
            add("--image", required=True, help="container image with samestep and the script")
            claim = "PersistentVolumeClaim that has the run's directory, and where pods mount it"
            add("--claim", required=True, metavar="CLAIM:PATH", help=claim)
        add("-m", "--module", action="store_true", help="treat script as a module name")
        add_options(system)
        add("script", help="a Python script, or a module with -m")
        add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def main(arguments: argparse.Namespace) -> int:
    """Write the job and return the exit status."""
    for flag in ("nodes", "workers"):
        if (value := getattr(arguments, flag)) < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {value}")
    options = given_options(arguments)
    if arguments.dir is None:
        raise ConfigError("--dir is required: a directory that all nodes share, to resume from")
    grace = merge({"grace_period": GRACE_SECONDS, **options}, {}).grace_period
    if not 0 < grace <= MOST_GRACE_SECONDS:
        expected = f"above 0 and at most {MOST_GRACE_SECONDS} seconds"
        raise ConfigError(f"--grace-period must be {expected}, got {arguments.grace_period}")
    given = {f"{PREFIX}{name.upper()}": str(getattr(arguments, name)) for name in options}
    variables = {f"{PREFIX}GRACE_PERIOD": str(GRACE_SECONDS), **given}
    command = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    values: dict[str, str | list[str]] = {
        "nodes": str(arguments.nodes),
        "workers": str(arguments.workers),
        "grace_seconds": str(math.ceil(grace)),
    }
    if arguments.system == "slurm":
        values["command"] = shlex.join([sys.executable, *command])
        values["variables"] = [f"{key}={shlex.quote(text)}" for key, text in variables.items()]
        text = _fill_in("slurm.sh", values)
    else:
        text = _fill_in("kubernetes.yaml", values | _for_pods(arguments, variables, command))
        if arguments.nodes == 1:
            text = text.rpartition("---\n")[2]  # only the job
    _write(text, arguments.output)
    return 0


def _write(text: str, output: str) -> None:
    """Write a job to a file that only its owner can read, because it may have a secret."""
    if output == "-":
        sys.stdout.write(text)
        return
    try:
        with open(output, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)  # of a file that existed before
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error}") from error


def _fill_in(template: str, values: Mapping[str, str | Sequence[str]]) -> str:
    """Return the text of a file in this folder with values in the places `@{name}`.

    A line is repeated for each element of a list.
    """
    lines = []
    for line in Path(__file__).with_name(template).read_text().splitlines():
        place = PLACE.search(line)
        value = values[place[1]] if place else ""
        elements = [value] if isinstance(value, str) else value
        lines += [line.replace(place[0], each) if place else line for each in elements]
    return "\n".join(lines) + "\n"


def _for_pods(
    arguments: argparse.Namespace, variables: Mapping[str, str], command: Sequence[str]
) -> dict[str, str | list[str]]:
    """Return what the manifests need beside sizes, as YAML."""
    if arguments.resume not in {None, "auto"}:
        raise ConfigError(
            f"--resume must be auto, got {arguments.resume}: restarted pods would resume there"
        )
    name, nodes, workers = arguments.name, arguments.nodes, arguments.workers
    if name is None:
        stem = arguments.script.rpartition(".")[2] if arguments.module else arguments.script
        name = re.sub(r"[^a-z0-9]+", "-", Path(stem).stem.lower()).strip("-") or "train"
    master, token_name = f"{name}-0.{name}", f"{name}-token"
    if workers > 1:
        several = ["--nodes", str(nodes), "--master", f"{master}:{PORT}"] if nodes > 1 else []
        command = ["samestep", "run", "-n", str(workers), *several, *command]
    else:
        command = ["python", *command]
        address = {"WORLD_SIZE": str(nodes), "MASTER_ADDR": master, "MASTER_PORT": PORT}
        variables = {**variables, **(address if nodes > 1 else {})}
    secret = {"secretKeyRef": {"name": token_name, "key": "token"}}
    environment: list[object] = [
        *({"name": key, "value": _literal(text)} for key, text in variables.items()),
        *([{"name": TOKEN, "valueFrom": secret}] if nodes > 1 else []),
    ]
    claim, path = _claim(arguments)
    return {
        "name": _as_yaml(name),
        "token_name": _as_yaml(token_name),
        "token": secrets.token_hex(32),
        "image": _as_yaml(arguments.image),
        "claim": _as_yaml(claim),
        "path": _as_yaml(path),
        "command": [_as_yaml(_literal(text)) for text in command],
        "variables": [_as_yaml(variable) for variable in environment],
    }


def _claim(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the claim and its path. Raises `ConfigError` if the run is lost with its pods."""
    claim, _, path = arguments.claim.partition(":")
    path = path.rstrip("/")
    if not claim or not path.startswith("/"):
        expected = "CLAIM:PATH with an absolute path"
        raise ConfigError(f"--claim must be {expected}, got {arguments.claim}")
    if not f"{arguments.dir}/".startswith(f"{path}/"):
        expected = f"in the path of the claim, {path}"
        raise ConfigError(
            f"--dir must be {expected}, got {arguments.dir}, which is lost with its pod"
        )
    return claim, path


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would replace by a variable of the container."""
    return text.replace("$(", "$$(")


def _as_yaml(value: object) -> str:
    """Return JSON, which is YAML if no character is written as a pair of surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
