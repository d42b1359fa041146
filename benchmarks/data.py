"""Data order, loading and loader memory, compared to torch's DataLoader and samplers.

usage: python -m benchmarks.data [order speed memory] [--rounds 5] [--objects 1000000] [--epochs 10]

order   microseconds per batch of 256 indices, and memory, at 10^3, 10^6 and 10^9 samples
speed   samples per second with 0, 1 and 2 loader processes, in turn with a DataLoader
memory  private memory (USS) of two loader processes over epochs of small Python objects
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import samestep
from benchmarks.measure import spread
from samestep.data.plan import ShuffledPlan

BATCH_SIZE = 256
STEPS = 4096
RECORDS_A_BATCH = 1000


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="order, speed, memory (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of order and speed (default: 5)"
    )
    parser.add_argument(
        "--objects",
        type=int,
        default=1_000_000,
        help="objects of the memory part (default: 1000000)",
    )
    parser.add_argument(
        "--epochs", type=int, default=10, help="epochs of the memory part (default: 10)"
    )
    options = parser.parse_args()
    parts = {
        "order": lambda: order(options.rounds),
        "speed": lambda: speed(options.rounds),
        "memory": lambda: memory(options.objects, options.epochs),
    }
    for part in options.parts or parts:
        if part not in parts:
            parser.error(f"PART must be one of {', '.join(parts)}, got {part!r}")
        parts[part]()


def apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in its own process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, *arguments).result()


def private_megabytes(processes: Iterable[int]) -> float:
    """Return the memory that only these processes use (their unique set size)."""
    rollups = [
        Path(f"/proc/{process}/smaps_rollup").read_text().splitlines() for process in processes
    ]
    private = (line for lines in rollups for line in lines if line.startswith("Private_"))
    return sum(int(line.split()[1]) for line in private) / 1000


# Order


def order(rounds: int) -> None:
    """Print the cost of a batch of shuffled indices."""
    print(f"index order: a batch of {BATCH_SIZE}, {rounds} rounds")
    for samples in (10**3, 10**6, 10**9):
        for name, measure in (
            ("samestep", order_of_plan),
            ("DistributedSampler", order_of_sampler),
        ):
            if measure is order_of_sampler and samples == 10**9:
                print(
                    "  10^9 samples, DistributedSampler: not run, its list does not fit in memory"
                )
                continue
            runs = [apart(measure, samples) for _ in range(rounds)]
            microseconds, megabytes = ([run[number] for run in runs] for number in range(2))
            print(
                f"  10^{len(str(samples)) - 1} samples, {name:18}",
                f"{spread(microseconds)} us per batch,",
                f"{spread(megabytes)} MB",
                flush=True,
            )


def order_of_plan(samples: int) -> tuple[float, float]:
    """Return microseconds per batch and megabytes of samestep's plan for two lanes."""
    before = private_megabytes([os.getpid()])
    plan = ShuffledPlan(samples, BATCH_SIZE, 2, seed=0)
    started = time.perf_counter()
    for number in range(STEPS):
        for lane in range(2):
            plan.indices(*divmod(number, plan.steps_per_epoch), lane).tolist()
    elapsed = time.perf_counter() - started
    return elapsed / STEPS * 1e6, private_megabytes([os.getpid()]) - before


def order_of_sampler(samples: int) -> tuple[float, float]:
    """Return the same for torch's sampler, over as many steps."""
    before = private_megabytes([os.getpid()])
    sampler: DistributedSampler[int] = DistributedSampler(range(samples), num_replicas=1, rank=0)
    started = time.perf_counter()
    steps = epoch = 0
    while steps < STEPS:
        sampler.set_epoch(epoch)
        indices = iter(sampler)
        while list(islice(indices, BATCH_SIZE)):
            steps += 1
        epoch += 1
    elapsed = time.perf_counter() - started
    return elapsed / steps * 1e6, private_megabytes([os.getpid()]) - before


