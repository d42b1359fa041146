"""Hosts with a network between them: four jobs, trained by samestep and its peers.

usage: python -m benchmarks.network [--hosts 2] [--turns 8] [--rates 1gbit 10gbit] [--workers 1 2]
                                    [--jobs JOB] [--contenders NAME]

Run as root, on Linux with iproute2 and util-linux. The hosts are network namespaces, each with a
link of limited rate to the other one, or to a switch if there are four. This command makes and
removes them. Workers have one thread each. All contenders start a job, and then train in turns of
seconds, while the others are stopped, because a machine's speed may change within a minute. Every
ratio compares turns that follow each other. Contenders that exchange gradients in 16 bits have
their own tables. At the end, every bit of the first steps is compared between samestep on one
worker and on the workers of all hosts; the exit status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, NamedTuple

from benchmarks.contenders import CONTENDERS
from benchmarks.contenders.stopwatch import LOGS
from benchmarks.contenders.with_ideal_link import BURST, HOSTS, RATE
from benchmarks.jobs import JOBS, Job
from benchmarks.measure import LIMIT_SECONDS, spread, values_in
from benchmarks.turns import in_turn, table
from samestep.tools.trace import RunTrace, read_traces
from samestep.tools.verify import print_report

# ours first; the last compute without a network, and count the time of their messages
FULL = ("samestep", "ddp", "ddp-fused", "zero1", "ideal")
IN_16_BITS = ("samestep-16", "ddp-fp16", "ideal-16")
PREFIX = "samestep-bench"
DEVICE = "cable"
SWITCH = "switch"
PORT = 29533
BURST_SECONDS = 0.002  # at full rate; at least that of a large segment
WARM_UP_STEPS = 4
TURN_SECONDS = 2.0
TURN_STEPS = 6  # a turn takes longer if these do
VERIFIED_STEPS = 2
VERIFIED_LANES = 4


def main() -> int:
    """Measure, print medians with their range, and verify; return the exit status."""
    options = arguments()
    # so that the namespaces are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for rate in options.rates:
        with hosts(rate, options.hosts) as names:
            for workers in options.workers:
                measure(names, rate, workers, options)
    with hosts(options.rates[0], options.hosts) as names:
        ours = [n for n in options.contenders if CONTENDERS[n].module == "with_samestep"]
        return max((verify(names, n, job) for job in options.jobs for n in ours), default=0)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    add = parser.add_argument
    add("--hosts", type=int, choices=(2, 4), default=2, help="default: 2")
    add("--turns", type=int, default=8, help="of each contender (default: 8)")
    rates = "of the link, each way, as tc understands them (default: 1gbit 10gbit)"
    add("--rates", nargs="+", default=["1gbit", "10gbit"], help=rates)
    workers = "per host (default: 1 2)"
    add("--workers", nargs="+", type=int, choices=(1, 2), default=[1, 2], help=workers)
    add("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="default: all")
    every = [*FULL, *IN_16_BITS]
    add("--contenders", nargs="+", choices=every, default=every, help="default: all")
    return parser.parse_args()


def measure(names: Sequence[str], rate: str, workers: int, options: argparse.Namespace) -> None:
    """Train all jobs with `workers` per host; print a table for each precision."""
    ranks = [name for name in names for _ in range(workers)]
    for group, precision in ((FULL, "full precision"), (IN_16_BITS, "16 bits")):
        contenders = [name for name in group if name in options.contenders]
        rows = {}
        for job in options.jobs if contenders else ():
            with ExitStack() as exits:
                teams = {
                    name: exits.enter_context(team(name, job, ranks, rate, PORT + number))
                    for number, name in enumerate(contenders)
                }
                for started_team in teams.values():
                    started_team.warm_up()
                speeds = in_turn(
                    {name: started_team.turn for name, started_team in teams.items()}, options.turns
                )
            rows[f"{JOBS[job].title} ({JOBS[job].batch_size})"] = speeds
            print(f"{rate}, {workers} per host, {job}: {speeds}", file=sys.stderr, flush=True)
        if rows:
            title = f"samples a second, {len(names)} hosts, {rate}, {workers} per host, {precision}"
            ours, *_, bound = group
            print(table(title, rows, more_is_better=True, no_peers=[bound]), flush=True)
            for label, row in rows.items():
                if {ours, bound} <= row.keys():
                    parts = [a / b for a, b in zip(row[ours], row[bound], strict=True)]
                    print(f"{label}: {spread(parts).strip()} of {bound}")
            print(flush=True)


class Team:
    """The workers of a contender, by rank, which are stopped between its turns.

    `steps` is the log of the first one's `Stopwatch`.
    """

    def __init__(self, title: str, job: Job, workers: Workers, steps: Path) -> None:
        self._title, self._job, self._workers, self._path = title, job, workers, steps
        self._step_seconds = 0.0

    def warm_up(self) -> None:
        """Wait for the first steps."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(steps := self._steps()) < WARM_UP_STEPS:
            ended = any(process.poll() is not None for process in self._workers.processes)
            if ended or time.monotonic() > deadline:
                raise self._made(len(steps))
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)
        self._step_seconds = steps[-1][1] - steps[-1][0]

    def turn(self) -> float:
        """Train for some seconds; return the samples a second of the steps made meanwhile."""
        self._signal(signal.SIGCONT)
        started = time.perf_counter()
        time.sleep(max(TURN_SECONDS, TURN_STEPS * self._step_seconds))
        self._signal(signal.SIGSTOP)
        steps = [step for step in self._steps() if step[0] >= started]
        if not steps:
            raise self._made(0)
        self._step_seconds = (steps[-1][1] - steps[0][0]) / len(steps)
        return len(steps) * self._job.batch_size / sum(seconds for *_, seconds in steps)

    def _steps(self) -> list[list[float]]:
        """Return when each step so far began and ended, and its time."""
        lines = self._path.read_text("ascii").splitlines() if self._path.exists() else []
        return [[float(value) for value in line.split()] for line in lines]

    def _made(self, steps: int) -> SystemExit:
        return SystemExit("\n".join([f"{self._title} made {steps} steps:", *self._workers.texts()]))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._workers.processes:
            process.send_signal(number)


