"""Attacks on a job under each launcher, phase by phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.ports import free_port
from tests.security.attackers import ATTACKS, Run, attack

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
TOKEN = "a token of the attacked runs"
PHASES = ("forming", "running", "resuming")
WAIT_SECONDS = 240.0
LAUNCH = """
import sys
from pathlib import Path
import samestep as ss
from tests.security.job import main
ss.launch(lambda: main(Path(sys.argv[1])), workers=2)
"""

Command = Callable[[Path], Sequence[Sequence[str]]]  # of all hosts


def _samestep(directory: Path) -> Sequence[Sequence[str]]:
    return [[sys.executable, "-m", "samestep", "run", "-n", "2", str(JOB), str(directory)]]


def _nodes(directory: Path) -> Sequence[Sequence[str]]:
    hosts = ["--nodes", "2", "--master", f"127.0.0.1:{free_port()}", "-n", "1"]
    run = [sys.executable, "-m", "samestep", "run", *hosts, str(JOB), str(directory)]
    return [run, run]


def _launch(directory: Path) -> Sequence[Sequence[str]]:
    return [[sys.executable, "-c", LAUNCH, str(directory)]]


def _torchrun(directory: Path) -> Sequence[Sequence[str]]:
    place = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    options = [*place, "--max-restarts=1"]
    return [[sys.executable, "-m", "torch.distributed.run", *options, str(JOB), str(directory)]]


def _mpi(directory: Path) -> Sequence[Sequence[str]]:
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return [["mpirun", *options, sys.executable, str(JOB), str(directory)]]


def _slurm(directory: Path) -> Sequence[Sequence[str]]:
    return [["srun", "-n", "2", "-N", "1", "-O", sys.executable, str(JOB), str(directory)]]


LAUNCHERS: Mapping[str, Command] = {
    "samestep run": _samestep,
    "samestep run --nodes": _nodes,
    "ss.launch": _launch,
    "torchrun": _torchrun,
    "mpirun": _mpi,
    "srun": _slurm,
}


@dataclass
class Attacked:
    """The result of a job: of its model if it ended, what it printed, and what attackers saw."""

    result: str | None = None
    output: str = ""
    exploded: bool = False
    seen: dict[str, dict[str, str]] = field(default_factory=dict)  # by phase and attack


def attacked(
    launcher: str,
    directory: Path,
    attacks: Mapping[str, Iterable[str]],
    token: str | None = TOKEN,
    environment: Mapping[str, str] | None = None,
) -> Attacked:
    """Run a job and attack it: `attacks` has the names of attacks by phase."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    variables["SAMESTEP_TIMEOUT"] = "600"  # attacks last longer than workers usually wait
    variables |= environment or {}
    variables |= {} if token is None else {"SAMESTEP_TOKEN": token}
    outcome = Attacked()
    log = directory / "output"
    bomb = directory / "exploded"
    for _ in range(2):  # started again, unless the launcher restarts the workers itself
        with _started(LAUNCHERS[launcher](directory), variables, log) as processes:
            for phase in PHASES:
                if phase in outcome.seen or not _wait(directory, phase, processes):
                    continue
                pids = [int(path.name[4:]) for path in directory.glob("pid-*")]
                run = Run.of([*(process.pid for process in processes), *pids], bomb)
                outcome.seen[phase] = attack(run, attacks.get(phase, ()))
                (directory / f"{phase}.go").touch()
            _wait_for(lambda: all(process.poll() is not None for process in processes))
        if (directory / "result").exists() or "running" not in outcome.seen:
            break
    with suppress(FileNotFoundError):
        outcome.result = (directory / "result").read_text()
    outcome.output, outcome.exploded = log.read_text(errors="replace"), bomb.exists()
    return outcome


def everything() -> dict[str, Iterable[str]]:
    """Return all attacks in all phases."""
    return dict.fromkeys(PHASES, tuple(ATTACKS))


@contextmanager
def _started(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    with log.open("ab") as output:
        started = [
            subprocess.Popen(
                command, env=dict(environment), stdout=output, stderr=output, process_group=0
            )
            for command in commands
        ]
    try:
        yield started
    finally:
        for process in started:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(directory: Path, phase: str, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait until a phase is reached; return False if the job ends before."""
    reached = directory / f"{phase}.reached"
    _wait_for(lambda: reached.exists() or all(process.poll() is not None for process in processes))
    return reached.exists()


def _wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
