"""Accuracy with gradients exchanged in bfloat16, compared to float32.

usage: python -m benchmarks.rounding [--jobs digits stain] [--epochs N] [--seeds 3] [--lanes N]

Trains the ViT recipe on scikit-learn's digits, and the stain recipe on its tissue, with each seed,
on two workers of one thread. A gradient is rounded once per level of the tree over lanes, so more
lanes round more often.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import sklearn.datasets  # noqa: F401  here, so that the workers need not import it

import samestep as ss
from benchmarks.measure import spread
from recipes.stain import make_data
from recipes.stain import train as stain
from recipes.vit import train as vit

RECIPES = Path(vit.__file__).parents[1]
WORKERS = 2
DTYPES = {"float32": None, "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Job:
    """A recipe to train, and the scores on held-out images that it returns."""

    train: Callable[[Sequence[str]], Mapping[str, float]]
    settings: Path
    epochs: int
    lanes: int
    titles: Mapping[str, str]


JOBS = {
    "digits": Job(
        vit.main,
        RECIPES / "vit" / "digits.yaml",
        epochs=60,
        lanes=8,
        titles={"model_top1": "top-1 accuracy", "model_loss": "loss"},
    ),
    "stain": Job(
        stain.main,
        RECIPES / "stain" / "tissue.yaml",
        epochs=60,
        lanes=4,
        titles={"l1": "L1", "dice": "Dice score", "dab_ssim": "SSIM of DAB"},
    ),
}


def main() -> None:
    """Train with each seed and dtype, and print a table of the final scores."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounding",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    add = parser.add_argument
    add("--jobs", nargs="+", choices=JOBS, default=[*JOBS], help="default: all")
    add("--epochs", type=int, help="of each run (default: 60)")
    add("--seeds", type=int, default=3, help="runs with each dtype (default: 3)")
    add("--lanes", type=int, help="of each run (default: 8 for digits, 4 for stain)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in options.jobs:
        job = JOBS[name]
        epochs, lanes = options.epochs or job.epochs, options.lanes or job.lanes
        runs_of_dtype = {
            title: [scores(name, dtype, seed, epochs, lanes) for seed in range(options.seeds)]
            for title, dtype in DTYPES.items()
        }
        print(f"\n| {name}, {epochs} epochs, {lanes} lanes | {' | '.join(runs_of_dtype)} |")
        print(f"|{'---|' * (1 + len(runs_of_dtype))}")
        for score, title in job.titles.items():
            cells = [
                spread([run[score] for run in runs], 4).strip() for runs in runs_of_dtype.values()
            ]
            print(f"| {title} | {' | '.join(cells)} |", flush=True)


def scores(name: str, dtype: str | None, seed: int, epochs: int, lanes: int) -> dict[str, float]:
    """Return the final scores of a run."""
    changes = [f"seed={seed}", f"epochs={epochs}", f"lanes={lanes}", f"evaluate_every={epochs}"]
    with TemporaryDirectory() as folder:
        if name == "stain":
            make_data.main([f"{folder}/tissue"])
            changes.append(f"data.path={folder}/tissue")
        arguments = [str(JOBS[name].settings), *changes, "--dir", f"{folder}/run"]
        final_scores = ss.launch(JOBS[name].train, arguments, workers=WORKERS, exchange_dtype=dtype)
    print(f"{name}, seed {seed}, {dtype or 'float32'}: {final_scores}", flush=True)
    return dict(final_scores)


if __name__ == "__main__":
    main()
