"""Changes of a data set that loader processes do not see, and files whose position they share."""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from collections import OrderedDict
from contextlib import closing
from functools import partial

import pytest
import torch
from torch.utils.data import Subset

from samestep.data.attributes import AttributeCheck, open_files
from samestep.data.loader import Request, load
from samestep.errors import DataError, LoaderError

# loader processes fork; warned about since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
REQUESTS = [Request(f"batch {n}", range(8 * n, 8 * n + 8), n) for n in range(40)]


class Curriculum:
    noise = 0.0

    def __init__(self):
        self.epoch, self.sizes, self.options = None, [8, 8], {"crop": True}
        self.seen, self.weights = [0] * 100, torch.zeros(3)
        self.transform = OrderedDict(size=8)
        self.shared = torch.zeros(3).share_memory_()

    def __len__(self):
        return 320

    def __getitem__(self, index):
        return torch.tensor(self.noise)


def set_through_a_mapping(data):
    data.options["crop"] = False


def write_weights(data):
    data.weights[0] = 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: setattr(data, "noise", 1.0), "noise 0.0 1.0"),
        (lambda data: setattr(data, "epoch", 2), "epoch None 2"),
        (lambda data: data.sizes.append(9), "sizes [8, 8] [8, 8, 9]"),
        (set_through_a_mapping, "options {'crop': True} {'crop': False}"),
        (write_weights, "weights"),
        # what loader processes see, caches, and what no attribute held
        (lambda data: data.shared.add_(1), None),
        (lambda data: data.seen.append(1), None),
        (lambda data: setattr(data, "cache", 1.0), None),
        (lambda data: setattr(data, "epoch", io.BytesIO()), None),
        (lambda data: setattr(data, "noise", 0.0), None),
    ],
)
def test_a_plain_attribute_that_changes_is_noticed(change, expected):
    data = Curriculum()
    check = AttributeCheck(dataset=Subset(data, range(4)), collate_fn=None)
    change(data)
    changes = [" ".join(map(str, each)) for each in check.changes()]
    if expected is None:
        assert changes == []
    else:
        assert len(changes) == 1
        assert changes[0].startswith(f"dataset.dataset.{expected}")


@forks
def test_a_change_in_the_body_of_a_loop_is_refused_where_it_would_be_lost():
    data = Curriculum()
    loop = partial(load, data, REQUESTS, collate_fn=None, pin_memory=False)
    batches = loop(loader_workers=2)
    next(batches)
    data.noise = 1.0  # as set_epoch does
    message = r"attribute dataset.noise changed from 0.0 to 1.0 in the body of the loop.*one epoch"
    with pytest.raises(DataError, match=message):
        next(batches)
    # between two loops it counts, and in this process at once
    for workers in (2, 0):
        assert next(loop(loader_workers=workers)).tolist() == [1.0] * 8


class Counting(Curriculum):
    """Counts its loads, and remembers a few, in each process."""

    def __init__(self):
        super().__init__()
        self.loads, self.last, self.seen = 0, None, {}

    def __getitem__(self, index):
        self.loads += 1
        self.last = index
        self.seen[index % 4] = self.loads
        return torch.tensor(self.noise)


@forks
def test_what_loading_changes_may_change_in_the_body_of_the_loop():
    data = Counting()
    batches = load(data, REQUESTS, collate_fn=None, loader_workers=2, pin_memory=False)
    next(batches)
    for index in range(3):  # such as a picture of it
        data[index]
        next(batches)
    assert (data.loads, data.last) == (3, 2)
    data.noise = 1.0
    with pytest.raises(DataError, match=r"attribute dataset\.noise changed from 0\.0 to 1\.0"):
        next(batches)


class InFile:
    """Sample `i` is a line with the number `i`, read by the method that `how` names."""

    def __init__(self, folder, how):
        path = folder / "lines"
        path.write_bytes(b"".join(b"%07d\n" % number for number in range(320)))
        with zipfile.ZipFile(folder / "zip", "w") as archive:
            for name in ("lines", "others"):
                archive.writestr(name, path.read_bytes() * 20)  # more than a buffer
        methods = (self.seek, self.zipped, self.mapped, self.pread, self.opened_in_the_process)
        self.read = {method.__name__: method for method in methods}[how]
        if how == "opened_in_the_process":
            self.path, self.file = path, None
        else:
            self.file = zipfile.ZipFile(folder / "zip") if how == "zipped" else path.open("rb", 0)
        if how == "mapped":
            self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def close(self):
        if self.file is not None:
            self.file.close()

    def __len__(self):
        return 320

    def __getitem__(self, index):
        return int(self.read(8 * index))

    def seek(self, start):
        self.file.seek(start)
        return self.file.read(8)

    def zipped(self, start):
        return self.file.read("lines")[start : start + 8]

    def mapped(self, start):
        return self.map[start : start + 8]

    def pread(self, start):
        return os.pread(self.file.fileno(), 8, start)

    def opened_in_the_process(self, start):
        if self.file is None:
            self.file = self.path.open("rb")
        return self.seek(start)


@forks
@pytest.mark.parametrize("how", ["seek", "zipped"])
def test_a_file_whose_position_loader_processes_share_is_refused(how, tmp_path):
    message = r"loading batch 0 failed: DataError: dataset\.file \(.*/(lines|zip)\) was opened"
    with closing(InFile(tmp_path, how)) as data:
        batches = load(data, REQUESTS, collate_fn=None, loader_workers=2, pin_memory=False)
        with pytest.raises(LoaderError, match=message) as raised:
            next(batches)
    assert "Open it in __getitem__ when a process first needs it" in str(raised.value)


@forks
@pytest.mark.parametrize("how", ["mapped", "pread", "opened_in_the_process"])
def test_files_that_loader_processes_can_share_are_read(how, tmp_path):
    with closing(InFile(tmp_path, how)) as data:
        batches = load(data, REQUESTS, collate_fn=None, loader_workers=2, pin_memory=False)
        assert torch.cat(list(batches)).tolist() == list(range(320))


def test_only_files_that_can_be_read_by_position_are_found(tmp_path):
    (tmp_path / "a").write_text("")
    with (tmp_path / "a").open() as file, (tmp_path / "b").open("w") as written:
        closed = (tmp_path / "a").open()
        closed.close()
        reader, writer = os.pipe()
        with open(reader) as pipe, open(writer, "w"):  # noqa: PTH123
            held = {"files": [file, written, closed, pipe, io.BytesIO(b"")]}
            assert [found.file for found in open_files(dataset=held)] == [file]
