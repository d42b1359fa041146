"""A real Slurm cluster of two nodes on this machine, for the duration of a test."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.needs import needs
from tests.ports import free_port

# Nodes are named by loopback addresses, so that workers reach the first one as on a real cluster.
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 4  # of each node, whatever this machine has: tasks are not bound to CPUs
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
MOST_JOBS = 1_000_000
START_SECONDS = 240.0
STOP_SECONDS = 10.0
SECOND_OF_TWO_TASKS = {  # the variables that srun gives it
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
    """A running cluster: `environment` is that of its clients, `directory` has logs and state."""

    environment: Mapping[str, str]
    directory: Path

    def run(
        self, *command: object, timeout: float = 300.0, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a client such as srun and return its output.

        Raises `AssertionError` with the output if the command fails, unless `check` is False.
        """
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        printed = f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not check or done.returncode == 0, printed
        return done


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """Run a cluster of the two `NODES` with its state in `directory`. All jobs end with the block.

    Skips the test if Slurm is not installed. The directory's path must be short: it holds a socket.
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
    text = CONFIGURATION.format(
        host=host,
        controller_port=free_port(),
        user=pwd.getpwuid(os.geteuid()).pw_name,  # whatever USER says
        directory=directory,
        nodes=nodes,
        # Clusters that run at the same time need different job numbers: ports derive from them.
        first_job=1 + secrets.randbelow(MOST_JOBS),
    )
    (directory / "slurm.conf").write_text(text)


def _munge_files(directory: Path) -> list[str]:
    files = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    return [f"--socket={directory}/munge", *files]


@contextmanager
def _running(command: list[str], cluster: Slurm) -> Iterator[None]:
    with (cluster.directory / "daemons.log").open("ab") as output:
        environment = dict(cluster.environment)
        daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
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
        sinfo = cluster.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        if sinfo.stdout.split() == ["idle"] * len(NODES):
            return
        if time.monotonic() > deadline:
            logs = [f"{log.name}: {log.read_text()}" for log in cluster.directory.glob("*.log*")]
            states = sinfo.stdout + sinfo.stderr + "\n".join(logs)
            raise TimeoutError(f"nodes were not idle after {START_SECONDS:g} s: {states}")
        time.sleep(0.05)


def _end_jobs(cluster: Slurm) -> None:
    """Kill all jobs. A daemon that exits would leave their processes for the next daemon."""
    jobs = cluster.run("squeue", "--noheader", "--format=%i", check=False).stdout.split()
    if jobs:
        cluster.run("scancel", "--signal=KILL", "--full", *jobs, check=False)
        cluster.run("scancel", *jobs, check=False)