@contextmanager
def team(contender: str, job: str, ranks: Sequence[str], rate: str, port: int) -> Iterator[Team]:
    """Start a contender's workers, one on each of these hosts, by rank; end them after the block.

    Several contenders may run at once, on different ports.
    """
    number = str(len(set(ranks)))
    link = {RATE: str(bits_a_second(rate) / 8), BURST: str(burst(rate)), HOSTS: number}
    with TemporaryDirectory() as logs:
        variables = {**link, LOGS: logs, "MASTER_PORT": str(port)}
        with started(contender, job, ranks, variables) as workers:
            yield Team(contender, JOBS[job], workers, Path(logs, "0"))


def verify(names: Sequence[str], contender: str, job: str) -> int:
    """Compare one worker with those of all hosts bit for bit; return the exit status."""
    each = range(1, VERIFIED_LANES // len(names) + 1)
    placed = {"1 worker": [names[0]]}
    placed |= {f"{len(names)} x {n}": [name for name in names for _ in range(n)] for n in each}
    runs = []
    for title, ranks in placed.items():
        with TemporaryDirectory() as directory:
            options = {
                "DIR": directory,
                "LANES": VERIFIED_LANES,
                "STOP_AFTER": VERIFIED_STEPS,
                "SNAPSHOT_EVERY": 1,
                "KEEP_LAST": VERIFIED_STEPS,
            }
            run(contender, job, ranks, {f"SAMESTEP_{n}": str(v) for n, v in options.items()})
            runs.append(RunTrace(title, read_traces(Path(directory)), "workers"))
    print(f"\n{contender}, {job}", end="", flush=True)
    return print_report(runs, VERIFIED_LANES)


def run(contender: str, job: str, ranks: Sequence[str], more: Mapping[str, str]) -> str:
    """Run one worker on each of these hosts, by rank; return the output of the first one.

    The exit status does not matter, since gloo sometimes aborts a worker that exits.
    """
    with started(contender, job, ranks, more) as workers:
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            for process in workers.processes:
                process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{contender} on {job} still ran after {LIMIT_SECONDS} seconds"
            ) from None
        texts = workers.texts()
    if any(process.returncode for process in workers.processes) and not values_in(texts[0]):
        raise SystemExit("\n".join([f"{contender} on {job} failed:", *texts]))
    return texts[0]


