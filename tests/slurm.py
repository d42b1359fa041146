"""A real Slurm cluster of two nodes on this machine, started by a test and gone with it."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.needs import needs
from tests.workers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Nodes are called by addresses of the loopback, so that workers find the first one as they would on
# a real cluster.
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 4  # as Slurm sees them; no task is bound to any
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
MOST_JOBS = 1_000_000
START_SECONDS = 30.0
STOP_SECONDS = 10.0
CONFIGURATION = """
ClusterName=samestep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid.%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
FirstJobId={first_job}
SchedulerParameters=bf_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up: `environment` is what a process needs to talk to it; logs and state are in `directory`."""

    environment: Mapping[str, str]
    directory: Path

    def run(
        self, *command: object, timeout: float = 60.0, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run srun, sbatch, scontrol and so on in the cluster's environment and return what it printed.

        Raises `AssertionError` with all that was printed where the command fails, unless `check` is
        False.
        """
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """Start a cluster of two nodes, `NODES`, whose whole state is in `directory`, and stop it with all its jobs.

    Skips the test where Slurm is not installed. The directory's path must be short: it holds a
    socket.
    """
    for command in COMMANDS:
        needs(command)
    _configure(directory)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    cluster = Slurm({**variables, "SLURM_CONF": str(directory / "slurm.conf")}, directory)
    with ExitStack() as exits:
        for daemon in (
            ["munged", "--foreground", "--force", *_munge_files(directory)],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        ):
            exits.enter_context(_running(daemon, cluster))
        _wait_until_idle(cluster)
        exits.callback(_end_jobs, cluster)
        yield cluster


def _configure(directory: Path) -> None:
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (directory / "state").mkdir()
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={free_port()} CPUs={CPUS}"
        for node in NODES
    )
    # jobs of clusters that run side by side would have the same numbers, and so ports
    first_job = 1 + secrets.randbelow(MOST_JOBS)
    user, port = getpass.getuser(), free_port()
    text = CONFIGURATION.format(
        host=host,
        controller_port=port,
        user=user,
        directory=directory,
        nodes=nodes,
        first_job=first_job,
    )
    (directory / "slurm.conf").write_text(text)


def _munge_files(directory: Path) -> list[str]:
    files = {
        "key-file": "munge.key",
        "socket": "munge",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
        "seed-file": "munge.seed",
    }
    return [f"--{option}={directory / name}" for option, name in files.items()]


@contextmanager
def _running(command: list[str], cluster: Slurm) -> Iterator[None]:
    with (cluster.directory / "daemons.log").open("ab") as output:
        daemon = subprocess.Popen(
            command, env=dict(cluster.environment), stdout=output, stderr=output
        )
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _wait_until_idle(cluster: Slurm) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        told = cluster.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        if told.stdout.split() == ["idle"] * len(NODES):
            return
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"{log.name}: {log.read_text(errors='replace')}"
                for log in sorted(cluster.directory.glob("*.log*"))
            )
            raise TimeoutError(
                f"Slurm's nodes were not idle after {START_SECONDS:g} s: {told.stdout}{told.stderr}\n{logs}"
            )
        time.sleep(0.05)


def _end_jobs(cluster: Slurm) -> None:
    """Kill what still runs: a daemon that ends leaves its jobs' processes behind, to be found again by the next one."""
    jobs = cluster.run("squeue", "--noheader", "--format=%i", check=False).stdout.split()
    if jobs:
        cluster.run("scancel", "--signal=KILL", "--full", *jobs, check=False)
        cluster.run("scancel", *jobs, check=False)
