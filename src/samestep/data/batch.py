"""Batches of lanes, streams of batches, and a list that shares its memory between processes."""

from __future__ import annotations

import io
import pickle
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from numbers import Number
from opcode import opmap
from types import FrameType
from typing import Any, Final, Literal, NamedTuple, TypeVar, overload
from weakref import ReferenceType, ref

import torch

from samestep.data.generators import ForeignGenerators
from samestep.data.lane_body import kept_by
from samestep.data.lane_loop import LaneLoop
from samestep.data.nested import mapped, parts_of
from samestep.data.origin import Origin
from samestep.data.plan import check_end
from samestep.data.random_state import key, keyed
from samestep.errors import DataError, LossError

UNPACK: Final = opmap["UNPACK_SEQUENCE"]
NOT_ONE_BATCH: Final = (
    "it holds one lane batch for each lane of this worker; pass it to run.backward, which calls"
    " loss_fn(model, lane_batch) for each of them, or use `for lane_batch in batch.lanes(model):`"
    " to train and `for lane_batch in batch:` only to look at it"
)
NO_LANE: Final = (
    "batch.backward(loss) belongs into the body of `for lane_batch in batch.lanes(model):`, once"
    " for each lane; elsewhere it has no samples to stand for"
)


# of a batch, modules, options, the variables of the loop's body, and those that it keeps; also
# returns whether several workers may share the bodies
BeginLanes = Callable[..., tuple[Generator[Any, Any, Any], bool]]


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables that the code of a frame uses, by name."""
    names, code = {**frame.f_globals, **frame.f_locals}, frame.f_code
    used = code.co_names + code.co_varnames + code.co_cellvars + code.co_freevars
    return {name: names[name] for name in used if name in names}


class Incomplete(NamedTuple):
    """A collated batch of a data set that returned None for some samples, without those."""

    data: Any
    samples: int


@dataclass
class Batch:
    """A step's global batch from `run.batches` or `run.streams`; iterates over lane batches.

    It yields the batches of this worker's lanes, in lane order, as returned by `collate_fn` or the
    stream, without lanes that have no samples. It may be iterated more than once; to train, iterate
    over `lanes`. `epoch` counts from 0. `own_lanes` are the numbers of this worker's lanes.
    `counts` holds the planned number of samples of each lane of the run, None for streams.
    `is_exact` says whether lane batches have that number; a `collate_fn` may have dropped some.
    `origin` has the indices of the samples of each lane, and loads the batch of any lane; None for
    streams, which can be read only once.
    """

    epoch: int
    own_lanes: range
    counts: Sequence[int] | None
    source: Iterator[Any]
    is_exact: bool = True
    origin: Origin | None = None
    data_seconds: float = 0.0
    _loaded: list[tuple[int, Any]] = field(default_factory=list)
    _incomplete: dict[int, int] = field(default_factory=dict)
    _begin: BeginLanes | None = None
    _loop: ReferenceType[LaneLoop] | None = None  # weak, so that it ends with a `break`
    _means: Any = None

    def attach(self, begin: BeginLanes) -> Batch:
        """Let `begin` compute the gradient of a loop over the lanes; return this batch."""
        self._begin = begin
        return self

    def lanes(
        self,
        *modules: Any,
        count: Callable[[Any], Any] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        embed: Callable[[Any, Any], Any] | None = None,
    ) -> Iterable[Any]:
        """Iterate over this worker's lanes, to compute their losses in the body of a loop.

        Each lane batch is on the device of its lane, and random numbers are those of the lane. The
        body calls `batch.backward(loss)` once for each. The loop ends when all workers have added
        up their lanes; then `.grad` is the gradient of the mean over the global batch, and
        `batch.means` has the means. It is the same as that of `run.backward` in every bit.

        Args:
            modules: Replicated modules that get gradients, the same ones on all workers; also on
                one that has no samples of this batch, where the body does not run.
            count: Returns the number of items in a lane batch, as in `run.backward`.
            reduction: With "sum", losses and metrics are sums over the items of a lane.
            embed: For losses that compare samples with each other, as in `run.backward`. The body
                then runs once per worker, with what `embed(model, lane_batch)` returned for all
                lanes: a tensor [items, ...], or a tuple or dict of them. Of several modules, the
                model is a `torch.nn.ModuleList`.

        Raises:
            ConfigError: `reduction` is unknown, or `embed` is used with `count` or `reduction`.
            LossError: `batch.backward` was left out for a lane, or called twice; a lane left a
                variable to the next one.
            ModelError: A module is not replicated.

        Example:
            >>> for batch in run.batches(train_set, 32, steps=1):
            ...     for inputs, labels in batch.lanes(model):
            ...         batch.backward(F.cross_entropy(model(inputs), labels))
            >>> list(batch.means)
            ['loss']
        """
        if self._begin is None:
            raise DataError("batch.lanes needs a batch of a loop over run.batches or run.streams")
        self._means = None
        frame = sys._getframe(1)  # noqa: SLF001 (there is no public way)
        variables = _variables(frame)
        options: dict[str, Any] = {"count": count, "reduction": reduction, "embed": embed}
        options |= {"variables": variables, "kept": kept_by(frame, variables)}
        steps, is_shared = self._begin(self, modules, **options)
        loop = LaneLoop(steps, self._end_lanes, is_shared=is_shared)
        self._loop = ref(loop)
        return loop

    def leave_lanes(self) -> None:
        """End a loop over lanes that was left, although its iterator was stored."""
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.close()

    def _end_lanes(self, means: Any) -> None:
        self._means = means

    def backward(self, loss: Any, /, **metrics: Any) -> None:
        """Add the gradient of a lane's loss, in the body of a loop over `batch.lanes`.

        Args:
            loss: Scalar tensor with a gradient, the mean over the lane's items.
            metrics: Scalars to average over all items, a boolean or integer tensor [items], or a
                pair (sum, count) of scalars.

        Raises:
            LossError: The loss is not a scalar or has no gradient; this is not the body of such a
                loop; or the lane has got its loss before.
        """
        loop = None if self._loop is None else self._loop()
        if loop is None:
            raise LossError(NO_LANE)
        loop.backward(loss, metrics)

    @property
    def size(self) -> int:
        """The planned number of samples of all lanes. Raises `DataError` for streams."""
        if self.counts is None:
            raise DataError("batch.size is the planned number of samples, and streams have no plan")
        return sum(self.counts)

    @property
    def means(self) -> Any:
        """The `Means` of the last loop over `batch.lanes`. Raises `LossError` before its end."""
        if self._means is None:
            raise LossError(
                "batch.means is there after the end of a loop `for lane_batch in"
                " batch.lanes(model):`, because it has the means over the lanes of all workers"
            )
        return self._means

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)  # noqa: SLF001 (there is no public way)
        instruction, variables = caller.f_code.co_code[caller.f_lasti :][:2]
        if instruction == UNPACK and variables > 1:
            raise DataError(f"a batch cannot be unpacked: {NOT_ONE_BATCH}")
        return (data for _, data in self.lane_batches())

    def __getitem__(self, name: object) -> Any:
        """Raise `DataError`, because only lane batches have parts."""
        raise DataError(f"a batch has no item {name!r}: {NOT_ONE_BATCH}")

    def lane_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield (lane, lane batch); load those that are not loaded yet."""
        with_samples = [lane for lane in self.own_lanes if self.counts is None or self.counts[lane]]
        for number, lane in enumerate(with_samples):
            if number == len(self._loaded):
                started = time.perf_counter()
                data = next(self.source)
                if isinstance(data, Incomplete):
                    data, self._incomplete[lane] = data
                self._loaded.append((lane, data))
                self.data_seconds += time.perf_counter() - started
            yield self._loaded[number]

    def load(self) -> None:
        """Load the remaining lane batches, so that the source is at the next step."""
        for _ in self.lane_batches():
            pass

    def samples(self, lane: int, data: Any) -> int:
        """Return the number of samples in a lane batch. Raises `DataError` as `samples_in` does."""
        planned = None if self.counts is None else self.counts[lane]
        planned = self._incomplete.get(lane, planned)
        return samples_in(data, planned, f"lane {lane}", is_exact=self.is_exact)


