"""Loading of lane batches in step order, with torch's DataLoader."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from samestep.data.agreement import DataCheck, Loads, Sample, Use, changes, differs, digest
from samestep.data.attributes import AttributeCheck, OpenFile, open_files, refuse_moved
from samestep.data.batch import Batch, Incomplete
from samestep.data.generators import ForeignGenerators, is_observed, observe
from samestep.data.origin import Origin
from samestep.data.plan import Plan
from samestep.data.random_state import key
from samestep.errors import DataError, LoaderError
from samestep.host import end_with_parent, use_socket_folder
from samestep.torch_internals import end_loader_processes, loader_processes

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_SECONDS: Final = 1.0  # for a killed process to be reaped
SHOWN_INDICES: Final = 16
LOADERS: Final = "SAMESTEP_INTERNAL_LOADERS"  # number of loader processes; set by samestep verify
COMPARE_SECONDS: Final = 1.0  # to load the samples that workers compare


class Request(NamedTuple):
    """The samples of one lane batch, and the key of the random draws made while loading them.

    If it `is_compared`, the answer is the digests of each sample instead, as `Loads`; at the first
    use of a data set (`is_first`), two loads of them are compared with each other, too.
    """

    where: str
    indices: Sequence[int]
    key: int
    is_compared: bool = False
    is_first: bool = False


class Failure(NamedTuple):
    """A failed request in a loader process: the text of its `LoaderError`, and the pickled cause.

    An error that is raised there gets a first line of torch's, which does not name the request.
    """

    text: str
    cause: bytes

    @classmethod
    def of(cls, text: str, cause: Exception) -> Failure:
        """Describe a failure; without its cause if that cannot be pickled."""
        pickled = b""
        with suppress(Exception):  # an error may hold anything
            pickled = pickle.dumps(cause)
        return cls(text, pickled)

    def raise_error(self) -> NoReturn:
        """Raise `LoaderError`, from the cause if that can be rebuilt here."""
        cause = None
        with suppress(Exception):
            cause = pickle.loads(self.cause)  # noqa: S301  from a process that this one started
        raise LoaderError(self.text) from (cause if isinstance(cause, Exception) else None)


class Fetcher(Dataset[Any]):
    """Returns the collated batch of a request, from a map-style data set.

    Tensors are indexed directly, other data sets through `__getitems__` if they have it. A batch is
    `Incomplete` if the data set returned None for a sample. Raises `LoaderError` with the request's
    location and the original traceback; in a loader process, returns it as a `Failure`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        shared_files: Sequence[OpenFile] = (),
    ) -> None:
        """`shared_files` are open when processes that use this are started."""
        self.dataset, self._shared_files = dataset, shared_files
        self.collate_fn = collate_fn or default_collate
        self._generators = ForeignGenerators(dataset=dataset, collate_fn=self.collate_fn)
        self._tensors = dataset.tensors if collate_fn is None and _is_tensors(dataset) else None
        self._observes = is_observed() and self._tensors is None

    def __getitem__(self, request: Request) -> Any:
        if request.is_compared:
            return self._loads(request)
        try:
            if self._tensors is not None:  # no random draws
                indices = torch.from_numpy(np.array(request.indices, dtype=np.int64))
                return [tensor.index_select(0, indices) for tensor in self._tensors]
            if self._observes:
                self._observe_loads(request)
            try:
                return self._generators.draw(request.key, lambda: self._collated(request))
            finally:  # also after an error, which wrong bytes may have caused
                refuse_moved(self._shared_files)
        except Exception as error:
            first_indices = ", ".join(map(str, request.indices[:SHOWN_INDICES]))
            more = ", …" if len(request.indices) > SHOWN_INDICES else ""
            # a traceback cannot be sent from a loader process, so the message contains it
            text = (
                f"loading {request.where} failed: {type(error).__name__}: {error}\n"
                f"sample indices [{first_indices}{more}]\n{traceback.format_exc()}"
            )
            if get_worker_info() is not None:
                return Failure.of(text, error)
            raise LoaderError(text) from error

    def _collated(self, request: Request) -> Any:
        samples = self._samples(request)
        present = sum(sample is not None for sample in samples)
        batch = self.collate_fn(samples)
        return batch if present == len(samples) else Incomplete(batch, present)

    def load_sample(self, index: int) -> None:
        """Load a sample, as a loader process does; an index of -1 is the last one."""
        request = Request("a sample", [index % size_of(self.dataset)], 0)
        self._generators.draw(request.key, lambda: self._samples(request))

    def _loads(self, request: Request) -> Loads:
        """Return the digests of each sample, and what a second load of them changes.

        A sample that its load changes, or that is made of those loaded before, shows in the second
        load if others came between. Tensors are indexed without code that could do so.
        """
        samples, first = self._digests(request)
        if not request.is_first or self._tensors is not None:
            return Loads(samples)
        _, again = self._digests(request)
        changed = sorted(changes(first, again), key=lambda change: change.is_number)
        if not changed:
            return Loads(samples)
        number, part, is_number = changed[0]
        what = f"collate_fn's batch{part} of samples {list(request.indices)}"
        if number < len(samples):
            what = f"sample {request.indices[number]}{part}"
        dataset = self.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        return Loads(samples, f"{what} of {type(dataset).__name__}", is_number)

    def _digests(self, request: Request) -> tuple[list[Sample], list[Sample]]:
        """Return the digests of each sample, without and with its floating-point values.

        None stands for one that fails or is late. Only at the first use, there are any of the
        latter; that of their batch follows if there is a `collate_fn`, which may change samples.
        """
        end = time.monotonic() + COMPARE_SECONDS
        loaded: list[tuple[Any, Sample, Sample]] = []
        for index in request.indices:
            load_digests = partial(self._load_digests, request._replace(indices=[index]))
            sample: tuple[Any, Sample, Sample] = (None, None, None)
            if not loaded or time.monotonic() < end:
                with suppress(Exception):  # its batch will raise the error
                    sample = self._generators.draw(request.key, load_digests)
            loaded.append(sample)
        samples, plain, exact = map(list, zip(*loaded, strict=True))
        has_batch = request.is_first and self.collate_fn is not default_collate
        if has_batch and None not in plain:
            with suppress(Exception):
                exact.append(
                    self._generators.draw(
                        request.key, lambda: digest(self.collate_fn(samples), has_floats=True)
                    )
                )
        return plain, exact

    def _load_digests(self, request: Request) -> tuple[Any, Sample, Sample]:
        (sample,) = self._samples(request)
        exact = digest(sample, has_floats=True) if request.is_first else None
        return sample, digest(sample), exact

    def _observe_loads(self, request: Request) -> None:
        """Tell `samestep verify` once if samples depend on more than their index and the seed."""
        self._observes = False
        request = request._replace(is_first=True)
        # not the first load, which may create what later ones use
        _, *loads = (self._digests(request)[1] for _ in range(3))
        if differs(loads) is not None:
            observe(kind="sample", name=type(self.dataset).__name__)

    def _samples(self, request: Request) -> list[Any]:
        return samples_of(self.dataset, request.indices)


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return the samples at `indices` of a map-style data set, together if it can load them so."""
    if not hasattr(dataset, "__getitems__"):
        return [dataset[index] for index in indices]
    samples = dataset.__getitems__(list(indices))
    if len(samples) != len(indices):
        raise DataError(
            "__getitems__ must return one sample per index, in order; got"
            f" {len(samples)} samples for {len(indices)} indices"
        )
    return list(samples)


def size_of(dataset: Any) -> int:
    """Return the number of samples of a map-style data set; raise `DataError` for other objects.

    An `IterableDataset` with `__len__` and `__getitem__` is map-style, too. If it has `size`, as in
    mosaicml-streaming, that is its number of samples, and `__len__` the share of one worker.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            "expected a data set, got a DataLoader; pass the data set that it loads (dataset, not"
            " loader) with batch_size=, collate_fn= and loader_workers= here: samestep makes the"
            " batches, so that each sample is used once at any number of workers"
        )
    if isinstance(dataset, Mapping):
        raise DataError(
            f"expected a data set, got a {type(dataset).__name__}; run.batches takes a dict of data"
            " sets with weights=, and run.evaluate one data set at a time"
        )
    # torch's base class has a method that only raises an error
    has_items = getattr(type(dataset), "__getitem__", Dataset.__getitem__) != Dataset.__getitem__
    if not has_items or not hasattr(dataset, "__len__"):
        raise DataError(
            "dataset must have __len__ and __getitem__, "
            f"got {type(dataset).__name__}; for iterable data use run.streams"
        )
    size = getattr(dataset, "size", None) if isinstance(dataset, IterableDataset) else None
    return size if isinstance(size, int) else len(dataset)


