"""`samestep submit`: fills in `slurm.sh` or `kubernetes.yaml`, a job that resumes."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from samestep.config import PREFIX, TOKEN, merge
from samestep.errors import ConfigError, LaunchError
from samestep.launch.local import add_options, given_options

SYSTEMS: Final = {
    "slurm": "write an sbatch script that requeues itself after a snapshot, and submit it",
    "kubernetes": "write manifests, for kubectl, of a job that restarts its pods after a snapshot",
}
EXAMPLES: Final = """\
examples:
  samestep submit slurm --nodes 2 -n 4 --gpus 4 --time 8:00:00 --dir runs/one train.py --epochs 10
  samestep submit slurm --setup 'source venv/bin/activate' --dir runs/one --dry-run train.py
  samestep submit kubernetes --image train:1 --nodes 4 --claim runs:/runs --dir /runs/one train.py

See also samestep submit slurm --help and samestep submit kubernetes --help.
"""
GRACE_SECONDS: Final = 120
MOST_GRACE_SECONDS: Final = 65535  # the limit of sbatch --signal
PRINTED: Final = "-"  # instead of a file name
PLACE: Final = re.compile(r"@\{(\w+)\}")  # in a template, at most one in a line
PORT: Final = "29400"
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  a mount point, not a temporary file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep submit` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    systems = parser.add_subparsers(dest="system", metavar="slurm|kubernetes", required=True)
    for name, summary in SYSTEMS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        system = systems.add_parser(name, help=summary, description=description, allow_abbrev=False)
        (_add_slurm if name == "slurm" else _add_kubernetes)(system.add_argument)
        _add_training(system, "node" if name == "slurm" else "pod")


def _add_slurm(add: Any) -> None:
    add("--time", metavar="LIMIT", help="time limit: minutes, 8:00:00 or 2-12:00:00")
    add("--partition", help="partition in which the job runs")
    add("--account", help="account that the job is charged to")
    sbatch = "any other option of sbatch, as in --sbatch=--qos=high; may be repeated"
    add("--sbatch", action="append", default=[], metavar="OPTION", help=sbatch)
    setup = (
        "shell command to run before the workers start, as in --setup 'source venv/bin/activate'; "
        "may be repeated. Workers then use the Python in PATH (default: the Python that runs this "
        "command)"
    )
    add("--setup", action="append", default=[], metavar="LINE", help=setup)
    dry_run = "print the script instead of submitting it"
    add("--dry-run", action="store_const", const=PRINTED, dest="output", help=dry_run)


def _add_kubernetes(add: Any) -> None:
    add("--image", required=True, help="container image with samestep and the script")
    add("--namespace", help="namespace of the job (default: that of kubectl)")
    claim = (
        "PersistentVolumeClaim that all pods mount at a path (default: the run's directory); "
        "may be repeated, for example for a data set"
    )
    add("--claim", action="append", default=[], metavar="CLAIM[:PATH]", help=claim)


def _add_training(parser: argparse.ArgumentParser, node: str) -> None:
    image = "--image IMAGE " if node == "pod" else ""
    parser.usage = f"%(prog)s {image}--dir DIR [--OPTION VALUE ...] [-m] script ..."
    parser.epilog = f"The default of --grace-period is {GRACE_SECONDS} seconds here."
    add = parser.add_argument
    add("--name", help="name of the job (default: the name of the script)")
    add("--nodes", type=int, default=1, metavar="N", help=f"{node}s (default: 1)")
    workers = f"workers per {node} (default: 1)"
    add("-n", "--workers", type=int, default=1, metavar="N", help=workers)
    add("--gpus", metavar="N", help=f"GPUs per {node}")
    add("--cpus", type=int, metavar="N", help="CPUs per worker and its loader processes")
    add("--memory", metavar="SIZE", help=f"memory per {node}")
    instead = "submitting" if node == "node" else "printing"
    add("--output", metavar="FILE", help=f"write the job to FILE instead of {instead} it")
    add("-m", "--module", action="store_true", help="treat script as a module name")
    add_options(parser)
    add("script", help="a Python script, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def main(arguments: argparse.Namespace) -> int:
    """Write the job, submit it, and return the exit status."""
    options, values = _checked(arguments)
    if arguments.system == "kubernetes":
        text = _manifests(arguments, options, values)
        _write(text, arguments.output or PRINTED, mode=0o600)  # it may have a secret
        return 0
    text = _batch_script(arguments, options, values)
    if arguments.output != PRINTED:
        try:  # Slurm writes the job's output to this directory, but does not create it
            Path(arguments.dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create --dir {arguments.dir}: {error}") from error
    if arguments.output is None:
        print(_submit(text))
    else:
        _write(text, arguments.output)
    return 0


def _checked(arguments: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the run's options as environment variables, and what both templates need."""
    for flag in ("nodes", "workers", "cpus"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {value}")
    options = given_options(arguments)
    if arguments.dir is None:
        raise ConfigError("--dir is required: a directory that all nodes share, to resume from")
    grace = merge({"grace_period": GRACE_SECONDS, **options}, {}).grace_period
    if not 0 < grace <= MOST_GRACE_SECONDS:
        expected = f"above 0 and at most {MOST_GRACE_SECONDS} seconds"
        raise ConfigError(f"--grace-period must be {expected}, got {arguments.grace_period}")
    script = arguments.script
    stem = script.rpartition(".")[2] if arguments.module else Path(script).stem
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train"
    command = [*(["-m"] if arguments.module else []), script, *arguments.arguments]
    given = {f"{PREFIX}{name.upper()}": str(getattr(arguments, name)) for name in options}
    return (
        {f"{PREFIX}GRACE_PERIOD": str(GRACE_SECONDS), **given, "SAMESTEP_DIR": arguments.dir},
        {"name": name, "grace_seconds": math.ceil(grace), "command": command},
    )


def _fill_in(template: str, values: Mapping[str, str | Sequence[str] | None]) -> str:
    """Return the text of a file in this folder with values in the places `@{name}`.

    A line is repeated for each element of a sequence, and left out without a value.
    """
    lines = []
    for line in Path(__file__).with_name(template).read_text().splitlines():
        place = PLACE.search(line)
        value = values[place[1]] if place else ""
        elements = [value] if isinstance(value, str) else value or ()
        lines += [line.replace(place[0], each) if place else line for each in elements]
    return "\n".join(lines) + "\n"


def _write(text: str, output: str, *, mode: int | None = None) -> None:
    """Write a job to a file, with a mode if only its owner may read it, or to the terminal."""
    if output == PRINTED:
        sys.stdout.write(text)
        return
    try:
        with open(output, "w", opener=partial(os.open, mode=mode or 0o666)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # of a file that existed before
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error}") from error


def _submit(script: str) -> str:
    """Pass a script to sbatch and return the job's id. Raises `LaunchError` if sbatch fails."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        remedy = "pass --output FILE, and submit the file where sbatch is"
        raise LaunchError(f"sbatch not found in PATH; {remedy}")
    command = [sbatch, "--parsable"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"sbatch exited with status {done.returncode}: {done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout.strip().partition(";")[0]


def _batch_script(
    arguments: argparse.Namespace, options: Mapping[str, str], values: Mapping[str, Any]
) -> str:
    directory = str(Path(arguments.dir).absolute())
    variables = {**options, "SAMESTEP_DIR": directory}
    # srun ignores the CPUs of sbatch
    command = [] if arguments.cpus is None else [f"--cpus-per-task={arguments.cpus}"]
    command += ["python" if arguments.setup else sys.executable, *values["command"]]
    names = "nodes", "workers", "cpus", "gpus", "memory", "time", "partition", "account", "sbatch"
    directives = {
        **{name: getattr(arguments, name) for name in names},
        "name": values["name"],
        "grace_seconds": values["grace_seconds"],
        "folder": Path.cwd(),
        "output": f"{directory.replace('%', '%%')}/slurm-%j.out",
    }
    return _fill_in(
        "slurm.sh",
        {
            **{name: _directive(name, value) for name, value in directives.items()},
            "setup": arguments.setup,
            "variables": [f"{name}={shlex.quote(value)}" for name, value in variables.items()],
            "command": shlex.join(command),
        },
    )


def _directive(name: str, value: Any) -> Any:
    """Quote a value, or each of a list, for sbatch: a backslash is an escape, even in quotes."""
    if value is None or isinstance(value, list):
        return value and [_directive(name, each) for each in value]
    if "\\" in str(value) or not str(value).isprintable():
        problem = "sbatch accepts no backslash or control character"
        raise ConfigError(f"{problem}, got {str(value)!r} as the job's {name}")
    return shlex.quote(str(value))


def _manifests(
    arguments: argparse.Namespace, options: Mapping[str, str], values: Mapping[str, Any]
) -> str:
    name, nodes, workers = values["name"], arguments.nodes, arguments.workers
    if arguments.resume not in {None, "auto"}:
        raise ConfigError(
            f"--resume must be auto, got {arguments.resume}: restarted pods would resume there"
        )
    master, token_name = f"{name}-0.{name}", f"{name}-token"
    variables, command = dict(options), ["python", *values["command"]]
    if workers > 1:
        several = ["--nodes", str(nodes), "--master", f"{master}:{PORT}"] if nodes > 1 else []
        command = ["samestep", "run", "-n", str(workers), *several, *values["command"]]
    elif nodes > 1:
        variables |= {"WORLD_SIZE": str(nodes), "MASTER_ADDR": master, "MASTER_PORT": PORT}
    secret = {"secretKeyRef": {"name": token_name, "key": "token"}}
    environment = [
        *({"name": key, "value": _literal(text)} for key, text in variables.items()),
        *([{"name": TOKEN, "valueFrom": secret}] if nodes > 1 else []),
    ]
    volumes = _volumes(arguments)
    filled = {
        **values,
        "namespace": arguments.namespace,
        "token_name": token_name,
        "token": secrets.token_hex(32),
        "nodes": nodes,
        "image": arguments.image,
        "command": [_literal(text) for text in command],
        "variables": environment,
        "resources": _resources(arguments),
        "mounts": [{"name": each["name"], "mountPath": path} for path, each in volumes.items()],
        "volumes": list(volumes.values()),
    }
    text = _fill_in("kubernetes.yaml", {key: _as_yaml(value) for key, value in filled.items()})
    return text if nodes > 1 else text.rpartition("---\n")[2]  # only the job


def _resources(arguments: argparse.Namespace) -> dict[str, Any] | None:
    cpu = None if arguments.cpus is None else str(arguments.cpus * arguments.workers)
    limits = {"cpu": cpu, "memory": arguments.memory, "nvidia.com/gpu": arguments.gpus}
    amounts = {name: value for name, value in limits.items() if value is not None}
    return {"requests": amounts, "limits": amounts} if amounts else None


def _volumes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return volumes by their paths. Raises `ConfigError` if the run is lost with its pods."""
    # loader processes share more than the default of 64 MiB
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    volumes: dict[str, Any] = {SHARED_MEMORY: shared}
    for number, text in enumerate(arguments.claim):
        claim, colon, path = text.partition(":")
        path = (path if colon else arguments.dir).rstrip("/")
        if not claim or not path.startswith("/") or path in volumes:
            expected = "CLAIM or CLAIM:PATH with a unique absolute path"
            raise ConfigError(f"--claim must be {expected}, got {text}")
        source = {"persistentVolumeClaim": {"claimName": claim}}
        volumes[path] = {"name": f"claim-{number}", **source}
    claimed = [path for path in volumes if path != SHARED_MEMORY]
    outlives_pods = any(f"{arguments.dir}/".startswith(f"{path}/") for path in claimed)
    if not outlives_pods and (arguments.nodes > 1 or arguments.remote is None):
        raise ConfigError(
            "--dir must be in the path of a claim (--claim CLAIM[:PATH]), or a single pod must "
            f"have --remote URL, got {arguments.dir}, which is lost with its pod"
        )
    return volumes


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would replace by a variable of the container."""
    return text.replace("$(", "$$(")


def _as_yaml(value: Any) -> Any:
    """Return JSON, which is YAML if no character is written as a pair of surrogates."""
    if value is None or isinstance(value, list):
        return value and [_as_yaml(each) for each in value]
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
