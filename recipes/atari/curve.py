"""Draw the returns of evaluations over environment steps, from the records of runs.

python recipes/atari/curve.py runs/invaders runs/invaders-1 --random 150 --out atari.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt


def main() -> None:
    """Read the records that were named and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="of a run, with its events.jsonl; a line for each",
    )
    parser.add_argument(
        "--random",
        type=float,
        metavar="POINTS",
        help="mean return of random play, as --eval prints it",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for directory in options.runs:
        steps, returns, deviations = evaluations(directory)
        (line,) = axes.plot(steps, returns, marker="o", label=directory.name)
        low, high = (
            [mean + sign * deviation for mean, deviation in zip(returns, deviations, strict=True)]
            for sign in (-1, 1)
        )
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if options.random is not None:
        axes.axhline(options.random, color="grey", linestyle="--", label="random play")
    axes.set(xlabel="environment steps", ylabel="points in a game: mean ± deviation")
    axes.legend(frameon=False)
    figure.savefig(options.out, dpi=100)


def evaluations(directory: Path) -> tuple[list[float], list[float], list[float]]:
    """Return environment steps, mean returns and their deviations of a run's evaluations; of a repeated step the newer values."""
    values: dict[int, dict[str, float]] = {}
    with (directory / "events.jsonl").open(encoding="utf-8") as lines:
        for event in map(json.loads, lines):
            if event["event"] == "scalars":
                values.setdefault(event["step"], {}).update(event["values"])
    evaluated = [values[step] for step in sorted(values) if "return" in values[step]]
    return (
        [one["environment_steps"] for one in evaluated],
        [one["return"] for one in evaluated],
        [one["return_deviation"] for one in evaluated],
    )


if __name__ == "__main__":
    main()
