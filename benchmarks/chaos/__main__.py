"""Train a ViT twice: left alone, and under fire. Both must end with the same bits, and every epoch must use every sample once.

usage: python -m benchmarks.chaos [--seed 0] [--faults 32] [--epochs 20]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.target import ChaosError, Target
from samestep.record import read_history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Fault = Callable[[Target, random.Random], float]

MOST_STEPS_BETWEEN = 10


def main() -> int:
    """Run the test and print how long each kind of fault took; the exit status is 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the faults: which, when and where (default: 0)"
    )
    parser.add_argument(
        "--faults", type=int, default=sum(FAULTS.values()), help="how many (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=20, help="of 23 steps each (default: 20)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = chaos(
                Path(folder), arguments.seed, arguments.faults, arguments.epochs, tell=print
            )
        except ChaosError as error:
            print(f"FAILED: {error}")
            return 1
    print(report(seconds))
    return 0


def chaos(
    folder: Path, seed: int, faults: int, epochs: int, tell: Callable[[str], object]
) -> Mapping[str, Sequence[float]]:
    """Return the seconds that a run under fire took to go on, by fault. Raises `ChaosError` where it shows that it was not left alone."""
    chance = random.Random(seed)
    undisturbed = _undisturbed(folder / "undisturbed", epochs)
    target = Target(folder / "under-fire", epochs)
    seconds = defaultdict(list)
    try:
        target.start(2)
        for fault in chosen(chance, faults):
            _pause(target, chance)
            seconds[fault.__name__].append(fault(target, chance))
            tell(
                f"{fault.__name__:18} went on after {seconds[fault.__name__][-1]:.2f} s, {target.workers} workers"
            )
        target.end()
    finally:
        target.close()
    if target.hash() != undisturbed.hash():
        raise ChaosError(
            f"the run under fire ended with {target.hash()}, the undisturbed one with {undisturbed.hash()}"
        )
    _check_samples(target, undisturbed)
    tell(
        f"the same bits after {faults} faults: {target.hash()[:16]}, and every epoch used every sample once"
    )
    return seconds


def chosen(chance: random.Random, faults: int) -> list[Fault]:
    """Return so many faults in random order, of each kind about its share and, where there is room, at least one."""
    more = [fault for fault, share in FAULTS.items() for _ in range(share - 1)]
    chance.shuffle(more)
    some = list(islice(cycle([*FAULTS, *more]), faults))
    chance.shuffle(some)
    return some


def report(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a table in Markdown of how long it took to go on."""
    rows = [
        f"| {name} | {len(some)} | {statistics.median(some):.2f} s | {max(some):.2f} s |"
        for name, some in sorted(seconds.items())
    ]
    return "\n".join(["| fault | times | median | worst |", "|---|---|---|---|", *rows])


def _undisturbed(directory: Path, epochs: int) -> Target:
    target = Target(directory, epochs)
    try:
        target.start(2)
        target.end()
    finally:
        target.close()
    return target


def _pause(target: Target, chance: random.Random) -> None:
    """Return after some steps, or in the middle of one."""
    steps = chance.randrange(MOST_STEPS_BETWEEN)
    seen = _steps(target)
    target.wait_until(
        lambda: _steps(target) >= seen + steps and bool(target.pids()), "no step came"
    )
    time.sleep(chance.uniform(0.0, 0.1))
    if not target.is_running():
        raise ChaosError("the run was over before all faults had happened: give it more --epochs")


def _steps(target: Target) -> int:
    return sum(event["event"] == "scalars" for event in target.events())


def _check_samples(target: Target, undisturbed: Target) -> None:
    """Raise `ChaosError` unless each step used the samples that it used undisturbed, and each epoch all of them once."""
    steps, others = _samples(target), _samples(undisturbed)
    if steps != others:
        different = [
            step for step in sorted({*steps, *others}) if steps.get(step) != others.get(step)
        ]
        raise ChaosError(f"steps {different} used other samples than undisturbed")
    epochs = defaultdict(list)
    for epoch, samples in steps.values():
        epochs[epoch] += samples
    size = len(epochs[0])
    for epoch, samples in epochs.items():
        if sorted(samples) != list(range(size)):
            raise ChaosError(f"epoch {epoch} did not use each of {size} samples once")


def _samples(target: Target) -> dict[int, tuple[int, list[float]]]:
    found: dict[int, Any] = {}
    for event in read_history(target.directory):
        if event["event"] == "scalars":
            samples = [
                value for name, value in event["values"].items() if name.startswith("sample ")
            ]
            if event["step"] in found:
                raise ChaosError(f"step {event['step']} is there twice")
            found[event["step"]] = event["epoch"], samples
    return found


if __name__ == "__main__":
    sys.exit(main())
