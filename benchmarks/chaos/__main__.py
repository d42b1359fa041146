"""Train a ViT twice, undisturbed and under faults, and compare: same bits, each sample used once.

usage: python -m benchmarks.chaos [--seed 0] [--faults 32] [--epochs N]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.target import STALL_SECONDS, ChaosError, Target
from samestep.record import read_history

Fault = Callable[[Target, random.Random], float]
MOST_STEPS_BETWEEN = 10
STEPS_PER_EPOCH = 23
STEPS_PER_FAULT = 20  # more than a run makes between two faults on average


def main() -> int:
    """Run the test and print how long each kind of fault took; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog=f"The run has failed if it makes no new step for {STALL_SECONDS} s.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of faults (default: 0)"
    )
    parser.add_argument(
        "--faults", type=int, default=sum(FAULTS.values()), help="default: %(default)s"
    )
    parser.add_argument(
        "--epochs", type=int, help=f"of {STEPS_PER_EPOCH} steps each (default: enough)"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = chaos(Path(folder), given.seed, given.faults, given.epochs, log=print)
        except ChaosError as error:
            print(f"FAILED: {error}")
            return 1
    print(report(seconds))
    return 0


def chaos(
    folder: Path, seed: int, faults: int, epochs: int | None = None, *, log: Callable[[str], object]
) -> Mapping[str, Sequence[float]]:
    """Return the seconds until the run continued after each fault, by kind.

    Raises `ChaosError` if the run differs from an undisturbed one.
    """
    chance = random.Random(seed)
    epochs = epochs or 1 + faults * STEPS_PER_FAULT // STEPS_PER_EPOCH
    undisturbed, target = (Target(folder / name, epochs) for name in ("undisturbed", "faults"))
    seconds = defaultdict(list)
    try:
        undisturbed.start(2)
        undisturbed.end()
        target.start(2)
        for number, fault in enumerate(chosen(chance, faults), 1):
            _pause(target, chance)
            name = fault.__name__
            seconds[name].append(fault(target, chance))
            log(f"{number:3} {name:18} {seconds[name][-1]:5.2f} s, {target.workers} workers")
        target.end()
    finally:
        undisturbed.close()
        target.close()
    if target.hash() != undisturbed.hash():
        raise ChaosError(f"expected hash {undisturbed.hash()} as undisturbed, got {target.hash()}")
    _check_samples(target, undisturbed)
    log(f"same bits after {faults} faults ({target.hash()[:16]}); each sample once per epoch")
    return seconds


def chosen(chance: random.Random, faults: int) -> list[Fault]:
    """Return faults in random order: of each kind its share, and at least one if possible."""
    more = [fault for fault, share in FAULTS.items() for _ in range(share - 1)]
    chance.shuffle(more)
    some = list(islice(cycle([*FAULTS, *more]), faults))
    chance.shuffle(some)
    return some


def report(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of the times until the run continued."""
    rows = [
        f"| {name} | {len(some)} | {statistics.median(some):.2f} s | {max(some):.2f} s |"
        for name, some in sorted(seconds.items())
    ]
    return "\n".join(["| fault | times | median | worst |", "|---|---|---|---|", *rows])


def _pause(target: Target, chance: random.Random) -> None:
    """Wait for some steps, and into the next one."""
    steps = target.steps() + chance.randrange(MOST_STEPS_BETWEEN)
    target.wait_until(
        lambda: target.steps() >= steps and bool(target.pids()), f"fewer than {steps} steps"
    )
    time.sleep(chance.uniform(0.0, 0.1))
    if not target.is_running():
        raise ChaosError("the run ended before all faults had happened; increase --epochs")


def _check_samples(target: Target, undisturbed: Target) -> None:
    """Raise `ChaosError` unless each step used the same samples, and each epoch all of them."""
    steps, others = _samples(target), _samples(undisturbed)
    if steps != others:
        numbers = sorted({*steps, *others})
        different = [step for step in numbers if steps.get(step) != others.get(step)]
        raise ChaosError(f"steps {different} used other samples than undisturbed")
    epochs = defaultdict(list)
    for epoch, samples in steps.values():
        epochs[epoch] += samples
    size = len(epochs[0])
    for epoch, samples in epochs.items():
        if sorted(samples) != list(range(size)):
            raise ChaosError(f"epoch {epoch} did not use each of {size} samples once")


def _samples(target: Target) -> dict[int, tuple[int, list[float]]]:
    """Return the epoch and the samples of each step."""
    found: dict[int, Any] = {}
    for event in read_history(target.directory):
        if event["event"] == "scalars":
            if event["step"] in found:
                raise ChaosError(f"step {event['step']} is recorded twice")
            values = event["values"].items()
            samples = [value for name, value in values if name.startswith("sample ")]
            found[event["step"]] = event["epoch"], samples
    return found


if __name__ == "__main__":
    sys.exit(main())
