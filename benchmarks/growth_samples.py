"""One process that reads batches in random order, and measures its time and memory.

usage: python -m benchmarks.growth_samples samestep 1000000000

Prints the milliseconds until the first batch, the median microseconds of each further one, and the
megabytes of the process at the end. A sample is its own index, so that only the order costs time.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, DistributedSampler

import samestep as ss
from benchmarks.contenders.stopwatch import memory

BATCH_SIZE = 256
BATCHES = 1000

Figures = dict[str, float]


class Indices:
    """A data set whose samples are their own indices."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size} was asked for")
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def as_they_are(samples: list[int]) -> list[int]:
    """Return the samples, uncollated."""
    return samples


def with_samestep(dataset: Indices) -> Figures:
    """Read with `run.batches`."""
    with ss.init() as run:
        return measure(
            lambda: itertools.chain.from_iterable(
                run.batches(dataset, BATCH_SIZE, steps=BATCHES, collate_fn=as_they_are)
            )
        )


def with_sampler(dataset: Indices) -> Figures:
    """Read with torch's `DataLoader` and `DistributedSampler`."""

    def batches() -> Iterator[list[int]]:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, collate_fn=as_they_are)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    return measure(batches)


WAYS = {"samestep": with_samestep, "sampler": with_sampler}


def measure(batches: Callable[[], Iterable[list[int]]]) -> Figures:
    """Return the time and memory of reading batches."""
    stamps = [time.perf_counter()]
    reader = batches()  # part of the measured memory, so it must live until then
    for batch in itertools.islice(reader, BATCHES):
        stamps.append(time.perf_counter())
        if not batch:
            raise SystemExit("expected samples in each batch, got an empty one")
    durations = [end - start for start, end in itertools.pairwise(stamps)]
    return {
        "first_milliseconds": 1e3 * durations[0],
        "batch_microseconds": 1e6 * statistics.median(durations[1:]),
        "memory_megabytes": memory(),
    }


def main() -> None:
    """Read in one way, and print its figures."""
    torch.set_num_threads(1)
    for name, value in WAYS[sys.argv[1]](Indices(int(sys.argv[2]))).items():
        print(f"{name}={value:.4f}")


if __name__ == "__main__":
    main()
