"""Two hosts with a network between them: the ViT job, compared to DistributedDataParallel.

usage: python -m benchmarks.network [--rounds 3] [--rate 1gbit]        as root, on Linux with
iproute2 and util-linux

Each host has one worker. The hosts are network namespaces with a link of limited rate, which this
command makes and removes. Contenders take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.measure import values_in
from benchmarks.turns import figure, in_turn, table

JOB = "vit"
CONTENDERS = ("samestep", "ddp", "ddp-fused")
HOSTS = {f"samestep-bench-{number}": f"10.213.7.{number}" for number in (1, 2)}
PORT = 29533


def main() -> None:
    """Measure, and print medians with their range."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="of the link, each way, as tc understands it (default: 1gbit)",
    )
    options = parser.parse_args()
    with hosts(options.rate):
        found = in_turn({name: partial(train, name) for name in CONTENDERS}, options.rounds)
    rows = {f"ViT-Ti/8, two hosts, {options.rate}": figure("samples_a_second", found)}
    print(table("samples a second", rows, more_is_better=True))


@contextmanager
def hosts(rate: str) -> Iterator[None]:
    """Make the namespaces and the link between them; remove them after the block."""
    first, second = HOSTS
    for name in HOSTS:
        run(f"ip netns add {name}")
    try:
        run(f"ip link add link-1 netns {first} type veth peer name link-2 netns {second}")
        for number, (name, address) in enumerate(HOSTS.items(), start=1):
            device = f"link-{number}"
            run(f"ip -n {name} address add {address}/24 dev {device}")
            run(f"ip -n {name} link set {device} up")
            run(f"ip -n {name} link set lo up")
            limit = f"tbf rate {rate} burst 1mb latency 50ms"
            run(f"tc -n {name} qdisc add dev {device} root {limit}")
        yield
    finally:
        for name in HOSTS:
            run(f"ip netns delete {name}")


def run(command: str) -> None:
    """Run a command. Raises if it fails."""
    subprocess.run(command.split(), check=True)


def train(contender: str) -> dict[str, float]:
    """Train the job with one worker per host; return the figures of the first one."""
    workers = []
    for rank, name in enumerate(HOSTS):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": next(iter(HOSTS.values())),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": f"link-{rank + 1}",
        }
        worker = [sys.executable, "-m", "benchmarks.contenders", contender, JOB]
        command = ["nsenter", f"--net=/run/netns/{name}", *worker]
        workers.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    output, _ = [worker.communicate()[0] for worker in workers]
    return {name: value for name, (value,) in values_in(output).items()}


if __name__ == "__main__":
    main()
