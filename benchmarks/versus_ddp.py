"""samestep beside DistributedDataParallel and torchrun: speed of the ViT job on 2 workers, and time to start 2 workers.

usage: python -m benchmarks.versus_ddp [--rounds 5]

Runs alternate, and every ratio is of two runs side by side; medians are told with the lowest and highest.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAMESTEP = [sys.executable, "-m", "samestep", "run", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def speed(command: Sequence[str]) -> float:
    """Return the samples a second that a job prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"samples_a_second=([\d.]+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(found[1])


def seconds(command: Sequence[str]) -> float:
    """Return the wall time of a command."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def compare(
    title: str, unit: str, measure: Callable[[Sequence[str]], float], ours: Sequence[str], theirs: Sequence[str], rounds: int
) -> None:
    """Measure both in turn and print medians, ranges and the ratio ours / theirs."""
    pairs = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        values = {id(command): measure(command) for command in (first, second)}
        pairs.append((values[id(ours)], values[id(theirs)]))
    ratios = [mine / other for mine, other in pairs]
    print(f"{title}, {rounds} rounds")
    for name, values_of in (("samestep", [mine for mine, _ in pairs]), ("peer", [other for _, other in pairs])):
        print(f"  {name:9} {_spread(values_of)} {unit}")
    print(f"  ratio     {_spread(ratios)}", flush=True)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs for each comparison (default: 5)")
    rounds = parser.parse_args().rounds
    job = ["-m", "benchmarks.vit.with_samestep"]
    compare(
        "ViT-Ti/8, global batch 64, AdamW, 2 workers",
        "samples/s",
        speed,
        [*SAMESTEP, *job],
        [*TORCHRUN, "-m", "benchmarks.vit.with_ddp"],
        rounds,
    )
    hello = "benchmarks/start/hello.py"
    compare("starting 2 workers that meet once", "s", seconds, [*SAMESTEP, hello], [*TORCHRUN, hello], rounds)


if __name__ == "__main__":
    main()
