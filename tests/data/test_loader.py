from __future__ import annotations

import gc
import os
import random
import signal
import threading
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset, default_collate

from samestep.data.loader import Request, load
from samestep.errors import LoaderError
from tests.launch.processes import end_soon
from tests.workers import run_workers

# loader processes fork; warned about since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Augmented:
    """Each sample has its index and random numbers from all generators."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {
            "index": index,
            "draws": torch.tensor(
                [random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
            ),
        }


class InOneGo(Augmented):
    def __getitem__(self, index):
        raise AssertionError("__getitems__ is to be used")

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [Augmented.__getitem__(self, index) for index in indices]


class TooManyArgumentsError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Broken:
    """Sample 13 fails in a chosen way."""

    def __init__(self, fail):
        self.fail = fail

    def __getitem__(self, index):
        if index == 13:
            self.fail()
        return torch.tensor([index, os.getpid()])


class TooFew(Broken):
    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices if index != 13]


def requests_of(*batches):
    return [
        Request(f"request {number}", indices, 1000 + number)
        for number, indices in enumerate(batches)
    ]


def loaded(dataset, requests, loader_workers, collate_fn=None):
    return list(
        load(
            dataset,
            requests,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            pin_memory=False,
        )
    )


def raise_too_many():
    raise TooManyArgumentsError("bad", "worse")


@forks
def test_batches_and_their_random_numbers_do_not_depend_on_the_process():
    requests = requests_of([3, 1, 4], [1], [5, 9, 2, 6], [], [5, 3])
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return [(sample["index"], *sample["draws"].tolist(), random.random()) for sample in samples]

    torch.manual_seed(1)
    expected = loaded(Augmented(), requests, 0, collate)
    assert [[sample[0] for sample in batch] for batch in expected] == [
        list(request.indices) for request in requests
    ]
    assert calls == [3, 1, 4, 0, 2]
    assert (
        len({number for batch in expected for sample in batch for number in sample[1:]}) == 4 * 10
    )
    for dataset in (Augmented(), InOneGo()):
        for loader_workers in (0, 2):
            torch.rand(7), random.random(), np.random.rand()  # user code draws too
            assert loaded(dataset, requests, loader_workers, collate) == expected
    assert loaded(Augmented(), requests[2:], 0, collate) == expected[2:]


@forks
def test_samples_are_collated_as_in_torch_and_generators_are_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(3)
    for loader_workers in (0, 2):
        torch.manual_seed(3)
        first, second = loaded(Augmented(), requests_of([3, 1], [7]), loader_workers)
        assert first["index"].tolist() == [3, 1]
        assert first["draws"].shape == (2, 3)
        assert second["index"].tolist() == [7]
        assert torch.equal(torch.rand(3), expected)


def assert_same_batches(dataset, indices):
    """Check that indexed samples equal those that torch collates one by one."""
    (batch,) = loaded(dataset, requests_of(indices), 0)
    collated = default_collate([dataset[index] for index in indices])
    assert type(batch) is type(collated)
    for ours, theirs in zip(batch, collated, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


@given(
    shape=st.lists(st.integers(1, 3), max_size=4),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    ),
    indices=st.lists(st.integers(0, 6), min_size=1, max_size=9),
)
def test_indexing_tensors_equals_collating_samples(shape, dtype, indices):
    tensor = (
        torch.arange(7 * 3 ** len(shape))
        .reshape(7, *[3] * len(shape))[(slice(None), *map(slice, shape))]
        .contiguous()
        .to(dtype)
    )
    assert_same_batches(TensorDataset(tensor, torch.arange(7)), indices)


def test_tensors_are_not_indexed_one_by_one(monkeypatch):
    dataset = TensorDataset(torch.arange(5))
    monkeypatch.delattr(TensorDataset, "__getitem__")
    (batch,) = loaded(dataset, requests_of([3, 1]), 0)
    assert batch[0].tolist() == [3, 1]


def test_tensors_of_other_layouts_are_collated():
    plain, images = torch.rand(6, 4), torch.rand(6, 3, 4, 4)
    for tensor in (
        plain.T.contiguous().T,
        images.to(memory_format=torch.channels_last),
        plain.expand(2, 6, 4)[0],
    ):
        assert_same_batches(TensorDataset(tensor, torch.arange(6)), [4, 0, 4])
    (batch,) = loaded(TensorDataset(plain.clone().requires_grad_()), requests_of([1, 2]), 0)
    assert batch[0].requires_grad


@forks
def test_tensors_work_with_loader_processes_and_collate_functions():
    dataset = TensorDataset(torch.rand(6, 4), torch.arange(6))
    requests = requests_of([5, 1], [2, 2, 0])
    for loader_workers in (0, 2):
        for batch, request in zip(loaded(dataset, requests, loader_workers), requests, strict=True):
            assert torch.equal(batch[0], dataset.tensors[0][request.indices])
        assert loaded(dataset, requests, loader_workers, collate_fn=len) == [2, 3]


@forks
def test_lists_of_objects_are_the_same_in_loader_processes():
    records = [{"path": f"{index}.png", "label": index} for index in range(50)]
    requests = requests_of([3, 1], [49, 0, 7])
    assert loaded(records, requests, 2, collate_fn=list) == loaded(
        records, requests, 0, collate_fn=list
    )
    assert loaded(tuple(records), requests, 2, collate_fn=list) == [
        [records[3], records[1]],
        [records[49], records[0], records[7]],
    ]


class Inherited(Broken):
    def __getitem__(self, index):
        """Return whether garbage collections of this process visit this object."""
        return any(other is self for other in gc.get_objects())  # frozen ones are not among them


@forks
def test_loader_processes_do_not_garbage_collect_inherited_objects():
    dataset = Inherited(None)
    assert loaded(dataset, requests_of([0]), 1, collate_fn=list) == [[False]]
    assert dataset[0]


@forks
def test_loader_processes_fetch_the_given_number_of_requests_ahead():
    fetched = []
    requests = (
        fetched.append(request) or request
        for request in requests_of(*[[index] for index in range(60)])
    )
    batches = load(
        Broken(None), requests, collate_fn=None, loader_workers=2, pin_memory=False, ahead=13
    )
    next(batches)
    batches.close()
    assert 13 <= len(fetched) <= 16


@forks
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_error_names_the_request_and_the_cause(loader_workers):
    def endless():
        raise StopIteration

    failures = [
        (Broken(raise_too_many), "TooManyArgumentsError: bad and worse", "in raise_too_many"),
        (Broken(endless), "StopIteration", "in endless"),
        (
            TooFew(None),
            "DataError: __getitems__ must return one sample per index, in order; got 2 samples",
            "in _samples",
        ),
    ]
    for dataset, error, line in failures:
        batches = load(
            dataset,
            requests_of([1, 2], [12, 13, 14]),
            collate_fn=None,
            loader_workers=loader_workers,
            pin_memory=False,
        )
        next(batches)
        with pytest.raises(LoaderError) as caught:
            next(batches)
        assert str(caught.value).startswith(f"loading request 1 failed: {error}")
        for expected in ("sample indices [12, 13, 14]", line):
            assert expected in str(caught.value)
        if error != "TooManyArgumentsError: bad and worse":  # it cannot be unpickled
            assert type(caught.value.__cause__).__name__ == error.partition(":")[0]
    with pytest.raises(
        LoaderError,
        match=r"loading request 0 failed: ValueError: no\nsample indices \[0, 1, .*, 15, …\]",
    ):
        loaded(Augmented(), requests_of(range(40)), loader_workers, refuse)


def refuse(samples):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("end", "is_retryable"),
    [(lambda: os._exit(0), False), (lambda: os.kill(os.getpid(), signal.SIGKILL), True)],
    ids=["exit", "kill"],
)
@forks
def test_a_loader_process_that_dies_is_an_error(end, is_retryable):
    with pytest.raises(LoaderError, match="a loader process died") as caught:
        loaded(Broken(end), requests_of(*[[index] for index in range(20)]), 2)
    assert caught.value.is_retryable is is_retryable


@forks
def test_a_dead_loader_process_is_reported_by_the_next_batch_only():
    """An error inside user code, or in an exchange, would be attributed to the wrong cause."""
    batches = load(
        Broken(None),
        requests_of(*[[index] for index in range(12)]),
        collate_fn=None,
        loader_workers=2,
        pin_memory=False,
    )
    process = int(next(batches)[0, 1])
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    sum(number for number in range(1000))  # here Python handles the signal
    with pytest.raises(LoaderError, match="a loader process died"):
        list(batches)


STOPPING = (signal.SIGTERM, signal.SIGINT)


@forks
def test_loader_processes_ignore_a_signal_to_all_processes_of_a_job():
    def body():
        received = []
        for number in STOPPING:
            signal.signal(number, lambda number, _: received.append(number))
        batches = load(
            Broken(None),
            requests_of(*[[index] for index in range(13)]),
            collate_fn=None,
            loader_workers=2,
            pin_memory=False,
        )
        first = next(batches)
        for number in STOPPING:
            os.killpg(0, number)
        return [int(batch[0, 0]) for batch in (first, *batches)], received

    assert run_workers(body, 1) == [(list(range(13)), list(STOPPING))]


@forks
def test_an_early_signal_is_ignored_by_loader_processes_and_not_lost_by_their_parent():
    def body():
        parent, received = os.getpid(), []
        for number in STOPPING:
            signal.signal(
                number,
                lambda number, _: received.append(number) if os.getpid() == parent else os._exit(1),
            )

        def signal_all():
            for number in STOPPING:
                os.kill(os.getpid(), number)

        os.register_at_fork(before=signal_all, after_in_child=signal_all)
        assert [
            int(batch[0, 0])
            for batch in loaded(Broken(None), requests_of(*[[index] for index in range(9)]), 2)
        ] == list(range(9))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        return set(received)

    assert run_workers(body, 1) == [set(STOPPING)]


class Endless(Broken):
    def __getitem__(self, index):
        if index > 1:
            threading.Event().wait()
        return super().__getitem__(index)


def begin_endless_loading():
    """Return an iterator with two loader processes that never exit, and their process ids."""
    batches = load(
        Endless(None),
        requests_of(*[[index] for index in range(4)]),
        collate_fn=None,
        loader_workers=2,
        pin_memory=False,
    )
    return batches, [int(next(batches)[0, 1]) for _ in range(2)]


@forks
def test_loader_processes_exit_when_their_parent_is_killed():
    fork = get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)

    def body():
        _batches, pids = begin_endless_loading()
        sending.send(pids)
        os.kill(os.getpid(), signal.SIGKILL)

    parent = fork.Process(target=body)
    parent.start()
    parent.join()
    assert end_soon(receiving.recv())
    receiving.close()
    sending.close()


KEPT = []


@forks
def test_loader_processes_exit_with_a_process_that_exits_inside_its_loop():
    assert end_soon(
        run_workers(lambda: KEPT.append(begin_endless_loading()) or KEPT[0][1], 1, timeout=120.0)[0]
    )
