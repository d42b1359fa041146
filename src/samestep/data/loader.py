"""Load lane batches in the order of their steps, over torch's DataLoader."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from samestep.data.batch import Batch, packed_where_it_pays
from samestep.data.plan import Plan
from samestep.data.random_state import key, keyed
from samestep.errors import DataError, LoaderError
from samestep.host import end_with_parent, use_socket_folder

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
ENDING_SECONDS: Final = 1.0  # for a process that dies to be dead


class Request(NamedTuple):
    """The samples of one lane batch, with the key of every random draw made while they are loaded."""

    where: str
    indices: Sequence[int]
    key: int


class Fetcher(torch.utils.data.Dataset[Any]):
    """Answers requests from a map-style data set: tensors are indexed as a whole, others by `__getitems__` where they have that.

    Raises `LoaderError` that says where, with the traceback of what failed.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self._tensors = dataset.tensors if collate_fn is None and _is_tensors(dataset) else None

    def __getitem__(self, request: Request) -> Any:
        try:
            if self._tensors is not None:  # nothing is drawn here
                indices = torch.tensor(request.indices, dtype=torch.int64)
                return [tensor.index_select(0, indices) for tensor in self._tensors]
            with keyed(request.key):
                return self.collate_fn(self._samples(request))
        except Exception as error:
            # Only text survives the way back from a loader process, so the cause travels in the
            # message.
            raise LoaderError(
                f"loading {request.where} failed: {type(error).__name__}: {error}\n"
                f"sample indices {_short(request.indices)}\n{traceback.format_exc()}"
            ) from error

    def _samples(self, request: Request) -> list[Any]:
        if not hasattr(self.dataset, "__getitems__"):
            return [self.dataset[index] for index in request.indices]
        samples = self.dataset.__getitems__(list(request.indices))
        if len(samples) != len(request.indices):
            raise DataError(
                f"__getitems__ returned {len(samples)} samples for {len(request.indices)} indices; expected one each, in order"
            )
        return list(samples)


def _is_tensors(dataset: Any) -> bool:
    """Tell whether default_collate would give what indexing the tensors gives, to the bit and the stride."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in dataset.tensors
    )


def load(
    dataset: Any,
    requests: Iterable[Request],
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_workers: int,
    pin_memory: bool,
    ahead: int = 2,
) -> Iterator[Any]:
    """Yield the collated batch of each request, in order; `loader_workers` processes fetch `ahead` requests ahead, and at least two each.

    Raises `LoaderError` when fetching fails or a loader process dies.
    """
    fetcher = Fetcher(packed_where_it_pays(dataset) if loader_workers > 0 else dataset, collate_fn)
    if loader_workers == 0 and not pin_memory:
        yield from (fetcher[request] for request in requests)
        return
    if loader_workers > 0:
        use_socket_folder()
    loader = DataLoader(
        fetcher,
        batch_size=None,  # a request is a whole lane batch
        sampler=_Sampler(requests),
        collate_fn=_as_it_is,
        num_workers=loader_workers,
        pin_memory=pin_memory,
        prefetch_factor=max(2, -(-ahead // loader_workers)) if loader_workers > 0 else None,
        worker_init_fn=partial(_begin_process, os.getpid(), on_main_thread=_on_main_thread()),
        # the loader draws a base seed: not from the generator that user code draws from
        generator=torch.Generator(),
    )
    batches = _iter(loader)
    try:
        yield from batches
    # what a data set raises arrives as LoaderError
    except (RuntimeError, OSError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise LoaderError(
            f"a loader process died ({type(error).__name__}: {reason}); usually it ran out of memory or shared memory, "
            "or native code in the data set crashed: try loader_workers=0 to see which sample it was",
            is_retryable=_was_killed(getattr(batches, "_workers", [])),
        ) from error
    finally:
        if loader_workers > 0:
            # torch leaves it to the garbage collector, and an error's traceback delays that
            batches._shutdown_workers()  # noqa: SLF001


def _iter(loader: DataLoader[Any]) -> Any:
    """Start iterating, without torch's handler of SIGCHLD, and with loader processes that only their parent can end.

    The handler raises in whatever runs when a loader process dies, be it an exchange. Without it
    the iterator finds a dead process within five seconds.
    """
    former = signal.getsignal(signal.SIGCHLD)
    # a loader process begins with these signals held back too, until it ignores them
    with _held_back(STOPPING):
        batches: Any = iter(loader)
    if former is not None and _on_main_thread():
        signal.signal(signal.SIGCHLD, former)
    for process in getattr(batches, "_workers", ()):
        # how torch and Python end one that does not end by itself
        process._popen.terminate = process._popen.kill  # noqa: SLF001
    return batches


def _was_killed(processes: Sequence[BaseProcess]) -> bool:
    """Tell whether one of some loader processes was killed, be it that it is just about to end."""
    ending = wait([process.sentinel for process in processes], ENDING_SECONDS) if processes else []
    for process in processes:
        if process.sentinel in ending:
            process.join(ENDING_SECONDS)
    return any(process.exitcode == -signal.SIGKILL for process in processes)


@contextmanager
def _held_back(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Let signals to this thread wait until the end of a block."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _begin_process(parent: int, _: int, *, on_main_thread: bool) -> None:
    """Make a loader process one that lives as long as its parent needs it.

    Schedulers and terminals signal all processes of a job. The parent then still has a step to end,
    for which it needs its batches.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    # else it would end with the thread that started it, and torch looks every five seconds whether
    # the parent lives
    if on_main_thread:
        end_with_parent(parent)
    # or the garbage collector would write to every object that was there before, which copies its
    # page
    gc.freeze()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Sampler(torch.utils.data.Sampler[Any]):
    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)


def _as_it_is(batch: Any) -> Any:
    return batch


def _short(indices: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, indices[:most]))
    return f"[{shown}{', …' if len(indices) > most else ''}]"


def plan_batches(
    plan: Plan,
    dataset: Any,
    lanes: range,
    positions: Callable[[], Iterator[tuple[int, int]]],
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yield a `Batch` for each (epoch, step in epoch) of `positions()`, with the batches of `lanes`.

    Loader processes fetch across steps and epochs, so `positions` is iterated twice: for fetching
    and for yielding.
    """

    def requests() -> Iterator[Request]:
        for epoch, step in positions():
            counts = plan.counts(epoch, step)
            for lane in lanes:
                if counts[lane]:
                    where = f"lane {lane} of step {step} in epoch {epoch}"
                    yield Request(
                        where,
                        plan.indices(epoch, step, lane).tolist(),
                        key(seed, "fetch", epoch, step, lane),
                    )

    two_steps = 2 * len(lanes)  # one to compute on while the other is loaded
    source = load(
        dataset,
        requests(),
        collate_fn=collate_fn,
        loader_workers=loader_workers,
        pin_memory=pin_memory,
        ahead=two_steps,
    )
    for epoch, step in positions():
        batch = Batch(epoch, lanes, plan.counts(epoch, step), source)
        yield batch
        batch.load()