# Speed


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random uint8 images; an item is a random crop, possibly flipped, as float32."""

    def __init__(self, number: int) -> None:
        self.images = torch.randint(256, (number, 3, 40, 40), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left, flipped = torch.randint(9, (3,)).tolist()
        image = self.images[index, :, top : top + 32, left : left + 32]
        return (image.flip(2) if flipped % 2 else image).float().div(255), index % 10


def speed(rounds: int) -> None:
    """Print samples per second, and the ratio to a DataLoader of the same configuration."""
    torch.set_num_threads(1)
    jobs: dict[str, Dataset[Any]] = {
        "augmented images": Images(20_000),
        "TensorDataset": TensorDataset(torch.rand(20_000, 3, 32, 32), torch.randint(10, (20_000,))),
    }
    print(f"loading: batches of 64, an epoch of 20000 samples, {rounds} rounds")
    for name, dataset in jobs.items():
        for loader_workers in (0, 1, 2):
            pairs = []
            for number in range(rounds):
                both = (with_samestep, with_dataloader)[:: 1 if number % 2 == 0 else -1]
                speeds = {measure: measure(dataset, loader_workers) for measure in both}
                pairs.append((speeds[with_samestep], speeds[with_dataloader]))
            ours, theirs = ([pair[side] for pair in pairs] for side in range(2))
            ratios = [our_speed / their_speed for our_speed, their_speed in pairs]
            print(f"  {name}, {loader_workers} loader processes")
            print(
                f"    samestep {spread(ours)}, DataLoader {spread(theirs)} samples/s,",
                f"ratio {spread(ratios)}",
                flush=True,
            )


def with_samestep(dataset: Dataset[Any], loader_workers: int) -> float:
    """Return the samples per second of `run.batches`."""
    with samestep.init(lanes=1) as run:
        return samples_a_second(
            next(iter(batch))
            for batch in run.batches(dataset, 64, epochs=1, loader_workers=loader_workers)
        )


def with_dataloader(dataset: Dataset[Any], loader_workers: int) -> float:
    """Return the samples per second of a DataLoader."""
    return samples_a_second(DataLoader(dataset, 64, shuffle=True, num_workers=loader_workers))


def samples_a_second(batches: Iterable[Any]) -> float:
    """Return the speed from the first batch on, which excludes the start of loader processes."""
    iterator = iter(batches)
    next(iterator)
    started = time.perf_counter()
    samples = sum(len(labels) for _, labels in iterator)
    return samples / (time.perf_counter() - started)


# Memory


class Records:
    """A data set with its own list."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index]


def memory(objects: int, epochs: int) -> None:
    """Print the memory of loader processes at the first batch and at the end of each epoch."""
    print(f"private memory of two loader processes, MB: {objects} dicts of a path and a label")
    print(f"  {'':45} start  after each of {epochs} epochs")
    for name, batches in (
        ("DataLoader, a list in a data set", dataloader_of_list),
        ("samestep, a list in a data set", samestep_of_list),
        ("samestep, samestep.PackedList in a data set", samestep_of_packed),
    ):
        sizes = apart(memory_of, batches, objects, epochs)
        print(f"  {name:45} {' '.join(f'{megabytes:5.0f}' for megabytes in sizes)}", flush=True)


def memory_of(
    batches: Callable[[list[dict[str, Any]], int], Iterator[Any]], objects: int, epochs: int
) -> list[float]:
    """Return the megabytes of the loader processes, which are this process's only children."""
    records = [
        {
            "path": f"images/train/class{number % 1000:04}/image{number:08}.jpg",
            "label": number % 1000,
        }
        for number in range(objects)
    ]
    epoch = -(-objects // RECORDS_A_BATCH)
    sizes = []
    for number, _ in enumerate(batches(records, epochs), start=1):
        if number == 1 or number % epoch == 0:
            sizes.append(
                private_megabytes(
                    child.pid for child in multiprocessing.active_children() if child.pid
                )
            )
    return sizes


def lengths_of(records: list[dict[str, Any]]) -> list[int]:
    """Collate records by reading each of them, as opening a file would."""
    return [len(record["path"]) + record["label"] for record in records]


def dataloader_of_list(records: list[dict[str, Any]], epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    loader = DataLoader(
        Records(records),
        RECORDS_A_BATCH,
        shuffle=True,
        num_workers=2,
        collate_fn=lengths_of,
        persistent_workers=True,
    )
    for _ in range(epochs):
        yield from loader


def samestep_of_list(records: list[dict[str, Any]], epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    yield from batches_of(Records(records), epochs)


def samestep_of_packed(records: list[dict[str, Any]], epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    yield from batches_of(Records(samestep.PackedList(records)), epochs)


def batches_of(dataset: Any, epochs: int) -> Iterator[Any]:
    """Yield the batches of samestep."""
    with samestep.init(lanes=1) as run:
        for batch in run.batches(
            dataset, RECORDS_A_BATCH, epochs=epochs, collate_fn=lengths_of, loader_workers=2
        ):
            yield list(batch)


if __name__ == "__main__":
    main()
