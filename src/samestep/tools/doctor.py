"""`samestep doctor`: list what slows a run down or loses its files without an error, with fixes."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import psutil

from samestep.cluster import GLOO_INTERFACE as GLOO
from samestep.cluster import LOOPBACK_INTERFACE, OUTSIDE_ADDRESS, find_process, interface_towards
from samestep.config import PREFIX
from samestep.errors import ConfigError
from samestep.host import GREEN, RED, colored, counted, read_file, usable_cores, whole_number
from samestep.launch.local import count_gpus

COMMAND_SECONDS: Final = 3.0  # a command that queries hardware may hang
INFINIBAND: Final = "/sys/class/infiniband"
VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "ifb", "tun", "tap")
IN_MEMORY: Final = ("tmpfs", "ramfs")
OF_CONTAINER: Final = ("overlay", "aufs")
SEVERITIES: Final = ("problem", "note")  # the most urgent first


@dataclass(frozen=True)
class Finding:
    """One sentence, and the command or option that fixes it.

    A "problem" would make a run lose its files or very slow; a "note" may slow it down.
    """

    severity: Literal["problem", "note"]
    text: str
    fix: str


note, problem = partial(Finding, "note"), partial(Finding, "problem")


class System:
    """This machine. Values that are missing or refused are None or empty; no method raises."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, root: Path = Path("/")
    ) -> None:
        self.environment: Mapping[str, str] = os.environ if environment is None else environment
        self._root = root

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        with suppress(OSError):
            return sorted(entry.name for entry in (self._root / path.lstrip("/")).iterdir())
        return []

    @staticmethod
    @cache
    def run(*command: str) -> str:
        """Return the output of a command, empty if it fails."""
        with suppress(OSError, subprocess.SubprocessError):
            null, limit = subprocess.DEVNULL, COMMAND_SECONDS
            output = subprocess.check_output(command, stdin=null, stderr=null, timeout=limit)
            return output.decode(errors="replace").strip()
        return ""

    def gpus(self) -> int:
        """Return the number of GPUs that the driver reports, without initializing CUDA here."""
        return len(re.findall(r"^GPU \d+:", self.run("nvidia-smi", "-L"), re.MULTILINE))

    def usable_cores(self) -> int:
        """Return the number of cores that this process may use."""
        return usable_cores(lambda path: read_file(self._root / path.lstrip("/")))

    def locked_memory(self) -> int | None:
        """Return how many bytes a process may lock, None without a limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def interfaces(self) -> dict[str, Any]:
        """Return the network interfaces: `isup`, and `speed` in Mbit/s or 0, by name."""
        with suppress(OSError):
            return dict(sorted(psutil.net_if_stats().items()))
        return {}

    def interface_towards(self, host: str) -> str | None:
        """Return the network interface through which a host is reached."""
        return interface_towards(host)

    def mounts(self) -> list[tuple[str, str]]:
        """Return mount points with the kinds of their file systems, in the order of mounting."""
        with suppress(OSError):
            return [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
        return []


@dataclass(frozen=True)
class Case:
    """A run with `workers` on this `system` and its files in `directory`.

    `gpus` are those that torch sees, which is built for CUDA `build`; None if it was not asked.
    """

    system: System
    directory: Path
    workers: int
    gpus: int | None = None
    build: str | None = None


def check_gpus(case: Case) -> Iterator[Finding]:
    """Report GPUs that torch does not see, which a run leaves unused."""
    present, seen, environment = case.system.gpus(), case.gpus, case.system.environment
    if seen is None or seen >= present:
        return
    if case.build and (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        why = f"CUDA_VISIBLE_DEVICES={visible}"
        yield note(f"torch sees {seen} of {present} GPUs: {why}.", "unset CUDA_VISIBLE_DEVICES")
        return
    driver = re.search(r"CUDA Version:\s*(\d+\.\d+)", case.system.run("nvidia-smi"))
    yield problem(
        f"torch sees {seen} of {counted(present, 'GPU')}. It is built for "
        f"{f'CUDA {case.build}' if case.build else 'CPUs only'}; the driver supports CUDA "
        f"{driver[1] if driver else 'of an unknown version'}.",
        "install torch built for a CUDA version that the driver supports; "
        'python -c "import torch; torch.cuda.init()" shows other reasons',
    )


def check_processors(case: Case) -> Iterator[Finding]:
    """Compare workers and their threads with the cores that this process may use."""
    environment, cores = case.system.environment, case.system.usable_cores()
    threads = max(1, whole_number(environment.get("SAMESTEP_THREADS")) or 1)
    run = f"{counted(case.workers, 'worker')} with {counted(threads, 'thread')} each"
    if case.workers * threads > cores:
        yield problem(
            f"{run} exceed the {counted(cores, 'core')} of this process and wait for each other.",
            f"samestep run -n {max(1, cores // threads)}, or give this process more cores "
            "(docker run --cpus, resources.limits.cpu, srun --cpus-per-task)",
        )


def check_locked_memory(case: Case) -> Iterator[Finding]:
    """Report a limit of locked memory on a machine with InfiniBand, which NCCL does not name."""
    locked, devices = case.system.locked_memory(), case.system.names(INFINIBAND)
    if devices and locked is not None:
        yield problem(
            f"a process may lock {locked} bytes of memory, but NCCL locks its buffers to register "
            f"them with {', '.join(devices)}.",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in the "
            "unit of slurmd)",
        )


def check_interfaces(case: Case) -> Iterator[Finding]:
    """Report an interface that reaches no other host, and a faster one than samestep chooses."""
    system, several = case.system, False
    with suppress(ConfigError):  # a run reports it
        process = find_process(system.environment)
        several = process.world_size > process.local_world_size
    if several and system.environment.get(GLOO) == LOOPBACK_INTERFACE:
        yield problem(
            f"{GLOO}={LOOPBACK_INTERFACE} is the loopback interface, which reaches no other host, "
            "but this run has several hosts.",
            f"unset {GLOO}",
        )
    if GLOO in system.environment:
        return
    interfaces, master = system.interfaces(), system.environment.get("MASTER_ADDR")
    towards = system.interface_towards
    chosen = (master and towards(master)) or towards(OUTSIDE_ADDRESS)
    if chosen is None or chosen not in interfaces:
        return
    speeds = {name: interface.speed for name, interface in interfaces.items()}
    usable = [name for name in speeds if interfaces[name].isup and not name.startswith(VIRTUAL)]
    fastest = max(usable, key=speeds.__getitem__, default=chosen)
    if speeds[fastest] > speeds[chosen] > 0:
        yield (problem if several else note)(
            f"workers on other hosts are reached through {chosen} ({speeds[chosen] / 1000:g} "
            f"Gbit/s), but {fastest} is faster ({speeds[fastest] / 1000:g} Gbit/s).",
            f"{GLOO}={fastest} NCCL_SOCKET_IFNAME={fastest}, if it leads to the other hosts, too",
        )


def check_launcher(case: Case) -> Iterator[Finding]:
    """Report a shell of Slurm in which only one worker would start."""
    environment = case.system.environment
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment and tasks != "1":
        job = f"Slurm job {environment['SLURM_JOB_ID']} with {tasks} tasks"
        shell = f"this is the batch script or a shell of {job}"
        yield note(f"{shell}; a script started here is one worker.", "srun python train.py")


def check_directory(case: Case) -> Iterator[Finding]:
    """Report a directory that is lost with a machine or a container."""
    directory, path = case.directory, PurePosixPath(case.directory.absolute())
    mounts = [mount for mount in case.system.mounts() if path.is_relative_to(mount[0])]
    # max returns the first of several, but the last one mounted hides the others
    _, kind = max(reversed(mounts), key=lambda mount: len(mount[0]), default=("", ""))
    if kind in IN_MEMORY:
        yield problem(
            f"{directory} is in memory ({kind}): snapshots take memory from training, and are lost "
            "when the machine restarts.",
            "pass --dir with a directory on a disk",
        )
    elif kind in OF_CONTAINER:
        text = f"{directory} is in the container's own file system ({kind}), and is lost with it."
        pod_fix = (
            "mount a PersistentVolumeClaim and pass a --dir in it "
            "(samestep submit kubernetes --claim NAME:/runs --dir /runs/one)"
        )
        in_pod = "KUBERNETES_SERVICE_HOST" in case.system.environment
        docker_fix = "docker run -v /data/runs:/runs, and a --dir in it"
        yield problem(text, pod_fix) if in_pod else note(text, docker_fix)


CHECKS: Final[Sequence[Callable[[Case], Iterator[Finding]]]] = (
    *(check_gpus, check_processors, check_locked_memory, check_interfaces, check_launcher),
    check_directory,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep doctor` to its parser."""
    parser.epilog = "Exit status: 0 if no problem was found, 1 otherwise."
    directory = "directory of the run (default: SAMESTEP_DIR, or the current directory)"
    parser.add_argument("--dir", type=Path, help=directory)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    workers = (
        "number of workers that will run on this machine (default: one per GPU, or one per core)"
    )
    parser.add_argument("-n", "--workers", type=int, help=workers)


