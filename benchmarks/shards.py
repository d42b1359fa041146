"""Reading data in shards, compared to mosaicml-streaming, webdataset and datasets of Hugging Face.

usage: python -m benchmarks.shards [--rounds 5] [--epochs 200] [--shards 40]

Needs samestep[remote]; without webdataset, mosaicml-streaming, or datasets with pyarrow, their rows
are left out (`make integrations` installs them). One process without loader processes reads an
epoch of 500 samples of 4 kB in each shard, in batches of 64, from a folder that stands for a remote
storage. Each measurement runs in its own process with an empty cache, in turn. Bytes read are those
that all read calls return: a download into a cache and a read of the copy are two, and a tar has
half a kilobyte for each file's name. Memory is the peak of the process (RSS) less what it has after
an epoch of tiny samples: bounded if it stays the same with more shards. The last two rows have a
cache of a quarter of the shards. Randomness is measured over epochs of a smaller set: chi-square
per degree of freedom of the 16 positions of each sample (1 is uniform), and the shards in a batch.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

import samestep
from benchmarks.data import apart
from benchmarks.measure import spread

BATCH_SIZE = 64
SAMPLE_BYTES = 4096
BINS = 16
BUFFER = 4096  # samples that webdataset shuffles, as many as 8 shards have
WINDOW = 8
HAS_MDS = find_spec("streaming") is not None
HAS_PARQUET = find_spec("datasets") is not None  # it needs pyarrow
MISSING = [
    *(() if HAS_MDS else ("samestep, MDS", "mosaicml-streaming, MDS", "mosaicml-streaming")),
    *(() if find_spec("webdataset") else ("webdataset, tar", "webdataset")),
    *(() if HAS_PARQUET else ("samestep, Parquet", "datasets, Parquet", "datasets")),
]
SAMPLES = 500  # of a shard
RESET_PEAK = "5"  # see "clear_refs" in proc(5)
# a stand-in for its image data sets, which need torchvision
sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))

Batches = Iterator[list[int]]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of speed (default: 5)")
    parser.add_argument("--epochs", type=int, default=200, help="epochs for order (default: 200)")
    parser.add_argument("--shards", type=int, default=40, help="shards for speed (default: 40)")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        speed(Path(directory), options.rounds, options.shards)
    with TemporaryDirectory() as directory:
        randomness(Path(directory), options.epochs)


def speed(directory: Path, rounds: int, shards: int) -> None:
    """Print samples per second, bytes read, memory, and ratios to the first row."""
    warm, cold = directory / "warm", directory / "cold"
    write(warm, shards=shards, samples=BATCH_SIZE, sample_bytes=8)
    size = write(cold, shards=shards, samples=SAMPLES, sample_bytes=SAMPLE_BYTES)
    small = size // 4
    readers: dict[str, Callable[..., Batches]] = {
        "samestep, tar": partial(with_samestep, kind="tar"),
        "webdataset, tar": with_webdataset,
        "samestep, MDS": partial(with_samestep, kind="mds"),
        "mosaicml-streaming, MDS": with_streaming,
        "samestep, Parquet": partial(with_samestep, kind="parquet"),
        "datasets, Parquet": with_datasets,
        "samestep, tar, small cache": partial(with_samestep, kind="tar", max_bytes=small),
        "the same, any order": partial(
            with_samestep, kind="tar", max_bytes=small, window=0, steps=20
        ),
    }
    readers = {name: reader for name, reader in readers.items() if name not in MISSING}
    measurements: dict[str, list[tuple[float, ...]]] = {name: [] for name in readers}
    for number in range(rounds):
        for name in list(readers)[:: 1 if number % 2 == 0 else -1]:
            measurements[name].append(apart(measured, readers[name], warm, cold))
    print(f"{shards * SAMPLES} samples of {SAMPLE_BYTES} bytes in {shards} shards, {rounds} rounds")
    first = measurements["samestep, tar"]
    for name, runs in measurements.items():
        ratios = [run[0] / base[0] for run, base in zip(runs, first, strict=True)]
        read = [run[1] / SAMPLE_BYTES for run in runs]
        print(
            f"  {name:26} {spread([run[0] for run in runs])} samples/s, ratio {spread(ratios)},"
            f" {statistics.median(read):.2f} times a sample's bytes read for each,"
            f" {max(run[2] for run in runs):.0f} MB of memory",
            flush=True,
        )


def measured(reader: Callable[..., Batches], warm: Path, cold: Path) -> tuple[float, ...]:
    """Return the samples per second of an epoch, the bytes read per sample, and peak megabytes."""
    for _ in reader(warm):  # imports
        pass
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    memory, before, started = memory_of("VmRSS"), bytes_read(), time.perf_counter()
    samples = sum(map(len, reader(cold)))
    elapsed, read = time.perf_counter() - started, bytes_read() - before
    return samples / elapsed, read / samples, memory_of("VmHWM") - memory


def memory_of(name: str) -> float:
    """Return the megabytes of this process; VmRSS is now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))