def _is_tensors(dataset: Any) -> bool:
    """Return whether indexing the tensors gives the bits and strides of default_collate."""
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
    """Yield the collated batch of each request, or an `Incomplete` one, in order.

    `loader_workers` processes fetch `ahead` requests ahead, and at least two each. Raises
    `LoaderError` if fetching fails or a loader process dies.
    """
    if is_observed():  # `samestep verify` compares 0 and 2 loader processes
        observe(kind="loaders", count=loader_workers)
        loader_workers = int(os.environ.get(LOADERS, loader_workers))
    roots = {"dataset": dataset, "collate_fn": collate_fn}
    fetcher = Fetcher(dataset, collate_fn, open_files(**roots) if loader_workers > 0 else ())
    if loader_workers == 0 and not pin_memory:
        yield from (fetcher[request] for request in requests)
        return
    attributes = AttributeCheck(**roots) if loader_workers > 0 else None
    if loader_workers > 0:
        use_socket_folder()
    loader = DataLoader(
        fetcher,
        batch_size=None,  # a request is a complete lane batch
        sampler=requests,
        collate_fn=_identity,
        num_workers=loader_workers,
        pin_memory=pin_memory,
        prefetch_factor=max(2, -(-ahead // loader_workers)) if loader_workers > 0 else None,
        worker_init_fn=partial(_init_process, os.getpid(), on_main_thread=_on_main_thread()),
        generator=torch.Generator(),  # for its base seed, instead of the generator of user code
    )
    batches = _iter(loader)
    try:
        for batch in batches:
            if isinstance(batch, Failure):
                batch.raise_error()
            yield batch
            if attributes is not None:  # the script went on, and needs another batch
                attributes.refuse_changes(fetcher.load_sample)
    except (RuntimeError, OSError, EOFError) as error:  # a data set's errors are LoaderErrors
        reason = str(error).partition("\n")[0]
        raise LoaderError(
            f"a loader process died ({type(error).__name__}: {reason}), usually because it ran out"
            " of memory or shared memory, or native code in the data set crashed; use"
            " loader_workers=0 to find the sample",
            is_retryable=_was_killed(loader_processes(batches)),
        ) from error
    finally:
        if loader_workers > 0:
            end_loader_processes(batches)  # an error's traceback would delay that


def _iter(loader: DataLoader[Any]) -> Any:
    """Start iterating, without torch's SIGCHLD handler, and with `terminate` replaced by `kill`.

    The handler raises in whatever code runs when a loader process dies, for example an exchange.
    Without it, the iterator detects a dead process within five seconds.
    """
    former = signal.getsignal(signal.SIGCHLD)
    with _blocked(STOP_SIGNALS):  # loader processes inherit this until they ignore the signals
        batches: Any = iter(loader)
    if former is not None and _on_main_thread():
        signal.signal(signal.SIGCHLD, former)
    for process in loader_processes(batches):
        # torch and Python terminate processes that do not exit
        process._popen.terminate = process._popen.kill  # noqa: SLF001 (no public method)
    return batches


def _was_killed(processes: Sequence[BaseProcess]) -> bool:
    """Return whether a loader process was killed, including one that is about to exit."""
    exited = wait([process.sentinel for process in processes], EXIT_SECONDS) if processes else []
    for process in processes:
        if process.sentinel in exited:
            process.join(EXIT_SECONDS)
    return any(process.exitcode == -signal.SIGKILL for process in processes)


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _init_process(parent: int, _: int, *, on_main_thread: bool) -> None:
    """Make a loader process ignore stop signals and exit with its parent.

    Schedulers and terminals signal all processes of a job. The parent must still complete its step,
    for which it needs batches.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # torch checks only every five seconds whether the parent is alive; a process started by another
    # thread would exit with that thread
    if on_main_thread:
        end_with_parent(parent)
    gc.freeze()  # a garbage collection writes to every existing object, which copies its page


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _identity(batch: Any) -> Any:
    return batch


def compared(use: Use, number: int, *, at_start: bool = True) -> Request:
    """Return the request for the samples that workers compare."""
    key_of_draws = key(use.seed, "compare draws", number)
    is_first = at_start and use.earlier == 0
    where, indices = f"samples of {use.where}", use.indices(number)
    return Request(where, indices, key_of_draws, is_compared=True, is_first=is_first)


def load_now(
    dataset: Any,
    request: Request,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_workers: int,
) -> Any:
    """Return the answer to a request: from a process of its own if `loader_workers` load others.

    Data sets open files there.
    """
    options: dict[str, Any] = {"collate_fn": collate_fn, "loader_workers": min(1, loader_workers)}
    (answer,) = load(dataset, [request], pin_memory=False, **options)
    return answer


@dataclass(frozen=True)
class LaneSource:
    """The batches of all lanes, each a function of the plan."""

    plan: Plan
    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None
    loader_workers: int

    def request(self, epoch: int, step: int, lane: int) -> Request:
        """Return the request for a lane's batch."""
        where = f"lane {lane} of step {step} in epoch {epoch}"
        indices = self.plan.indices(epoch, step, lane).tolist()
        return Request(where, indices, key(self.seed, "fetch", epoch, step, lane))

    def load(self, epoch: int, step: int, lane: int) -> Any:
        """Load a lane's batch now, where other batches are loaded."""
        request = self.request(epoch, step, lane)
        return load_now(self.dataset, request, self.collate_fn, self.loader_workers)


def plan_batches(
    plan: Plan,
    dataset: Any,
    lanes: range,
    positions: Callable[[], Iterator[tuple[int, int]]],
    check: DataCheck,
    name: str,
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yield a `Batch` for each (epoch, step in epoch) of `positions()`, with batches of `lanes`.

    Some epochs start with the samples that `check` compares between workers, and all of them with a
    comparison of the plans. Loader processes fetch across steps and epochs, so `positions` is
    iterated twice: once to fetch and once to yield.
    """
    use = check.begin(dataset, plan.size, f"loop {name!r}", plan.excluded)
    lane_source = LaneSource(plan, dataset, seed, collate_fn, loader_workers)

    def is_due(number: int, epoch: int, step: int) -> bool:
        at_start = number == 0
        return (at_start or step == 0) and use.is_due(epoch, at_start=at_start)

    def requests() -> Iterator[Request]:
        for number, (epoch, step) in enumerate(positions()):
            if is_due(number, epoch, step):
                yield compared(use, epoch, at_start=number == 0)
            counts = plan.counts(epoch, step)
            for lane in lanes:
                if counts[lane]:
                    yield lane_source.request(epoch, step, lane)

    source = load(
        dataset,
        requests(),
        collate_fn=collate_fn,
        loader_workers=loader_workers,
        pin_memory=pin_memory,
        ahead=2 * len(lanes),  # one step to compute while the next one is loaded
    )
    for number, (epoch, step) in enumerate(positions()):
        if is_due(number, epoch, step):
            check.add(use, epoch, next(source))
        if number == 0 or step == 0 or plan.varies:
            check.add_plan(use, epoch, plan.compared(epoch, step))
        origin = Origin(name, dataset, plan, epoch, step, lane_source.load)
        counts, is_exact = plan.counts(epoch, step), collate_fn is None
        batch = Batch(epoch, lanes, counts, source, is_exact, origin)
        yield batch
        batch.load()