def main(options: argparse.Namespace) -> int:
    """Run `samestep doctor` and return its exit status. Raises `ConfigError` for wrong use."""
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"-n must be at least 1, got {options.workers}")
    system, seen, build = System(), None, None
    directory = options.dir or Path(system.environment.get(f"{PREFIX}DIR", ""))
    if system.gpus():
        seen, build = count_gpus(), import_module("torch").version.cuda
    workers = options.workers or default_workers(system)
    findings = examine(Case(system, directory.absolute(), workers, seen, build))
    is_healthy = not any(finding.severity == "problem" for finding in findings)
    if options.json:
        report = {"healthy": is_healthy, "workers": workers, "findings": [*map(asdict, findings)]}
        text = json.dumps(report, indent=1)
    else:  # variables may hold any bytes
        text = as_text(findings).encode(errors="backslashreplace").decode()
        verdict, end, rest = text.partition("\n")
        text = colored(verdict, GREEN if is_healthy else RED, sys.stdout) + end + rest
    sys.stdout.write(f"{text}\n")
    return 0 if is_healthy else 1


def default_workers(system: System) -> int:
    """Return one worker per GPU, or one per core."""
    return system.gpus() or system.usable_cores()


def examine(case: Case) -> list[Finding]:
    """Return the findings of all checks, the most urgent first."""
    findings = [finding for check in CHECKS for finding in check(case)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def as_text(findings: Sequence[Finding]) -> str:
    """Return the verdict and the findings."""
    problems = sum(finding.severity == "problem" for finding in findings)
    lines = [f"{counted(problems, 'problem')} to fix" if problems else "no problems"]
    for number, finding in enumerate(findings):
        lines += [""] * (number == 0)
        lines += [f"{finding.severity:7}  {finding.text}", f"{'':7}  do: {finding.fix}"]
    return "\n".join(lines)
