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
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from samestep.data.nested import mapped, tensors_in
from samestep.step.gradients import Gradients, copied_gradients
from samestep.torch_internals import foreach_copy_

SCALARS: Final = (
    bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device,
)  # fmt: skip


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

    def named(
        self, scalars: Mapping[str, Tensor], gradients: Gradients
    ) -> dict[str, Tensor | None]:
        """Return copies of what the lane has computed, by names for messages."""
        pairs: list[tuple[str, Tensor | None]] = [
            ("the loss" if name == "loss" else f"the metric {name!r}", value.clone())
            for name, value in scalars.items()
        ]
        pairs += [(f"the buffer {name!r}", buffer.clone()) for name, buffer in self.buffers()]
        pairs += [
            (f"the gradient of {self.name_of(n)}", gradient) for n, gradient in enumerate(gradients)
        ]
        named: dict[str, Tensor | None] = {}
        for name, value in pairs:  # a module may have the names of another one
            named[f"{name} of another module {len(named)}" if name in named else name] = value
        return named


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
        self._batch = mapped(work.batch, self._own)
        self._factor = None
        if work.factor is not None:
            self._factor = torch.zeros((), dtype=torch.float64, device=work.device)
        self._last_factor: float | None = None

    def _own(self, tensor: Tensor) -> Tensor:
        # also the strides, by which kernels are chosen
        own = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        self._memory.append(own)
        return own

    def capture(self, work: LaneWork, pool: Any, stream: torch.cuda.Stream) -> list[str]:
        """Capture the work, without computing it; return names of scalars that are on the host."""
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
        scalars = self._values.scalars
        return [name for name, value in scalars.items() if value.device != work.device]

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

    def results(self, work: LaneWork) -> dict[str, Tensor | None]:
        """Compute a lane to compare it, and return to the state before it."""
        scalars = self.forward(work).scalars
        named = work.named(
            scalars, in_order(self.backward(work.parameters, work.round_to), work.parameters)
        )
        work.restart()
        return named

    def _load(self, work: LaneWork) -> None:
        tensors = [tensor for _, tensor in tensors_in(work.batch)]
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
        yield type(batch), repr(batch)  # of 0.0 and -0.0, which are equal, kernels differ
    else:
        raise Unsuitable(f"a {type(batch).__name__}")