def samples_in(batch: Any, planned: int | None, where: str, *, is_exact: bool = False) -> int:
    """Return the number of samples in a collated batch: the length that all of its parts have.

    Tensors, arrays and lists of values have a length; numbers, strings and other objects do not.
    The parts of dicts, tuples, lists and dataclasses are counted. A list or tuple of similar parts
    may also be a list of samples. Then, and for a batch without any length, `planned` decides:
    the number of samples that were passed to `collate_fn`, None in a stream. If it fits neither
    reading, a batch that is a tuple is counted by its parts. With `is_exact`, a planned number is
    right without counting.

    Raises:
        DataError: Lengths differ, or two readings are possible; the message starts with `where`.
    """
    if is_exact and planned is not None:
        return planned
    if batch is None:  # a stream without data, or a `collate_fn` that dropped all samples
        return 1 if planned is None else 0
    lengths = _lengths(batch)
    if lengths is None:
        return 1 if planned is None else planned
    if planned in lengths:
        return planned
    if isinstance(batch, tuple):  # `inputs, targets` more likely than samples
        common_lengths = _common_lengths(parts_of(batch).values())
        lengths = lengths if common_lengths is None else common_lengths
    if len(lengths) == 1:
        return lengths.pop()
    if lengths:
        problem = f"it can be read as {' or '.join(map(str, sorted(lengths)))} samples"
    else:
        named = {name: _lengths(part) for name, part in parts_of(batch).items()}
        part_lengths = [
            f"{name!r}: {' or '.join(map(str, sorted(n)))}" for name, n in named.items() if n
        ]
        problem = f"its parts have different lengths ({', '.join(part_lengths)})"
    raise DataError(
        f"the samples in {where} cannot be counted: {problem}; pass count= with a function that"
        " returns their number, for example count=lambda batch: len(batch[0])"
    )


