"""A lane as CUDA graphs: forward and backward are captured once, then replayed for other lanes.

A graph repeats kernels without Python, which takes longer than a small kernel. It also repeats what
Python did at its capture: the branches, the numbers and the addresses.

A lane is cut into several graphs where the host acts in between: it copies the losses after the
forward pass, and begins to exchange gradients during the backward pass.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from samestep.step.buffers import INTEGERS
from samestep.step.gradients import Gradients, copied_gradients
from samestep.step.reached_values import SCALARS, Scalar
from samestep.torch_internals import foreach_copy_

COMPARE_EVERY: Final = 100  # calls between comparisons; they are denser after the capture


@dataclass
class LaneValues:
    """What a lane computes on its device: scalars by name, what forward wrote, gradients."""

    scalars: dict[str, Tensor]
    changes: list[Tensor]  # of `Buffers.changed_by_forward`, int64 [buffers] each
    gradients: Gradients


@dataclass(frozen=True)
class LaneWork:
    """A lane to compute on a device.

    `factor` scales the loss before backward, None for 1. `compute(batch, factor, cuts)` returns the
    values of a batch, with the factor as a float64 tensor, and cuts the work into graphs. Gradients
    of the parameters in each of `groups`, which are numbers, are exchanged together, in this order.
    `restart` returns to the state before the lane: seeds, buffers and no gradients.
    """

    lane: int
    device: torch.device
    batch: Any
    factor: float | None
    parameters: Sequence[Tensor]
    buffers: Callable[[], Sequence[tuple[str, Tensor]]]  # with their names
    name_of: Callable[[int], str]  # of a parameter, by number
    compute: Callable[[Any, Tensor | None, Cuts], LaneValues]
    groups: Sequence[Sequence[int]]
    restart: Callable[[], None]
    round_to: torch.dtype | None


class Unsuitable(Exception):  # noqa: N818  a reason, which does not leave this module
    """Says why a lane cannot be a graph."""


class Cuts:
    """The graphs into which work is cut while it is captured.

    All use one pool. What an earlier graph wrote and a later one reads stays there, because it is
    not free at the capture of the later one, and the graphs are always replayed together.
    """

    def __init__(self, pool: Any, groups: Sequence[Sequence[int]]) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        # by number of a parameter, that of the graph that completes its gradient
        self.places: dict[int, int] = {}
        self._pool, self._groups = pool, list(groups)
        self._is_capturing = False
        # of the host, older than the work: autograd computes its gradient after all newer nodes
        self._oldest = torch.zeros((), device="cpu", requires_grad=True) * 1.0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work of the block, which the current stream gets, without computing it."""
        self._begin()
        try:
            yield
        except BaseException:
            if self._is_capturing:
                with suppress(RuntimeError):  # it says less than the error that comes before it
                    self._end()
            raise
        self._end()

    def cut(self) -> None:
        """Continue with another graph."""
        self._end()
        self._begin()

    @contextmanager
    def backward(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Cut autograd's backward pass in the block after each group of gradients but the last."""
        if not self._groups:
            yield
            return
        hooks = [
            parameters[n].register_hook(partial(self._arrived, n))
            for group in self._groups
            for n in group
        ]
        try:
            # in this thread, because a capture ends in the thread that began it
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except BaseException:
            # What is left of the pass stays in this thread's queue. It would keep nodes that add to
            # `.grad` in the stream of the capture, and the next lane would use them.
            self._oldest.backward()
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, n: int, _: Tensor) -> None:
        # a pass nested in this one may come first: the last time counts
        self.places[n] = len(self.graphs) - 1
        is_complete = False
        while self._groups and all(n in self.places for n in self._groups[0]):
            del self._groups[0]
            is_complete = True
        if is_complete and self._groups:
            self.cut()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # other threads, which copy or save, may go on: only this one may not wait
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._is_capturing = True
        self.graphs.append(graph)

    def _end(self) -> None:
        with warnings.catch_warnings():
            # compiled code computes many gradients at once, with no kernel between two groups
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self.graphs[-1].capture_end()
        self._is_capturing = False


