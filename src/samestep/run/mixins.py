"""Methods of `Run` for collectives, logging and printing."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.comm.base import World
from samestep.comm.together import call_once
from samestep.errors import DataError, RecordError
from samestep.handoff import LOGGED, report_logged
from samestep.metrics import Means
from samestep.record import Record
from samestep.run.progress import Progress
from samestep.step.gradients import SlicedGradient
from samestep.step.guards import refuse_collective
from samestep.step.lane_engine import LaneEngine


class Collectives:
    """The methods of `Run` that move objects between workers."""

    _world: World
    _lanes: LaneEngine
    world_size: int

    def gather(self, obj: Any) -> list[Any] | None:
        """Return every worker's picklable object, by rank, on rank 0, and None on other ranks.

        Example:
            >>> run.gather({"rank": run.rank})
            [{'rank': 0}]
        """
        return self._outside_of_lanes("gather").gather_object(obj, "gathering an object")

    def all_gather(self, obj: Any) -> list[Any]:
        """Return every worker's picklable object, by rank.

        Example:
            >>> run.all_gather(run.rank)
            [0]
        """
        return self._outside_of_lanes("all_gather").all_gather_object(obj, "gathering an object")

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's picklable object.

        Example:
            >>> run.broadcast("name" if run.is_main else None)
            'name'
        """
        return self._outside_of_lanes("broadcast").broadcast_object(obj, "broadcasting an object")

    def reduce_dict(self, values: Mapping[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Return the means, or sums, of numbers and tensors over workers.

        Args:
            values: Numbers and tensors, with the same names on all workers.
            average: Whether to return means instead of sums.

        Raises:
            DataError: Names differ between workers.

        Example:
            >>> run.reduce_dict({"seconds": 0.5})
            {'seconds': 0.5}
        """
        dicts = self._outside_of_lanes("reduce_dict").all_gather_object(
            dict(values), "reducing a dict"
        )
        names = dicts[0].keys()
        for rank, other in enumerate(dicts):
            if other.keys() != names:
                raise DataError(
                    "run.reduce_dict expected the same names on all workers, got "
                    f"{sorted(names)} on worker 0 and {sorted(other)} on worker {rank}"
                )
        divisor = self.world_size if average else 1
        return {name: sum(other[name] for other in dicts) / divisor for name in names}

    def once(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()` on rank 0 while all others wait, without a time limit; return its result.

        For what is prepared once per run, such as a download or tokenized data. `fn` runs in a
        thread if there are several workers, and must not use the run.

        Args:
            fn: Returns a picklable object, which all workers get.

        Raises:
            WorldError: `fn` failed on rank 0, which raises its exception.

        Example:
            >>> run.once(lambda: 2 + 2)
            4
        """
        return call_once(self._world, fn, f"waiting for {getattr(fn, '__name__', 'run.once')}")

    def barrier(self, what: str) -> None:
        """Wait for all workers; `what` describes the wait in errors, as in "preparing data".

        Raises:
            WorldError: A worker did not arrive within `timeout`.

        Example:
            >>> run.barrier("preparing data")
        """
        self._outside_of_lanes("barrier").barrier(what)

    def _outside_of_lanes(self, name: str) -> World:
        """Return the workers. Raises `LossError` in a lane, which they do not run together."""
        if self._lanes.manual.in_lane and self._lanes.lanes > 1:
            refuse_collective(f"run.{name}")
        return self._world


CHANNELS = (1, 3)
CHUNK = 1 << 22  # elements of a histogram that are counted at a time, to limit memory
Scalars: TypeAlias = dict[str, float]


class Recording:
    """The methods of `Run` that record scalars, images and histograms, and print."""

    _world: World
    _lanes: LaneEngine
    _record: Record
    _progress: Progress
    is_main: bool
    dir: Path | None

    def log(self, means: Mapping[str, Any] | None = None, **scalars: Any) -> None:
        """Record scalars of the current step.

        Args:
            means: Values by name. `Means` are recorded with their minimum and maximum over workers.
            **scalars: More values by name. A mapping gets its name as a prefix: `critic=means`
                records `critic/loss`.

        Raises:
            RecordError: A value is not a number.

        Example:
            >>> run.log({"loss": 0.5}, learning_rate=1e-3)
        """
        self._lanes.manual.refuse_in_own_lane("run.log")
        values, low, high = scalars_of(means or {}, scalars)
        at = self._progress
        values = {**at.used(), **values}
        with at.times.measuring("logging"):
            self._record.scalars(at.step, at.epoch, values, low, high, between=at.between_steps)
        if self.is_main and LOGGED in os.environ:
            report_logged(at.step, values)

    def log_image(self, name: str, image: Any) -> None:
        """Record rank 0's image of the current step.

        Args:
            name: Name of a series of images.
            image: Tensor or array [H, W], [1, H, W], [3, H, W] or [H, W, 3]: uint8, or floating
                point in [0, 1].

        Raises:
            RecordError: The shape or dtype is not one of these.

        Example:
            >>> run.log_image("samples", torch.rand(3, 32, 32))
        """
        if self.is_main and self.dir is not None:
            step, between = self._progress.step, self._progress.between_steps
            with self._progress.times.measuring("logging"):
                self._record.image(step, name, pixels(image), between=between)

    def log_histogram(self, name: str, values: Any, *, grad: bool = False) -> None:
        """Record a histogram of a tensor, or of each parameter of a module, at the current step.

        Each worker counts a part of the elements, so call it on all workers. Counts are exact and
        the same at any number of workers, because bins are fixed: their edges are 0 and plus and
        minus 1, 1.25, 1.5 and 1.75 times powers of two. NaN and infinities are counted separately.

        Args:
            name: Name of a series of histograms. A module's parameters append their own names, as
                in `name/layer.weight`.
            values: Real floating-point tensor of any shape with the same values on all workers, or
                a module.
            grad: Whether to count the parameters' gradients instead, complete or sharded. Call it
                before `optimizer.step()`. Parameters without a gradient are left out.

        Raises:
            RecordError: `values` is something else, nothing has a gradient, or shapes differ
                between workers.

        Example:
            >>> run.log_histogram("weights", model)
            >>> run.log_histogram("noise", torch.randn(16, 8))
        """
        tensors = named_tensors(name, values)
        # 1-D parts by name. A sum of counts is the same however the elements are divided.
        parts = self._own_gradients(tensors) if grad else self._own_parts(tensors)
        if not parts:
            what = "gradients" if grad else "parameters"
            advice = "; call it after run.backward and before optimizer.step()" if grad else ""
            raise RecordError(f"run.log_histogram expected {what} for {name!r}, got none{advice}")
        if self.dir is None:
            return
        with self._progress.times.measuring("logging"):
            self._add_histograms(name, tensors, parts)

    def _add_histograms(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        parts: Mapping[str, list[torch.Tensor]],
    ) -> None:
        """Count this worker's 1-D `parts` of `tensors`, and record the sums of all workers."""
        counts = {full: [list(tensors[full].shape), bin_counts(parts[full])] for full in parts}
        gathered = self._world.all_gather_json(counts, f"counting the histogram {name!r}")
        for rank, other in enumerate(gathered):
            shapes, others = (
                {key: shape for key, (shape, _) in parts_of_rank.items()}
                for parts_of_rank in (gathered[0], other)
            )
            if others != shapes:
                raise RecordError(
                    f"run.log_histogram expected the same shapes of {name!r} on all workers, got "
                    f"{shapes!s:.200} on worker 0 and {others!s:.200} on worker {rank}"
                )
        step, between = self._progress.step, self._progress.between_steps
        for full in counts if self.is_main else ():
            total = sum((Counter(other[full][1]) for other in gathered), Counter[str]())
            self._record.histogram(step, full, total, between=between)

    def _own_parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Return this worker's share of the elements of each tensor, 1-D."""
        rank, size = self._world.rank, self._world.size
        ends = {
            full: (t.numel() * rank // size, t.numel() * (rank + 1) // size)
            for full, t in tensors.items()
        }
        return {
            full: [
                t.own_rows()  # of a sharded model
                if hasattr(t, "own_rows")
                else t.detach().reshape(-1)[slice(*ends[full])]
            ]
            for full, t in tensors.items()
        }

    def _own_gradients(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Return this worker's share of each gradient, as it is stored if that is in slices."""
        self._lanes.optimizers.open_seals()  # waits until all gradients have arrived
        # by the parameter's id; from all sharded optimizers
        sliced: dict[int, list[torch.Tensor]] = {}
        for buffer in self._lanes.flat_buffers():
            sliced.update(buffer.own_gradients())
        gradients = {
            full: t.grad for full, t in tensors.items() if t.is_leaf and t.grad is not None
        }
        stored = {full: sliced[id(t)] for full, t in tensors.items() if id(t) in sliced}
        unsliced = {full: gradient for full, gradient in gradients.items() if full not in stored}
        parts = {**self._own_parts(unsliced), **stored}
        return {full: parts[full] for full in gradients}

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only, like Python's `print`.

        Example:
            >>> run.print("training starts")
            training starts
        """
        if self.is_main:
            print(*values, **{"flush": True, **options})  # noqa: T201  the purpose of this method


def named_tensors(name: str, values: Any) -> dict[str, torch.Tensor]:
    """Return a tensor, or a module's parameters, by name. Raises `RecordError` for other values."""
    named = {name: values}
    if isinstance(values, torch.nn.Module):
        named = {f"{name}/{inner}": tensor for inner, tensor in values.named_parameters()}
    for full, tensor in named.items():
        if isinstance(tensor, SlicedGradient):
            raise RecordError(
                f"the gradient for {full!r} is stored in slices, one per worker; pass the parameter"
                " or the module to run.log_histogram, with grad=True"
            )
        if not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
        elif tensor.is_floating_point() and tensor.layout == torch.strided:
            continue
        else:
            got = f"a tensor of {tensor.dtype}, {tensor.layout}"
        raise RecordError(
            f"run.log_histogram expected a real floating-point tensor or a module for {full!r}, got"
            f" {got}"
        )
    return named


def bin_counts(parts: Iterable[torch.Tensor]) -> Counter[str]:
    """Count the elements of 1-D tensors by bin.

    A bin's key is the text of its edge nearest to zero: its numbers without all but the first two
    bits of their fraction. Subnormal numbers, below 2**-126 (2**-1022 in float64), thus have bins
    of a width of 2**-128 (2**-1024), and the first one includes 0. Other keys are "nan", "inf" and
    "-inf".
    """
    counts: Counter[str] = Counter()  # JSON has only texts as keys
    for values in (chunk for part in parts for chunk in part.split(CHUNK)):
        wide = values if values.dtype == torch.float64 else values.float()
        edges, numbers = _bins(wide)
        if not edges.isfinite().all():  # infinity and some kinds of NaN have one bin
            edges, numbers = _bins(torch.where(wide.isnan(), math.nan, wide))
        for edge, number in zip(edges.tolist(), numbers.tolist(), strict=True):
            counts[str(edge)] += number
    return counts


def _bins(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the edges and the sizes of the bins that are not empty."""
    # The bits of a number, as an integer: sign, exponent, fraction. Without all but two bits of the
    # fraction, they are the same for all numbers of a bin.
    integer, drop = (torch.int64, 50) if values.dtype == torch.float64 else (torch.int32, 21)
    lowest = -1 << (8 * integer.itemsize - 1 - drop)  # of a signed integer without these bits
    # int64 [bins], from the lowest possible one
    numbers = torch.bincount((values.view(integer) >> drop) - lowest)
    keys = numbers.nonzero().flatten()
    edges = ((keys + lowest).to(integer) << drop).view(values.dtype) + 0.0  # and no -0.0
    return edges, numbers[keys]


def pixels(image: Any) -> NDArray[Any]:
    """Return an image as uint8 [H, W] or [H, W, 3]. Raises `RecordError` for other images."""
    if not isinstance(image, torch.Tensor):
        image = torch.from_numpy(np.array(image))  # a copy: torch warns about read-only arrays
    tensor: torch.Tensor = image.detach().cpu()
    # [C, H, W]
    if tensor.ndim == 3 and tensor.shape[0] in CHANNELS and tensor.shape[-1] not in CHANNELS:
        tensor = tensor.permute(1, 2, 0)  # [H, W, C]
    if tensor.ndim == 3 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    if tensor.ndim not in (2, 3) or (tensor.ndim == 3 and tensor.shape[-1] != CHANNELS[-1]):
        raise RecordError(
            "an image must have the shape [H, W], [1, H, W], [3, H, W] or [H, W, 3], "
            f"got {list(tensor.shape)}"
        )
    if tensor.is_floating_point():
        tensor = (tensor.clamp(0, 1) * 255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise RecordError(f"an image must be uint8 or floating point in [0, 1], got {tensor.dtype}")
    return tensor.contiguous().numpy()


def scalars_of(
    means: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[Scalars, Scalars, Scalars]:
    """Return values by name, and the lowest and highest worker's values of `Means`.

    A mapping among `others` gives one value for each of its names, prefixed with its own name and a
    slash.
    """
    values: Scalars = {}
    by_worker: dict[str, list[float]] = {}  # of `Means` only
    for name, value in [("", means), *others.items()]:
        if not isinstance(value, Mapping):
            values[name] = _number(name, value)
            continue
        for inner, scalar in value.items():
            full = f"{name}/{inner}" if name else inner
            values[full] = _number(full, scalar)
            if isinstance(value, Means):
                by_worker[full] = value.by_worker(inner)
    low = {name: min(numbers) for name, numbers in by_worker.items()}
    high = {name: max(numbers) for name, numbers in by_worker.items()}
    return values, low, high


def _number(name: str, value: Any) -> float:
    what = f"for {name!r}" if name else "without a name"
    try:
        # an item of NumPy does not lose its imaginary part, as float() of the array would
        number = float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except OverflowError:
        number = math.inf
    except (RuntimeError, TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" {value!r:.80}"
        raise RecordError(
            f"run.log expected a number {what}, got {type(value).__name__}{shape}; log a number, a"
            " tensor of one element, or a dict of them"
        ) from None
    if math.isinf(number) and not isinstance(value, str) and value != number:
        raise RecordError(
            f"run.log expected a number {what} that fits into a float, at most"
            f" {sys.float_info.max:.2g}, got a larger {type(value).__name__}; log its logarithm"
        )
    return number