def _lengths(batch: Any) -> set[int] | None:
    """Return the possible numbers of samples, empty if parts differ; None if there is no length."""
    if batch is None or isinstance(batch, (str, bytes, Number)):
        return None
    if hasattr(batch, "shape"):
        return {int(batch.shape[0])} if len(batch.shape) else None
    parts = parts_of(batch)
    lengths = _common_lengths(parts.values())
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        kinds = {_kind(part) for part in batch if part is not None}
        return {len(batch), *(lengths or ())} if len(kinds) <= 1 else lengths
    if isinstance(batch, Mapping) or parts:
        return lengths
    return {len(batch)} if hasattr(batch, "__len__") else None


def _common_lengths(parts: Iterable[Any]) -> set[int] | None:
    length_sets = [lengths for lengths in map(_lengths, parts) if lengths is not None]
    return set.intersection(*length_sets) if length_sets else None


def _kind(part: Any) -> Any:
    """Return a value that is equal for parts that may be samples of one data set."""
    if hasattr(part, "dtype") and hasattr(part, "shape"):
        return str(part.dtype), len(part.shape)
    if isinstance(part, (list, tuple)):
        return type(part), _kind(part[0]) if part else None
    return Number if isinstance(part, Number) else type(part)


def to_device(batch: Any, device: Any) -> Any:
    """Return a collated batch with every tensor on `device`; containers keep their types."""
    # a non-blocking copy to the CPU could be read before it is complete
    non_blocking = str(device) != "cpu"
    return mapped(batch, lambda part: part.to(device, non_blocking=non_blocking))


def begin_to_host(batch: Any) -> Callable[[], Any]:
    """Begin to copy a batch from GPUs; return a call that waits, once per GPU, and returns it."""
    devices: dict[torch.device, None] = {}

    def begin(part: Any) -> Any:
        if not _is_plain(part) or not part.is_cuda:
            return part
        devices[part.device] = None
        return part.to("cpu", non_blocking=True)  # in pinned memory

    begun = mapped(batch, begin)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def end() -> Any:
        for event in events:
            event.synchronize()
        # pinned memory is scarce, and larger than what it holds
        return mapped(begun, lambda part: part.clone() if _is_pinned(part) else part.to("cpu"))

    return end


class BatchCopier:
    """Copies batches to a device. A GPU copies plain tensors while it computes something else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch; return a call that returns it, for the device's current stream."""
        if self._device.type != "cuda":
            return partial(to_device, batch, self._device)
        with torch.cuda.stream(self._stream):
            begun = mapped(batch, self._begin_part)
            copied = self._stream.record_event()

        def end() -> Any:
            torch.cuda.current_stream(self._device).wait_event(copied)
            return mapped(begun, self._end_part)

        return end

    def _begin_part(self, part: Any) -> Any:
        if not _is_plain(part) or part.is_cuda:
            return part
        if not part.is_pinned():
            if not part.is_contiguous():  # pinning keeps strides, also such as `to` would change
                return part
            part = part.pin_memory()  # or the host would wait for the copy
        return part.to(self._device, non_blocking=True)

    def _end_part(self, part: Any) -> Any:
        part = part.to(self._device, non_blocking=True)
        if _is_plain(part):  # its memory is not reused until this stream is done with it
            part.record_stream(torch.cuda.current_stream(self._device))
        return part


