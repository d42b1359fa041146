"""Train a ViT undisturbed and under faults, and compare: same bits, each sample used once.

usage: python -m benchmarks.chaos [--hosts 1 2] [--faults 1000] [--seed 0] [--log FILE]

Faults come in independent rounds, each a separate run, of which `--parallel` run at a time. Rounds
take turns in their number of hosts; two hosts are network namespaces with a link between them.
They and faults of a disk need root. With `--log`, complete rounds are recorded in FILE, and a
later command continues after them. If a round fails, the others go on; its output and record stay
next to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import LONGEST_CUT_SECONDS, MOST_WORKERS, Fault, Scene, faults_for
from benchmarks.chaos.machines import disk, hosts
from benchmarks.chaos.target import ABORTED, STALL_SECONDS, ChaosError, Resources, Target
from samestep.record import read_history

MOST_STEPS_BETWEEN = 10
STEPS_PER_EPOCH = 23
STEPS_PER_FAULT = 30  # more than a run makes between two faults on average
SETTLED = 4  # faults after which a launcher has what it needs
SPARE = Resources(
    memory=8 << 20, threads=0, files=2
)  # of a launcher, between two halves of its life

Log = Callable[[str], object]


@dataclass(frozen=True)
class Round:
    """One run under faults: its number of hosts, its seed, its faults, and limits."""

    hosts: int
    seed: int
    faults: int
    epochs: int
    most_workers: int = MOST_WORKERS
    longest: float = LONGEST_CUT_SECONDS
    only: Sequence[str] = ()  # kinds of faults

    @property
    def name(self) -> str:
        """What a log calls this round."""
        return f"hosts {self.hosts}, seed {self.seed}, faults {self.faults}"


def main() -> int:
    """Run all rounds and print how long each kind of fault took; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog=f"A round has failed if its run makes no new step for {STALL_SECONDS} s.",
    )
    add = parser.add_argument
    choices = "of a round; with both, rounds take turns (default: 1)"
    add("--hosts", type=int, nargs="+", choices=(1, 2), default=[1], help=choices)
    add("--seed", type=int, default=0, help="of the first round (default: 0)")
    add("--faults", type=int, default=32, help="in all rounds (default: %(default)s)")
    add("--round", type=int, default=50, help="faults of a round (default: %(default)s)")
    add("--parallel", type=int, choices=(1, 2), default=1, help="rounds at a time (default: 1)")
    add("--only", nargs="+", default=[], metavar="KIND", help="kinds of faults (default: all)")
    add("--log", type=Path, help="file of complete rounds, to continue after them")
    options = parser.parse_args()
    # so that namespaces and disks are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    options.round = min(options.round, options.faults)
    epochs = 1 + options.round * STEPS_PER_FAULT // STEPS_PER_EPOCH
    rounds = [
        Round(
            options.hosts[number % len(options.hosts)],
            options.seed + number,
            min(options.round, options.faults - number * options.round),
            epochs,
            MOST_WORKERS // options.parallel,
            only=options.only,
        )
        for number in range(-(-options.faults // options.round))
    ]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return campaign(rounds, Path(folder), options.parallel, options.log)


def campaign(rounds: Sequence[Round], folder: Path, parallel: int, path: Path | None) -> int:
    """Run rounds that the log does not have; print the results of all; return the exit status."""
    done = {line["round"]: line for line in _read(path)}
    started, failed = time.monotonic(), []
    left = [chaos_round for chaos_round in rounds if chaos_round.name not in done]
    with ThreadPoolExecutor(parallel) as pool:
        expected = undisturbed(folder, rounds[0].epochs)
        futures = {}
        for chaos_round in left:
            log = _printer(f"[{chaos_round.seed}] " if len(rounds) > 1 else "")
            future = pool.submit(chaos, folder, chaos_round, expected, log=log, keep=path)
            futures[future] = chaos_round
        try:
            for future in as_completed(futures):
                chaos_round = futures[future]
                try:
                    result = {"round": chaos_round.name, **future.result()}
                except Exception as error:  # noqa: BLE001  other rounds go on
                    failed.append(chaos_round)
                    print(f"FAILED with seed {chaos_round.seed}: {type(error).__name__}: {error}")
                    print(f"to repeat it: {_command(chaos_round, parallel)}", flush=True)
                    continue
                line = json.dumps(result)
                done[chaos_round.name] = json.loads(line)
                if path is not None:
                    with path.open("a") as file:
                        file.write(line + "\n")
                print(_progress(rounds, done, failed, started), flush=True)
        except BaseException:
            ABORTED.set()  # rounds that still run
            pool.shutdown(cancel_futures=True)
            raise
    results = [
        (chaos_round, done[chaos_round.name]) for chaos_round in rounds if chaos_round.name in done
    ]
    for number in sorted({chaos_round.hosts for chaos_round, _ in results}):
        seconds = _merged(
            result["seconds"] for chaos_round, result in results if chaos_round.hosts == number
        )
        print(f"\n{number} host{'s' * (number > 1)}:\n\n{report(seconds)}")
    print(f"\n{resources_report(result for _, result in results)}")
    return 1 if failed else 0


def undisturbed(folder: Path, epochs: int) -> Target:
    """Return a run of two workers without faults, which has ended."""
    target = Target(folder / "undisturbed", epochs)
    try:
        target.start([2])
        target.end()
    finally:
        target.close()
    return target


def chaos(
    folder: Path, chaos_round: Round, expected: Target, *, log: Log, keep: Path | None = None
) -> dict[str, Any]:
    """Return the `seconds` until the run continued after each fault, by kind, and `resources`.

    Raises `ChaosError` if the run differs from the undisturbed one that is `expected`, or a
    launcher's memory, threads or open files grow.
    """
    chance = random.Random(chaos_round.seed)
    folder = Path(tempfile.mkdtemp(prefix=f"round-{chaos_round.seed}-", dir=folder))
    seconds = defaultdict(list)
    with ExitStack() as exits:
        mounted_disk = exits.enter_context(disk(folder)) if os.geteuid() == 0 else None
        run = (folder if mounted_disk is None else mounted_disk.folder) / "run"
        target = Target(
            run, chaos_round.epochs, exits.enter_context(hosts(chaos_round.hosts)), folder
        )
        exits.callback(_keep, target, folder, keep, chaos_round)
        exits.callback(target.close)
        scene = Scene(target, mounted_disk, chance, chaos_round.most_workers, chaos_round.longest)
        target.start(scene.workers())
        for number, fault in enumerate(
            _choose(chance, chaos_round, disk=mounted_disk is not None), 1
        ):
            _pause(target, chance)
            name = fault.__name__
            try:
                seconds[name].append(fault(scene))
            except ChaosError as error:
                raise ChaosError(f"fault {number}, {name}: {error}") from error
            target.sample()
            log(f"{number:3} {name:18} {seconds[name][-1]:5.2f} s, {target.workers} workers")
        target.end()
        if target.hash() != expected.hash():
            raise ChaosError(f"expected hash {expected.hash()} as undisturbed, got {target.hash()}")
        _check_samples(target, expected)
        growth = check_resources(target.samples)
    shutil.rmtree(folder)
    log(
        f"same bits after {chaos_round.faults} faults ({expected.hash()[:16]}); "
        "each sample once per epoch"
    )
    return {"seconds": seconds, "resources": growth}


def _choose(chance: random.Random, chaos_round: Round, *, disk: bool) -> list[Fault]:
    """Return faults in random order; in the first half, only those that launchers survive."""
    survived, ending = (
        {
            fault: share
            for fault, share in faults.items()
            if not chaos_round.only or fault.__name__ in chaos_round.only
        }
        for faults in faults_for(chaos_round.hosts, disk=disk)
    )
    drawn = chosen(chance, {**survived, **ending}, chaos_round.faults)
    lasting = [fault for fault in drawn if fault in survived][: chaos_round.faults // 2]
    mixed = list(drawn)
    for fault in lasting:
        mixed.remove(fault)
    return [*lasting, *mixed]


def chosen(chance: random.Random, shares: Mapping[Fault, int], faults: int) -> list[Fault]:
    """Return faults in random order: of each kind its share, and at least one if possible."""
    more = [fault for fault, share in shares.items() for _ in range(share - 1)]
    chance.shuffle(more)
    drawn = list(islice(cycle([*shares, *more]), faults))
    chance.shuffle(drawn)
    return drawn


def report(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of the times until the run continued."""
    rows = [
        f"| {name} | {len(durations)} | {statistics.median(durations):.2f} s "
        f"| {max(durations):.2f} s |"
        for name, durations in sorted(seconds.items())
    ]
    total = f"| all | {sum(map(len, seconds.values()))} | | |"
    return "\n".join(["| fault | times | median | worst |", "|---|---|---|---|", *rows, total])


def resources_report(results: Iterable[Mapping[str, Any]]) -> str:
    """Return what the process that lived through most faults had in both halves of its life."""
    lives = [life for result in results for life in result["resources"]]
    if not lives:
        return "no launcher lived long enough to compare its resources"
    faults, before, after = max(lives)
    pairs = [
        f"{name} {a} -> {b}" for name, a, b in zip(Resources._fields, before, after, strict=True)
    ]
    return (
        f"resources of {len(lives)} processes are flat; after {faults} faults: {', '.join(pairs)}"
    )


def _pause(target: Target, chance: random.Random) -> None:
    """Wait for some steps, and into the next one."""
    steps = target.steps() + chance.randrange(MOST_STEPS_BETWEEN)
    target.wait_until(
        lambda: target.steps() >= steps and bool(target.pids()), f"fewer than {steps} steps"
    )
    time.sleep(chance.uniform(0.0, 0.1))
    if not target.is_running():
        raise ChaosError(f"the run ended before all faults had happened; {target.last_output()}")


def check_resources(
    lives: Mapping[int, Sequence[Resources]],
) -> list[tuple[int, Resources, Resources]]:
    """Compare the halves of each launcher's life; return its faults, and the most of both halves.

    Raises `ChaosError` if something grows.
    """
    compared = []
    for samples in lives.values():
        settled = samples[SETTLED:]
        if len(settled) < 2:
            continue
        half = len(settled) // 2
        before, after = (
            Resources(*map(max, zip(*part, strict=True)))
            for part in (settled[:half], settled[half:])
        )
        compared.append((len(samples), before, after))
        if any(b - a > spare for a, b, spare in zip(before, after, SPARE, strict=True)):
            raise ChaosError(f"a launcher had {before} first and {after} later: {samples}")
    return compared


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
    samples_of_step: dict[int, Any] = {}
    for event in read_history(target.directory):
        if event["event"] == "scalars":
            if event["step"] in samples_of_step:
                raise ChaosError(f"step {event['step']} is recorded twice")
            values = event["values"].items()
            samples = [value for name, value in values if name.startswith("sample ")]
            samples_of_step[event["step"]] = event["epoch"], samples
    return samples_of_step


def _keep(target: Target, folder: Path, path: Path | None, chaos_round: Round) -> None:
    """Keep the output and the record of a round that fails next to the log."""
    if path is None or sys.exc_info()[0] is None:
        return
    kept = path.with_name(f"{path.name}.failed-{chaos_round.hosts}-{chaos_round.seed}")
    kept.mkdir(exist_ok=True)
    for file in [*folder.glob("output-*"), *target.directory.glob("*.jsonl")]:
        with suppress(OSError):
            shutil.copy(file, kept)
    print(f"the output and record of seed {chaos_round.seed} are in {kept}")


def _command(chaos_round: Round, parallel: int) -> str:
    hosts, seed = f"--hosts {chaos_round.hosts}", f"--seed {chaos_round.seed}"
    faults = f"--faults {chaos_round.faults} --round {chaos_round.faults}"
    return f"python -m benchmarks.chaos {hosts} {seed} {faults} --parallel {parallel}"


def _progress(
    rounds: Sequence[Round], done: Mapping[str, Any], failed: Sequence[Round], started: float
) -> str:
    complete = [chaos_round for chaos_round in rounds if chaos_round.name in done]
    faults, total = (
        sum(chaos_round.faults for chaos_round in complete),
        sum(chaos_round.faults for chaos_round in rounds),
    )
    minutes = (time.monotonic() - started) / 60
    return f"{faults} of {total} faults, {len(failed)} rounds failed, after {minutes:.1f} minutes"


def _printer(prefix: str) -> Log:
    return lambda text: print(f"{prefix}{text}", flush=True)


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _merged(results: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    merged: dict[str, list[float]] = {}
    for result in results:
        for name, seconds in result.items():
            merged.setdefault(name, []).extend(seconds)
    return merged


if __name__ == "__main__":
    sys.exit(main())
