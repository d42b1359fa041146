"""Workers with different data are refused, without false alarms."""

from __future__ import annotations

import enum
import math
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.data.agreement import (
    NEW_DATASETS,
    PARTS,
    SAMPLES,
    SHARE,
    DataCheck,
    Loads,
    Use,
    digest,
)
from samestep.data.loader import Fetcher, compared
from tests.workers import run_workers, try_workers

SIZE = 60


class Files(torch.utils.data.Dataset):
    """Numbers, in the order of `names`, with their labels."""

    def __init__(self, names, labels=range(10)):
        self.names, self.labels = names, list(labels)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        number = self.names[index]
        return torch.full((3,), number / 7), self.labels.index(number % 10)


def loss_fn(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def train(dataset, *, epochs=1, loader_workers=0, hook=lambda epoch: None, collate_fn=None):
    """Train on `dataset(rank)` as a worker; return the number of completed steps."""
    with ss.init(lanes=4) as run:
        model = run.replicate(nn.Linear(3, 10))
        data = dataset(run.rank)
        options = {"loader_workers": loader_workers, "collate_fn": collate_fn}
        for batch in run.batches(data, 30, epochs=epochs, **options):
            hook(run.epoch)
            run.backward(loss_fn, model, batch)
        return run.step


def messages(outcomes):
    """Return the messages of all workers that were not ended before they could raise an error."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    assert all(type(error) is ss.DataError for error in errors)
    return [str(error) for error in errors]


def shuffled(rank):
    names = list(range(SIZE))
    random.Random(rank).shuffle(names)
    return Files(names)


DIFFERENT = {
    "shuffled": shuffled,
    "labels in the order of a set": lambda rank: Files(
        range(SIZE), range(10) if rank == 0 else range(9, -1, -1)
    ),
    "a list": lambda rank: [(torch.zeros(3), rank)] * SIZE,
}


@pytest.mark.parametrize("dataset", DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_workers_with_different_data_are_refused(dataset, loader_workers):
    first, *others = messages(try_workers(lambda: train(dataset, loader_workers=loader_workers), 2))
    assert all(other == first for other in others)
    assert re.match(
        r"workers have different data: sample \d+\[\d\] of the data set of loop 'train' is .*"
        r" on worker 0 \(.*\) and .* on worker 1 \(.*\)\. ",
        first,
    )
    for cause in ("os.listdir", "before ss.init", "PYTHONHASHSEED", "Sort"):
        assert cause in first


def test_lengths_are_compared():
    outcomes = try_workers(lambda: train(lambda rank: Files(range(SIZE - rank % 2))), 3)
    assert all("is 60 samples on worker 0 " in message for message in messages(outcomes))
    assert all("and 59 samples on worker 1 " in message for message in messages(outcomes))


@pytest.mark.parametrize("gather", [False, True])
def test_evaluations_of_different_data_are_refused(gather):
    def body():
        with ss.init() as run:
            fn = (lambda _, batch: batch[0]) if gather else (lambda _, batch: batch[0].mean())
            run.evaluate(fn, None, shuffled(run.rank), 16, gather=gather)

    first, *_ = messages(try_workers(body, 2))
    assert re.search(r"sample \d+\[1\] of the data set of an evaluation is \d on worker 0 ", first)


def test_draws_that_cannot_be_seeded_are_refused():
    class Foreign(Files):
        def __getitem__(self, index):
            return random.SystemRandom().getrandbits(60)

    def body():
        with ss.init() as run:
            run.evaluate(lambda _, batch: batch.double().mean(), None, Foreign(range(SIZE)), 16)

    assert "a generator that samestep does not seed" in messages(try_workers(body, 2))[0]


def test_data_that_change_later_are_refused():
    def body():
        data = Files(list(range(2 * SHARE * SAMPLES)))

        def hook(epoch):
            if epoch == 0 and os.environ["RANK"] == "1":
                data.names = range(1001, 1001 + len(data))

        train(lambda _: data, epochs=2, hook=hook)

    assert "loop 'train'" in messages(try_workers(body, 2))[0]


class Rounded(Files):
    """Samples that each worker rounds differently, in a folder of its own."""

    def __init__(self, rank):
        super().__init__(range(SIZE))
        self.rank = rank

    def __getitem__(self, index):
        inputs, _ = super().__getitem__(index)
        return {"path": f"/scratch/{self.rank}/{index}", "x": inputs * (1 + self.rank * 1e-6)}


class Broken(Files):
    """Samples that one worker cannot load, except in batches."""

    def __init__(self, rank):
        super().__init__(range(SIZE))
        self.rank = rank

    def __getitem__(self, index):
        if self.rank:
            raise OSError("lost")
        return super().__getitem__(index)


def test_rounding_and_folders_are_no_difference():
    def body():
        with ss.init(lanes=2) as run:
            return run.evaluate(lambda _, batch: batch["x"].mean(), None, Rounded(run.rank), 16)

    assert len(run_workers(body, 2)) == 2


def test_a_sample_that_fails_is_reported_by_its_batch():
    errors = [outcome.error for outcome in try_workers(lambda: train(Broken), 2)]
    assert isinstance(errors[1], ss.errors.LoaderError)


def test_only_loader_processes_open_files():
    class Opened(Files):
        def __getitem__(self, index):
            self.opened_in = os.getpid()
            return super().__getitem__(index)

    def body():
        data = Opened(range(SIZE))
        train(lambda _: data, loader_workers=1)
        return hasattr(data, "opened_in")

    assert run_workers(body, 2) == [False, False]


def test_one_worker_compares_only_its_first_loads():
    check, data = DataCheck(0, 0, 1, lambda value, _: [value]), Files(range(SIZE))
    first, second = (check.begin(data, SIZE, "a loop") for _ in range(2))
    assert first.is_due(0)
    assert not first.is_due(1, at_start=False)
    assert not second.is_due(0)
    check.add(first, 0, Loads([digest(data[0])]))
    assert check.pending == {}


class Cached(Files):
    """Samples that are kept, and changed in place or in a copy."""

    def __init__(self, names, *, copies=False):
        super().__init__(names)
        self.cache, self.copies = {}, copies

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        inputs, label = self.cache[index]
        inputs = inputs.clone() if self.copies else inputs
        return inputs.sub_(1.0), label


class Mosaic(Files):
    """Samples that are mixed with others: of those loaded before, or of all."""

    def __init__(self, names, *, of_all=False):
        super().__init__(names)
        self.loaded, self.of_all = [], of_all

    def __getitem__(self, index):
        self.loaded = [*self.loaded, index][-16:]
        others = random.choices(range(len(self)) if self.of_all else self.loaded, k=3)
        inputs = [super(Mosaic, self).__getitem__(other)[0] for other in others]
        return torch.stack(inputs).mean(0), index % 10


class Numbered(Files):
    """Samples with a count of loads, as in a curriculum that starts over in each process."""

    loads = 0

    def __getitem__(self, index):
        self.loads += 1
        inputs, label = super().__getitem__(index)
        return inputs * min(1.0, self.loads / 100), label


class Read(Files):
    """Samples that the next entry of an iterator follows, whatever their index."""

    def __init__(self, names):
        super().__init__(names)
        self.rows = iter(torch.randn(999, 3))

    def __getitem__(self, index):
        return next(self.rows), index % 10


def centered(samples):
    """Collate samples, and change them in place."""
    rows, labels = zip(*samples, strict=True)
    return torch.stack([row.sub_(1.0) for row in rows]), torch.tensor(labels)


class Loss:
    """A collate function that mixes samples with the batch before."""

    def __init__(self):
        self.before = torch.zeros(3)

    def __call__(self, samples):
        rows = torch.stack([row for row, _ in samples])
        rows, self.before = rows + self.before, rows.mean(0)
        return rows, torch.tensor([label for _, label in samples])


CHANGED_BY_LOADING = {
    "a cache": (lambda: Cached(range(SIZE)), None, r"sample \d+\[0\] of Cached"),
    "a subset": (
        lambda: torch.utils.data.Subset(Cached(range(2 * SIZE)), range(SIZE)),
        None,
        r"sample \d+\[0\] of Cached",
    ),
    "a mosaic": (lambda: Mosaic(range(SIZE)), None, r"sample \d+\[0\] of Mosaic"),
    "a count": (lambda: Numbered(range(SIZE)), None, r"sample \d+\[0\] of Numbered"),
    "an iterator": (lambda: Read(range(SIZE)), None, r"sample \d+\[0\] of Read"),
    "a list": (
        lambda: [(torch.ones(3), 1) for _ in range(SIZE)],
        centered,
        r"sample \d+\[0\] of list",
    ),
    "tensors": (
        lambda: torch.utils.data.TensorDataset(torch.ones(SIZE, 3), torch.ones(SIZE).long()),
        centered,
        r"sample \d+\[0\] of TensorDataset",
    ),
    "the batch before": (
        lambda: Files(range(SIZE)),
        Loss(),
        r"collate_fn's batch\[0\] of samples \[\d+, \d+, \d+\] of Files",
    ),
}


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "words"), CHANGED_BY_LOADING.values(), ids=CHANGED_BY_LOADING
)
def test_data_that_change_by_being_loaded_are_refused(dataset, collate_fn, words):
    with pytest.raises(ss.DataError, match=words + ", the data set of loop 'train', has another"):
        train(lambda _: dataset(), collate_fn=collate_fn)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_data_that_change_by_being_loaded_are_refused_in_each_process(loader_workers):
    data = Cached(range(SIZE))
    outcomes = try_workers(lambda: train(lambda _: data, loader_workers=loader_workers), 2)
    assert all("of Cached, the data set" in message for message in messages(outcomes))
    with ss.init() as run, pytest.raises(ss.DataError, match="the data set of an evaluation, has"):
        run.evaluate(
            lambda _, batch: batch[0].mean(), None, data, 16, loader_workers=loader_workers
        )


class Augmented(Files):
    """Samples with random numbers of all kinds, which are seeded, and what compares badly."""

    def __init__(self, names):
        super().__init__(names)
        self.noise, self.table = np.random.default_rng(), None

    def __getitem__(self, index):
        if self.table is None:  # made by the first load
            self.table, self.draws = [object()] * 4, random.Random()
        inputs, label = super().__getitem__(index)
        inputs = inputs + torch.randn(3) + self.noise.normal() + np.random.rand() + random.random()
        return inputs * self.draws.random(), label, np.array([math.nan, 1.0]), math.nan


class Slow(Files):
    """Samples of which each takes longer than comparing may."""

    loads = 0

    def __getitem__(self, index):
        self.loads += 1
        time.sleep(1.05)
        return super().__getitem__(index)


def rows_of(samples):
    """Collate the parts that are tensors, in another order and with a draw."""
    inputs = torch.stack([sample[0] for sample in samples]) + torch.rand(())
    return inputs.flip(0), torch.tensor([sample[1] for sample in samples])


RIGHT = {
    "a cache": lambda: Cached(range(SIZE), copies=True),
    "a mosaic": lambda: Mosaic(range(SIZE), of_all=True),
    "random numbers": lambda: Augmented(range(SIZE)),
}


@pytest.mark.parametrize("dataset", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_data_that_are_the_same_when_they_are_loaded_again_are_accepted(dataset, loader_workers):
    loops = train(lambda _: dataset(), loader_workers=loader_workers, collate_fn=rows_of)
    assert loops == 2


def test_a_slow_sample_is_loaded_once_more():
    data = Slow(range(SIZE))
    fetcher = Fetcher(data, None)
    use = Use("loop", SIZE, 0, every=0)
    loads = fetcher[compared(use, 0)]
    assert data.loads == 2
    assert loads.changed == ""
    assert loads.samples[1:] == [None, None]


def test_a_time_in_samples_is_a_warning(caplog):
    class Timed(Files):
        def __getitem__(self, index):
            return *super().__getitem__(index), time.perf_counter()

    assert train(lambda _: Timed(range(SIZE)), collate_fn=rows_of) == 2
    assert "[2] of Timed, the data set of loop 'train', has another value" in caplog.text


def test_each_data_set_is_compared_at_its_first_use_and_rarely_later():
    check = DataCheck(0, 0, 2, lambda value, _: [value, value])
    data = Files(range(SHARE * SAMPLES))
    uses = [check.begin(data, len(data), "an evaluation") for _ in range(9)]
    assert [use.is_due(use.earlier) for use in uses] == 4 * [True, False] + [True]
    resumed = DataCheck(0, 0, 2, lambda value, _: [value, value]).begin(data, len(data), "a loop")
    assert resumed.is_due(3)
    assert not resumed.is_due(3, at_start=False)
    new = [check.begin(Files([0]), 1, "an evaluation") for _ in range(1000)]
    assert sum(use.is_due(use.earlier) for use in new) < NEW_DATASETS + 3


def test_other_samples_are_compared_in_each_epoch():
    use = Use("loop", 1000, 0, every=1)
    assert len({tuple(use.indices(epoch)) for epoch in range(9)}) == 9
    assert Use("loop", 1, 0, every=1).indices(0) == [0]


class Color(enum.Enum):
    RED = object()


@dataclass
class Box:
    left: int
    mask: np.ndarray


class Pair(NamedTuple):
    image: torch.Tensor
    label: np.ndarray


SAMPLE = {
    "image": torch.arange(6).view(2, 3),
    "folder/file": PurePosixPath("/data/7.png"),
    3: [1.5, None, True, b"raw", Color.RED, {"a", "b"}, object(), np.float32(2)],
    "box": Box(4, np.eye(2, dtype=bool)),
    "pair": Pair(torch.ones(2, dtype=torch.bfloat16), np.array([object()])),
    "complex": torch.ones(2, dtype=torch.complex64),
    "sparse": torch.eye(2).to_sparse(),
    "text": "a long text " * 10,
}


def test_digests_of_every_type():
    digests = digest(SAMPLE)
    assert digests["['image']"].startswith("torch.int64 [2, 3] ")
    assert digests["['file']"] == "7.png"
    assert digests["[3]"] == "list of 8, [0][1][2][3][4][5][6][7]"
    kinds = [digests[f"[3][{number}]"] for number in range(8)]
    assert kinds[1:7] == ["None", "True", "b'raw'", "Color RED", "set of 2", "object"]
    assert [kinds[0], kinds[7]] == ["float", "float32 []"]
    assert digests["['box'].left"] == "4"
    assert digests["['pair'][0]"] == "torch.bfloat16 [2]"
    assert digests["['pair'][1]"] == "object [1]"
    assert digests["['sparse']"] == "torch.float32 [2, 2]"
    assert len(digests["['text']"]) < 60
    assert len(digest([[number] for number in range(1000)])) == PARTS


class Graph:
    def to_dict(self):
        return {"x": torch.ones(3)}


def test_outer_parts_are_compared_first():
    def text(label):
        return {"boxes": 99 * [[1, 2]], "attention": 99 * [1], "tokens": list(range(label, 99))}

    first, other = digest(text(1)), digest(text(2))
    assert {part for part in first if first[part] != other[part]} == {"['tokens']"}
    assert digest(Graph())["['x']"] == "torch.float32 [3]"


def test_digests_have_floats_only_where_rounding_is_the_same():
    array = np.arange(9, dtype=np.float32)
    rounded = np.nextafter(array, np.float32(9))
    assert digest(array) == digest(rounded)
    assert digest(array, has_floats=True) != digest(rounded, has_floats=True)
    for value in (torch.tensor(array), array.tolist(), 0.1, array * 1j):
        assert digest(value, has_floats=True) != digest(value)
