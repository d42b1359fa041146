"""Two hosts with a network between them: four jobs, trained by samestep and its peers.

usage: python -m benchmarks.network [--rounds 3] [--rates 1gbit 10gbit] [--workers 1 2]
                                    [--jobs JOB] [--contenders NAME]

Run as root, on Linux with iproute2 and util-linux. The hosts are network namespaces with a link of
limited rate, which this command makes and removes. Workers have one thread each. Contenders take
turns, and every ratio compares runs of one round. Contenders that exchange gradients in 16 bits
have their own tables. At the end, every bit of the first steps is compared between samestep on one
worker and on the workers of both hosts; the exit status is 1 if any differs.
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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from benchmarks.contenders import CONTENDERS
from benchmarks.contenders.with_ideal_link import BURST, RATE
from benchmarks.jobs import JOBS
from benchmarks.measure import LIMIT_SECONDS, spread, values_in
from benchmarks.turns import figure, in_turn, table
from samestep.tools.trace import StepTrace, read_traces
from samestep.tools.verify import print_report

# ours first; the last compute without a network, and count the time of their messages
FULL = ("samestep", "ddp", "ddp-fused", "zero1", "ideal")
IN_16_BITS = ("samestep-16", "ddp-fp16", "ideal-16")
PREFIX = "samestep-bench"
DEVICE = "cable"
PORT = 29533
BURST_SECONDS = 0.002  # at full rate; at least that of a large segment
VERIFIED_STEPS = 2
VERIFIED_LANES = 4


def main() -> int:
    """Measure, print medians with their range, and verify; return the exit status."""
    options = arguments()
    # so that the namespaces are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for rate in options.rates:
        with hosts(rate) as names:
            for workers in options.workers:
                measure(names, rate, workers, options)
    with hosts(options.rates[0]) as names:
        ours = [n for n in options.contenders if CONTENDERS[n].module == "with_samestep"]
        return max((verify(names, n, job) for job in options.jobs for n in ours), default=0)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
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
    tables: dict[tuple[str, ...], dict[str, dict[str, list[float]]]] = {FULL: {}, IN_16_BITS: {}}
    for job in options.jobs:
        runs = {name: partial(train, name, job, ranks, rate) for name in options.contenders}
        speeds = figure("samples_a_second", in_turn(runs, options.rounds))
        for group, rows in tables.items():
            if row := {name: speeds[name] for name in group if name in speeds}:
                rows[f"{JOBS[job].title} ({JOBS[job].batch_size})"] = row
        print(f"{rate}, {workers} per host, {job}: {speeds}", file=sys.stderr, flush=True)
    for group, precision in ((FULL, "full precision"), (IN_16_BITS, "16 bits")):
        if tables[group]:
            title = f"samples a second, {rate}, {workers} per host, {precision}"
            ours, *_, bound = group
            text = table(title, tables[group], more_is_better=True, no_peers=[bound])
            print(text, end="\n\n", flush=True)
            for label, row in tables[group].items():
                if {ours, bound} <= {*row}:
                    parts = [a / b for a, b in zip(row[ours], row[bound], strict=True)]
                    print(f"{label}: {spread(parts).strip()} of {bound}", flush=True)


def train(contender: str, job: str, ranks: Sequence[str], rate: str) -> dict[str, float]:
    """Train a job with one worker on each of these hosts, by rank; return rank 0's figures."""
    link = {RATE: str(bits_a_second(rate) / 8), BURST: str(burst(rate))}
    output = run(contender, job, ranks, link)
    found = {name: values[0] for name, values in values_in(output).items()}
    if not found:
        raise SystemExit(f"{contender} printed no figures of {job}")
    return found


def verify(names: Sequence[str], contender: str, job: str) -> int:
    """Compare one worker with those of both hosts bit for bit; return the exit status."""
    first, second = names
    placed = {"1 worker": [first], "2 x 1": [first, second], "2 x 2": [first] * 2 + [second] * 2}
    traces: dict[str, list[StepTrace]] = {}
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
            traces[title] = read_traces(Path(directory))
    print(f"\n{contender}, {job}", end="", flush=True)
    return print_report(traces, VERIFIED_LANES)


def run(
    contender: str, job: str, ranks: Sequence[str], more: Mapping[str, str] | None = None
) -> str:
    """Run one worker on each of these hosts, by rank; return the output of the first one.

    The exit status does not matter, since gloo sometimes aborts a worker that exits.
    """
    worker = [sys.executable, "-m", "benchmarks.contenders", contender, job]
    with ExitStack() as exits:
        processes, outputs = [], []
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
                **(more or {}),
            }
            outputs.append(exits.enter_context(TemporaryFile("w+")))
            command = ["nsenter", f"--net=/run/netns/{name}", *worker]
            process = subprocess.Popen(
                command, env=variables, stdout=outputs[-1], stderr=subprocess.STDOUT
            )
            exits.callback(process.wait)
            exits.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            for process in processes:
                process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{contender} on {job} still ran after {LIMIT_SECONDS} seconds"
            ) from None
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    if any(process.returncode for process in processes) and not values_in(texts[0]):
        raise SystemExit("\n".join([f"{contender} on {job} failed:", *texts]))
    return texts[0]


@contextmanager
def hosts(rate: str) -> Iterator[list[str]]:
    """Make two namespaces with a link between them; remove them after the block."""
    remove_stale()
    names = [f"{PREFIX}-{os.getpid()}-{number}" for number in (1, 2)]
    first, second = names
    with ExitStack() as exits:
        for name in names:
            command(f"ip netns add {name}")
            exits.callback(command, f"ip netns delete {name}")
        command(f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}")
        for number, name in enumerate(names, start=1):
            command(f"ip -n {name} address add {address(number)}/24 dev {DEVICE}")
            command(f"ip -n {name} link set {DEVICE} up")
            command(f"ip -n {name} link set lo up")
            limit = f"tbf rate {rate} burst {burst(rate)} latency 50ms"
            command(f"tc -n {name} qdisc add dev {DEVICE} root {limit}")
        yield names


def remove_stale() -> None:
    """Remove the namespaces of earlier runs that were killed."""
    found = re.findall(rf"^({PREFIX}-(\d+)-\d)", command("ip netns list"), re.MULTILINE)
    for name, process in found:
        if not Path(f"/proc/{process}").exists():
            command(f"ip netns delete {name}")


def address(number: int) -> str:
    """Return the address of host 1 or 2."""
    return f"10.213.7.{number}"


def burst(rate: str) -> int:
    """Return the bytes that a link may send at once, so that timers do not limit fast links."""
    return max(1 << 20, int(bits_a_second(rate) / 8 * BURST_SECONDS))


def bits_a_second(rate: str) -> int:
    """Return the number of a rate such as 1gbit."""
    found = re.fullmatch(r"(\d+)(k|m|g|t)?bit", rate)
    if found is None:
        raise SystemExit(f"--rates: expected rates such as 100mbit or 10gbit, got {rate}")
    return int(found[1]) * int(1000 ** " kmgt".index(found[2] or " "))


def command(text: str) -> str:
    """Run a command and return what it prints. Raises if it fails."""
    return subprocess.run(text.split(), check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