class LaneGraph:
    """The graphs of a lane, with the memory that they read: the batch, and the loss's factor."""

    def __init__(self, work: LaneWork) -> None:
        self._memory: list[Tensor] = []
        self._batch = _mapped(work.batch, self._own)
        self._factor = None
        if work.factor is not None:
            self._factor = torch.zeros((), dtype=torch.float64, device=work.device)
        self._last_factor: float | None = None
        self.calls = 0  # of the loss since the capture, with this
        self.used_at = 0  # the last call of any loss that used it
        self._lanes = self._lanes_before = 0  # in that call, and in the one before
        self._is_compared = False  # in that call
        self._turns = 0  # calls in which a lane was due to be compared

    def _own(self, tensor: Tensor) -> Tensor:
        # also the strides, by which kernels are chosen
        own = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        self._memory.append(own)
        return own

    def capture(self, work: LaneWork, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture the work, without computing it."""
        self._load(work)
        # nothing may be freed by chance during a capture, which needs all memory that is free
        torch.cuda.synchronize(work.device)
        gc.collect()
        torch.cuda.empty_cache()
        # casts of parameters belong into the graph, not into the cache of lanes outside of it
        torch.clear_autocast_cache()
        cuts = Cuts(pool, work.groups)
        try:
            with torch.cuda.stream(stream), cuts.capture():
                self._values = work.compute(self._batch, self._factor, cuts)
        finally:
            torch.clear_autocast_cache()
        self._graphs = cuts.graphs
        # numbers of the parameters whose gradients are complete after each graph
        self._complete: list[list[int]] = [[] for _ in self._graphs]
        last = len(self._graphs) - 1
        for n, gradient in enumerate(self._values.gradients):
            if gradient is not None:
                self._complete[cuts.places.get(n, last)].append(n)

    def forward(self, work: LaneWork) -> LaneValues:
        """Compute the forward pass; return the values, without gradients until `backward`.

        They are in memory that the next replay writes.
        """
        self._load(work)
        self._graphs[0].replay()
        return self._values

    def backward(
        self, parameters: Sequence[Tensor], round_to: torch.dtype | None
    ) -> Iterator[dict[int, Tensor]]:
        """Compute the backward pass; yield copies of gradients, by number, as they get complete.

        They are rounded to the dtype of the exchange, as leaves of the tree.
        """
        for graph, numbers in zip(self._graphs[1:], self._complete[1:], strict=True):
            graph.replay()
            gradients = [self._values.gradients[n] for n in numbers]
            copies = copied_gradients(gradients, [parameters[n] for n in numbers], round_to)
            yield {n: copy for n, copy in zip(numbers, copies, strict=True) if copy is not None}

    def take_turn(self, call: int, probation: int) -> tuple[bool, bool]:
        """Count a lane of a call; return whether to compare it, and whether it is on probation."""
        if self.used_at != call:
            self.used_at, self.calls = call, self.calls + 1
            self._lanes_before, self._lanes, self._is_compared = self._lanes, 0, False
            self._turns += probation == 0 or _is_due(self.calls)
        number, self._lanes = self._lanes, self._lanes + 1
        is_first, is_due = self.calls <= probation, probation == 0 or _is_due(self.calls)
        # each lane in turn, and in `samestep verify` none at the end, so that all are used
        turns = max(1, self._lanes_before + (probation == 0))
        turn = 0 if is_first else (self._turns - 1) % turns
        compares = is_due and number >= turn and not self._is_compared
        self._is_compared |= compares
        return compares, is_first

    def _load(self, work: LaneWork) -> None:
        tensors = list(_tensors(work.batch))
        if tensors:
            foreach_copy_(self._memory, tensors)
        if self._factor is not None and work.factor not in {None, self._last_factor}:
            self._factor.fill_(work.factor or 0.0)
            self._last_factor = work.factor


def in_order(parts: Iterable[Mapping[int, Tensor]], parameters: Sequence[Tensor]) -> Gradients:
    """Return the gradients of all parameters from parts of them, by number."""
    by_number = {n: gradient for part in parts for n, gradient in part.items()}
    return [by_number.get(n) for n in range(len(parameters))]


def specs_of(batch: Any, device: torch.device) -> Iterator[Any]:
    """Yield what is the same in batches that a graph can compute. Raises `Unsuitable`."""
    if type(batch) is Tensor and batch.layout == torch.strided and not batch.is_nested:
        if batch.device != device or batch.requires_grad or batch.is_conj() or batch.is_neg():
            raise Unsuitable("a tensor that is not on the device, or that needs a gradient")
        yield batch.dtype, batch.shape, batch.stride()
    elif isinstance(batch, (dict, list, tuple)):
        yield type(batch), len(batch)
        for name, part in batch.items() if isinstance(batch, dict) else enumerate(batch):
            yield name
            yield from specs_of(part, device)
    elif isinstance(batch, SCALARS):
        yield Scalar.of(batch)
    else:
        raise Unsuitable(f"a {type(batch).__name__}")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _mapped(batch: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch that `specs_of` accepts with `fn` of each tensor."""
    if isinstance(batch, Tensor):
        return fn(batch)
    if isinstance(batch, dict):
        return type(batch)((name, _mapped(part, fn)) for name, part in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(part, fn) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_mapped(part, fn) for part in batch)
    return batch


def differs(left: Tensor, right: Tensor) -> Tensor:
    """Return whether any bit differs, as a tensor, to avoid waiting for a GPU."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return torch.full((), fill_value=True, device=left.device)
    words = INTEGERS[min(left.element_size(), 8)]  # complex128 is two words per element
    right = right.to(left.device)
    return (left.reshape(-1).view(words) != right.reshape(-1).view(words)).any()


def _is_due(calls: int) -> bool:
    """Return whether a graph is compared in this call: more often after its capture."""
    return calls % COMPARE_EVERY == 0 or calls & (calls - 1) == 0
