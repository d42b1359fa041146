"""Accuracy with gradients exchanged in bfloat16, compared to float32.

usage: python -m benchmarks.rounding [--epochs 60] [--seeds 3] [--lanes 8]

Trains the ViT recipe on scikit-learn's digits with each seed, on two workers of one thread. A
gradient is rounded once per level of the tree over lanes, so more lanes round more often.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import sklearn.datasets  # noqa: F401  here, so that the workers need not import it

import samestep as ss
from benchmarks.measure import spread
from recipes.vit import train

SETTINGS = Path(train.__file__).with_name("digits.yaml")
WORKERS = 2
DTYPES = {"float32": None, "bfloat16": "bfloat16"}
SCORES = {"model_top1": "top-1 accuracy, %", "model_loss": "loss on the held-out digits"}


def main() -> None:
    """Train with each seed and dtype, and print a table of the final scores."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounding",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=60, help="passes over the training digits (default: 60)")
    add("--seeds", type=int, default=3, help="runs with each dtype (default: 3)")
    add("--lanes", type=int, default=8, help="of every run (default: 8)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {
        name: [scores(dtype, seed, options) for seed in range(options.seeds)]
        for name, dtype in DTYPES.items()
    }
    print(f"| digits, {options.epochs} epochs, {options.lanes} lanes | {' | '.join(found)} |")
    print(f"|{'---|' * (1 + len(found))}")
    for score, title in SCORES.items():
        cells = [spread([run[score] for run in runs]).strip() for runs in found.values()]
        print(f"| {title} | {' | '.join(cells)} |")


def scores(dtype: str | None, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the final scores of a run."""
    changes = [f"seed={seed}", f"epochs={options.epochs}", f"lanes={options.lanes}"]
    with TemporaryDirectory() as directory:
        arguments = [str(SETTINGS), *changes, "--dir", directory]
        found = ss.launch(train.main, arguments, workers=WORKERS, exchange_dtype=dtype)
    print(f"seed {seed}, {dtype or 'float32'}: {found}", flush=True)
    return {**found, "model_top1": 100 * found["model_top1"]}


if __name__ == "__main__":
    main()