def bytes_read() -> int:
    """Return the bytes that read calls of this process have returned."""
    return int(Path("/proc/self/io").read_text().split()[1])


def randomness(directory: Path, epochs: int) -> None:
    """Print how uniform the positions of samples are, and how mixed batches are."""
    shards, samples = 32, 64
    write(directory, shards=shards, samples=samples, sample_bytes=8)
    readers: dict[str, Callable[..., Batches]] = {
        "samestep, 1 lane": partial(with_samestep, kind="tar"),
        "samestep, 8 lanes": partial(with_samestep, kind="tar", lanes=8),
        "webdataset": partial(with_webdataset, buffer=WINDOW * samples),
        "mosaicml-streaming": with_streaming,
        "datasets": partial(with_datasets, buffer=WINDOW * samples),
    }
    readers = {name: reader for name, reader in readers.items() if name not in MISSING}
    print(f"{shards} shards of {samples} samples, {epochs} epochs")
    for name, reader in readers.items():
        chi_square, mixed = apart(order_of, reader, directory, shards * samples, samples, epochs)
        print(
            f"  {name:26} chi-square {chi_square:.2f} per degree of freedom,"
            f" {mixed:.1f} shards in a batch of {BATCH_SIZE}",
            flush=True,
        )


def order_of(
    reader: Callable[..., Batches], directory: Path, total: int, samples: int, epochs: int
) -> tuple[float, float]:
    """Return the mean chi-square per degree of freedom of positions, and the shards per batch."""
    counts = np.zeros((total, BINS))
    mixed = []
    batches = reader(directory, epochs=epochs)
    for _ in range(epochs):
        epoch_batches = list(islice(batches, total // BATCH_SIZE))
        # a stream may give a sample twice in one pass and not in the next
        np.add.at(counts, (np.concatenate(epoch_batches), np.arange(total) * BINS // total), 1)
        mixed += [len({index // samples for index in batch}) for batch in epoch_batches]
    expected = epochs / BINS
    return float(((counts - expected) ** 2 / expected).sum(1).mean() / (BINS - 1)), np.mean(mixed)


def write(directory: Path, *, shards: int, samples: int, sample_bytes: int) -> int:
    """Write the same samples as tar, MDS and Parquet files; return the bytes of the tar files."""
    (directory / "tar").mkdir(parents=True)
    rng = np.random.default_rng(0)
    contents = [rng.bytes(sample_bytes) for _ in range(shards * samples)]
    for shard in range(shards):
        with tarfile.open(directory / "tar" / f"{shard:03}.tar", "w") as tar:
            for index in range(shard * samples, (shard + 1) * samples):
                for extension, content in (("bin", contents[index]), ("cls", str(index).encode())):
                    member = tarfile.TarInfo(f"{index:08}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if HAS_MDS:
        from streaming import MDSWriter

        columns = {"index": "int", "data": "bytes"}
        size = samples * (sample_bytes + 16) + 200  # of a shard: a little more than its samples
        with MDSWriter(out=str(directory / "mds"), columns=columns, size_limit=size) as writer:
            for index, content in enumerate(contents):
                writer.write({"index": index, "data": content})
    if HAS_PARQUET:
        import pyarrow as pa
        from pyarrow import parquet

        (directory / "parquet").mkdir()
        for shard in range(shards):
            rows = range(shard * samples, (shard + 1) * samples)
            table = pa.table({"index": rows, "data": [contents[index] for index in rows]})
            parquet.write_table(table, directory / "parquet" / f"{shard:03}.parquet")
    return sum(path.stat().st_size for path in (directory / "tar").iterdir())


def cached(directory: Path) -> Path:
    """Return the empty folder for copies."""
    shutil.rmtree(directory / "cache", ignore_errors=True)
    return directory / "cache"


def with_samestep(
    directory: Path,
    *,
    kind: str,
    epochs: int = 1,
    lanes: int = 1,
    window: int = WINDOW,
    max_bytes: int = 2**40,
    steps: int | None = None,
) -> Batches:
    """Yield the indices of each batch; without a window, in any order."""
    options = {"cache_dir": cached(directory), "max_bytes": max_bytes}
    if kind == "tar":
        paths = sorted((directory / "tar").iterdir())
        samples = len(Tar(paths[0]))
        dataset = samestep.ShardedDataset(
            dict.fromkeys((path.as_uri() for path in paths), samples), Tar, **options
        )
    elif kind == "parquet":
        urls = [path.as_uri() for path in sorted((directory / "parquet").iterdir())]
        rows = of_page("pyarrow")["Rows"]
        samples = len(rows(directory / "parquet" / "000.parquet"))
        dataset = samestep.ShardedDataset(dict.fromkeys(urls, samples), rows, **options)
    else:
        index = (directory / "mds" / "index.json").read_text()
        url = (directory / "mds").as_uri()
        dataset = of_page("mosaicml-streaming")["mds"](url, index, **options)
    order = samestep.ShardOrder(dataset.sizes, window) if window else None
    with samestep.init(lanes=lanes) as run:
        for batch in run.batches(
            dataset, BATCH_SIZE, epochs=epochs, steps=steps, order=order, collate_fn=list
        ):
            yield [
                int(sample["cls" if kind == "tar" else "index"])
                for lane in batch
                for sample in lane
            ]


def with_webdataset(directory: Path, *, epochs: int = 1, buffer: int = BUFFER) -> Batches:
    """Yield the indices of each batch of webdataset, which streams the files without copies."""
    import webdataset

    urls = [str(path) for path in sorted((directory / "tar").iterdir())]
    # without detshuffle, every epoch has the same order of shards
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), detshuffle=True, seed=0)
    for epoch in range(epochs):
        samples = iter(dataset.shuffle(buffer, rng=random.Random(epoch)))
        while batch := list(islice(samples, BATCH_SIZE)):
            yield [int(sample["cls"]) for sample in batch]


def with_streaming(directory: Path, *, epochs: int = 1) -> Batches:
    """Yield the indices of each batch of mosaicml-streaming, which copies shards into a cache."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(
        remote=str(directory / "mds"),
        local=str(cached(directory)),
        shuffle=True,
        batch_size=BATCH_SIZE,
        num_canonical_nodes=1,
    )
    for _ in range(epochs):
        samples = iter(dataset)
        while batch := list(islice(samples, BATCH_SIZE)):
            yield [int(sample["index"]) for sample in batch]


def with_datasets(directory: Path, *, epochs: int = 1, buffer: int = BUFFER) -> Batches:
    """Yield the indices of each batch of datasets, which streams the files without copies."""
    from datasets import load_dataset

    files = sorted(map(str, (directory / "parquet").iterdir()))
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=buffer)
    for epoch in range(epochs):
        rows.set_epoch(epoch)
        samples = iter(rows)
        while batch := list(islice(samples, BATCH_SIZE)):
            yield [int(sample["index"]) for sample in batch]


class Tar:
    """The samples of a WebDataset tar: the bytes of each file by its extension."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        with tarfile.open(fileobj=self.file) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                samples.setdefault(key, {})[extension] = member.size, member.offset_data
        self.samples = list(samples.values())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        places = self.samples[number].items()
        return {name: os.pread(self.file.fileno(), *place) for name, place in places}

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def of_page(package: str) -> dict[str, Any]:
    """Return what the block of docs/data.md that needs a package defines."""
    from tests.docs.blocks import ROOT, blocks_of

    names: dict[str, Any] = {"ss": samestep}
    for block in blocks_of(ROOT / "docs" / "data.md"):
        if block.test == f"not run: needs {package}":
            exec(block.text, names)  # noqa: S102 (our own page)
    return names


if __name__ == "__main__":
    main()