def _is_pinned(part: Any) -> bool:
    return _is_plain(part) and part.is_pinned()


def _is_plain(part: Any) -> bool:
    """Return whether an object is a tensor with its own memory: dense, and of no subclass."""
    return type(part) is torch.Tensor and part.layout == torch.strided and not part.is_nested


class LaneStream(Iterator[Any]):
    """The source of one lane: counts its items, and seeds all generators before each item.

    A source with `state_dict` and `load_state_dict` is restored by them. Others are created again
    and read up to the saved position.
    """

    def __init__(self, make_stream: Callable[[int], Any], name: str, lane: int, seed: int) -> None:
        self._name, self._lane, self._seed = name, lane, seed
        self._yielded = 0
        with keyed(key(seed, f"stream {name}", lane)):
            self._source = make_stream(lane)
            self._items = iter(self._source)
        self._generators = ForeignGenerators(stream=self._source, items=self._items)

    def __next__(self) -> Any:
        item_key = key(self._seed, f"stream {self._name}", self._lane, self._yielded)
        try:
            item = self._generators.draw(item_key, partial(next, self._items), repeatable=False)
        except StopIteration:
            raise DataError(
                f"stream {self._name!r} of lane {self._lane} must be endless, but ended after"
                f" {self._yielded} items; repeat it inside make_stream"
            ) from None
        self._yielded += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items so far, and the source's own state if it has one."""
        has_state = hasattr(self._source, "state_dict")
        return {"given": self._yielded, "source": self._source.state_dict() if has_state else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state["source"] is None:
            while self._yielded < state["given"]:
                next(self)
        else:
            self._source.load_state_dict(state["source"])
            self._items = iter(self._source)  # many sources read their state when iteration starts
            self._generators = ForeignGenerators(stream=self._source, items=self._items)
            self._yielded = state["given"]


def stream_batches(
    streams: Mapping[int, LaneStream], lanes: range, steps: int | None = None
) -> Iterator[Batch]:
    """Yield a `Batch` per step with one item of each lane's stream; without `steps`, forever."""
    for _ in count() if steps is None else range(steps):
        batch = Batch(0, lanes, None, (next(streams[lane]) for lane in lanes))
        yield batch
        batch.load()


def steps_left(steps: int | None, done: int) -> int | None:
    """Return how many of `steps` are left after `done`, None if the loop is endless."""
    check_end("steps", steps)
    return None if steps is None else max(0, steps - done)


Item = TypeVar("Item")


class PackedList(Sequence[Item]):
    """A read-only list that stores its items as bytes in one block; each access unpickles a copy.

    Reading a Python object writes to its reference count, so each loader process ends up with its
    own copy of all memory pages that hold objects. The block stays shared, and is smaller than the
    objects.

    Args:
        items: Plain values, small objects or arrays that can be pickled.

    Raises:
        DataError: An item cannot be pickled, or contains a tensor.

    Example:
        >>> records = ss.PackedList([{"file": "a.png", "label": 3}, {"file": "b.png", "label": 5}])
        >>> records[1]["label"], len(records)
        (5, 2)
    """

    def __init__(self, items: Iterable[Item]) -> None:
        block, self._starts = io.BytesIO(), array("q", [0])
        packer = _Packer(block, protocol=pickle.HIGHEST_PROTOCOL)
        for number, item in enumerate(items):
            try:
                packer.dump(item)
            except Exception as error:
                raise DataError(
                    f"item {number}, {type(item).__name__}, cannot be packed:"
                    f" {type(error).__name__}: {error}"
                ) from error
            packer.clear_memo()
            self._starts.append(block.tell())
        self._block = block.getvalue()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return len(self._block)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        data = self._block[self._starts[number] : self._starts[number + 1]]
        item: Item = pickle.loads(data)  # noqa: S301 (bytes pickled above, in this memory)
        return item


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError(
                "a tensor would be copied on every access; put all items into one tensor, as"
                " torch.utils.data.TensorDataset does"
            )
        return NotImplemented
