from __future__ import annotations

import pickle
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.batch import PackedList
from samestep.data.loader import Request, load
from samestep.errors import DataError

# loader processes fork; warned about since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda values: (
        st.lists(values) | st.dictionaries(st.text(), values) | st.tuples(values, values)
    ),
    max_leaves=6,
)


@given(items=st.lists(VALUES, max_size=10), index=st.integers(-12, 12), cut=st.slices(10))
def test_it_reads_like_a_list(items, index, cut):
    packed = PackedList(iter(items))
    assert list(packed) == items
    assert len(packed) == len(items)
    assert packed[cut] == items[cut]
    assert list(reversed(packed)) == items[::-1]
    if -len(items) <= index < len(items):
        assert packed[index] == items[index]
    else:
        with pytest.raises(IndexError):
            packed[index]
    assert list(pickle.loads(pickle.dumps(packed))) == items


def test_each_access_returns_a_new_object():
    items = [{"label": [1]}] * 2
    packed = PackedList(items)
    packed[0]["label"].append(2)
    items[1]["label"].append(3)
    assert list(packed) == [{"label": [1]}] * 2


def test_objects_and_arrays_are_packed():
    items = [Path("a/b"), np.arange(3), np.float32(2)]
    path, values, number = PackedList(items)
    assert (path, values.tolist(), number) == (Path("a/b"), [0, 1, 2], 2)
    assert values.flags.writeable


def test_an_item_that_cannot_be_packed_is_named():
    with pytest.raises(
        DataError,
        match="item 1, tuple, cannot be packed: TypeError: a tensor would be copied",
    ):
        PackedList([0, (torch.zeros(2), 1)])
    with pytest.raises(DataError, match="item 2, function, cannot be packed: "):
        PackedList([0, 1, lambda: None])


class Records:
    def __init__(self, records):
        self.records = records

    def __getitem__(self, index):
        return len(self.records[index]["path"])


def growth(dataset, objects, epochs):
    """Return the growth of the private memory of two loader processes, in bytes.

    It is measured after the first batch of each, when both have started.
    """

    def private_bytes():
        rollups = [
            Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            for process in active_children()
        ]
        assert len(rollups) == 2
        return sum(
            int(line.split()[1]) * 1024
            for lines in rollups
            for line in lines
            if line.startswith("Private_")
        )

    batch = 1000
    requests = [
        Request(f"batch at {start}", range(start, start + batch), 0)
        for _ in range(epochs)
        for start in range(0, objects, batch)
    ]
    batches = load(dataset, requests, collate_fn=sum, loader_workers=2, pin_memory=False)
    next(batches), next(batches)
    first = private_bytes()
    for _ in requests[3:]:  # all but the last batch, after which the processes may exit
        next(batches)
    last = private_bytes()
    batches.close()
    return last - first


@pytest.mark.long
@forks
def test_loader_processes_do_not_copy_a_packed_list():
    objects = 100_000
    records = [
        {"path": f"images/class{number % 100}/image{number:08}.jpg"} for number in range(objects)
    ]
    plain = growth(Records(records), objects, epochs=3)
    packed = growth(Records(PackedList(records)), objects, epochs=3)
    assert plain > 8 * 2**20
    assert packed < plain / 8
