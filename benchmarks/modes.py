"""One worker a device beside one worker with several devices: speed and memory of the ViT job on two CPU devices.

usage: python -m benchmarks.modes [--rounds 5]

Runs take turns; every ratio is of runs of one round. Memory is that of all workers together, at the end of training.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import SAMESTEP, figures, spread

JOB = ["-m", "benchmarks.vit.with_samestep"]
MODES = {
    "--mode ddp": [*SAMESTEP, *JOB],
    "--mode dp": [*SAMESTEP, "--mode", "dp", *JOB],
    "one device": [*SAMESTEP[:-1], "1", "--lanes", "2", *JOB],
}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each mode (default: 5)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in list(MODES)[:: 1 if number % 2 == 0 else -1]:
            found[mode].append(figures(MODES[mode]))
    print(f"ViT-Ti/8, global batch 64, AdamW, 2 lanes, {rounds} rounds")
    first = found[next(iter(MODES))]
    for mode, runs in found.items():
        for figure, unit in (("samples_a_second", "samples/s"), ("memory_megabytes", "MB")):
            ratios = [run[figure] / beside[figure] for run, beside in zip(runs, first, strict=True)]
            print(f"  {mode:11} {spread([run[figure] for run in runs])} {unit}, ratio {spread(ratios)}")


if __name__ == "__main__":
    main()
