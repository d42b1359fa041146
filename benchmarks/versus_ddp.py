"""samestep beside DistributedDataParallel and torchrun: speed of the ViT job on 2 workers, and time to start 2 workers.

usage: python -m benchmarks.versus_ddp [--rounds 5]

Runs alternate, and every ratio is of two runs side by side; medians are told with the lowest and highest.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.measure import SAMESTEP, compare, seconds, speed

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


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
