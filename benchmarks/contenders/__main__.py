"""One worker of a contender: `python -m benchmarks.contenders NAME JOB`."""

from __future__ import annotations

import argparse

from benchmarks.contenders import CONTENDERS
from benchmarks.jobs import JOBS


def main() -> None:
    """Train, and print this worker's figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contenders")
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("job", choices=JOBS)
    options = parser.parse_args()
    figures = CONTENDERS[options.contender].train(JOBS[options.job])
    print(" ".join(f"{name}={value:.4f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