class Workers(NamedTuple):
    """Processes and the files with their output, by rank."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[IO[str]]

    def texts(self) -> list[str]:
        """Return the output of each worker so far."""
        for output in self.outputs:
            output.seek(0)
        return [output.read() for output in self.outputs]


@contextmanager
def started(
    contender: str, job: str, ranks: Sequence[str], more: Mapping[str, str]
) -> Iterator[Workers]:
    """Start one worker on each of these hosts, by rank; kill them after the block."""
    worker = [sys.executable, "-m", "benchmarks.contenders", contender, job]
    with ExitStack() as exits:
        workers = Workers([], [])
        for rank, name in enumerate(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(ranks)),
                "LOCAL_RANK": str(rank - ranks.index(name)),
                "LOCAL_WORLD_SIZE": str(ranks.count(name)),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": address(1),
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": DEVICE,
                **more,
            }
            workers.outputs.append(exits.enter_context(TemporaryFile("w+")))
            command = ["nsenter", f"--net=/run/netns/{name}", *worker]
            process = subprocess.Popen(
                command, env=variables, stdout=workers.outputs[-1], stderr=subprocess.STDOUT
            )
            exits.callback(process.wait)
            exits.callback(process.kill)
            workers.processes.append(process)
        yield workers


@contextmanager
def hosts(rate: str, number: int = 2) -> Iterator[list[str]]:
    """Make namespaces with a link between two, or from each to a switch; remove them at the end."""
    remove_stale()
    prefix = f"{PREFIX}-{os.getpid()}"
    names, switch = [f"{prefix}-{host}" for host in range(1, number + 1)], f"{prefix}-0"
    limit = f"tbf rate {rate} burst {burst(rate)} latency 50ms"
    with ExitStack() as exits:
        for name in [*names, *([switch] if number > 2 else [])]:
            command(f"ip netns add {name}")
            exits.callback(command, f"ip netns delete {name}")
            command(f"ip -n {name} link set lo up")
        ends = [(name, DEVICE) for name in names]
        if number > 2:
            command(f"ip -n {switch} link add {SWITCH} type bridge")
            command(f"ip -n {switch} link set {SWITCH} up")
            ends += [(switch, f"port{host}") for host in range(1, number + 1)]
        half = len(ends) // 2
        for (name, device), (other, peer) in zip(ends[:half], ends[half:], strict=True):
            pair = f"{device} netns {name} type veth peer name {peer} netns {other}"
            command(f"ip link add {pair}")
            if other == switch:
                command(f"ip -n {other} link set {peer} master {SWITCH}")
        for host, name in enumerate(names, start=1):
            command(f"ip -n {name} address add {address(host)}/24 dev {DEVICE}")
        for name, device in ends:
            command(f"ip -n {name} link set {device} up")
            command(f"tc -n {name} qdisc add dev {device} root {limit}")
        yield names


def remove_stale() -> None:
    """Remove the namespaces of earlier runs that were killed."""
    namespaces = re.findall(rf"^({PREFIX}-(\d+)-\d)", command("ip netns list"), re.MULTILINE)
    for name, process in namespaces:
        if not Path(f"/proc/{process}").exists():
            command(f"ip netns delete {name}")


def address(number: int) -> str:
    """Return the address of a host, from 1."""
    return f"10.213.7.{number}"


def burst(rate: str) -> int:
    """Return the bytes that a link may send at once, so that timers do not limit fast links."""
    return max(1 << 20, int(bits_a_second(rate) / 8 * BURST_SECONDS))


def bits_a_second(rate: str) -> int:
    """Return the number of a rate such as 1gbit."""
    match = re.fullmatch(r"(\d+)(k|m|g|t)?bit", rate)
    if match is None:
        raise SystemExit(f"--rates: expected rates such as 100mbit or 10gbit, got {rate}")
    return int(match[1]) * int(1000 ** " kmgt".index(match[2] or " "))


def command(text: str) -> str:
    """Run a command and return what it prints. Raises if it fails."""
    return subprocess.run(text.split(), check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
