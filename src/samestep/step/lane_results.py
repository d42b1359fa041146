"""What a lane computes besides gradients: its loss and metrics, on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from samestep.errors import LossError
from samestep.torch_internals import Divisor, divisors_of

DIVISOR: Final = "divisor of the mean "  # and its number; no user's metric has this name


def split_loss(returned: Any, lane: int | None) -> tuple[Tensor, dict[str, Any]]:
    """Return (loss, metrics) from the result of a loss function for a lane, or the whole batch.

    Raises `LossError` unless the loss is a scalar with a gradient, and metrics a dict of scalars.
    A metric may also be a boolean or integer tensor with an entry per item, or a pair (sum, count)
    of scalars. If all lanes run under `torch.no_grad()`, the loss of a lane has no gradient.
    """
    place = "the whole batch" if lane is None else f"lane {lane}"
    if isinstance(returned, tuple) and len(returned) != 2:
        raise LossError(
            f"the loss function returned {len(returned)} values in {place}, but must return a"
            " loss or (loss, dict of scalars by name); put all other scalars into the dict"
        )
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LossError(
            f"the loss function must return a scalar tensor, got {_kind(loss)} in {place};"
            f" return the mean over {'all' if lane is None else 'its'} items"
        )
    if not loss.requires_grad and (lane is None or torch.is_grad_enabled()):
        raise LossError(
            f"the loss of {place} has no gradient; is the model frozen, or the loss detached or"
            " computed under no_grad? For means without a gradient, write"
            " `with torch.no_grad():` around the loop over batch.lanes, or run.backward"
        )
    if not isinstance(metrics, Mapping):
        raise LossError(
            "the loss function must return (loss, dict of scalars by name), got"
            f" {type(metrics).__name__} instead of the dict"
        )
    detached = {name: _detached(name, value) for name, value in metrics.items()}
    return loss, {name: value for name, value in detached.items() if value is not None}


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__


def has_entries(value: Any) -> bool:
    """Return whether a metric is a boolean or integer tensor with an entry per item.

    A single integer is a scalar.
    """
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    is_integer = not (value.is_floating_point() or value.is_complex())
    return value.dtype == torch.bool or (is_integer and value.numel() != 1)


def is_empty(value: Any) -> bool:
    """Return whether a metric has no entry, such as the accuracy of a lane without masked words."""
    return has_entries(value) and value.numel() == 0


def sum_of_entries(value: Tensor) -> Tensor:
    """Return the sum and the number of entries, float64 [2], exact below 2**53.

    A float32 mean is rounded in each lane, so that 382 right of 397 would not be one number.
    """
    total = value.sum(dtype=torch.int64).double()
    return torch.stack([total, torch.full_like(total, value.numel())])


def sum_and_count(name: str, pair: tuple[Any, ...], error: type[Exception] = LossError) -> Tensor:
    """Return the scalars of a pair (sum, count), without a graph, float64 [2]."""
    device = next((part.device for part in pair if isinstance(part, Tensor)), None)
    with suppress(RuntimeError, TypeError, ValueError):
        total, count = (
            part.detach().reshape(()).to(device, torch.float64)
            if isinstance(part, Tensor)
            else torch.full((), float(part), dtype=torch.float64, device=device)
            for part in pair
        )
        return torch.stack([total, count])
    kinds = ", ".join(map(_kind, pair))
    raise error(
        f"metric {name!r} must be a scalar or a pair (sum, count) of scalars, whose mean over all"
        f" lanes is the sum of the sums over the sum of the counts, got ({kinds})"
    )


def _detached(name: str, value: Any) -> Tensor | None:
    """Return a metric as a scalar or [sum, count], without a graph; None if it has no entry."""
    if isinstance(value, tuple):
        return sum_and_count(name, value)
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value.detach()
        if has_entries(value):
            return sum_of_entries(value) if value.numel() else None
        if value.numel() == 1:
            return value.detach().reshape(())
    else:
        with suppress(TypeError, ValueError):
            return torch.tensor(float(value), dtype=torch.float64)
    advice = "return the mean over the lane's items, or an entry per item as booleans or integers"
    raise LossError(f"metric {name!r} must be a scalar, got {_kind(value)}; {advice}")


def _number(value: Tensor) -> float | list[float]:
    """Return the value of a scalar, exactly, or [sum, count]."""
    numbers: list[float] = value.tolist() if value.ndim else [float(value)]
    return numbers if len(numbers) > 1 else numbers[0]


class LaneScalars:
    """The scalars of one worker's lanes, which are read after `wait`."""

    def __init__(self, *, has_divisors: bool) -> None:
        """With `has_divisors`, what means are divided by is compared with a lane's samples."""
        self._has_divisors = has_divisors
        self._copies = HostCopies()
        self.copy = self._copies.of  # begins to copy tensors to the host
        self._results: list[tuple[int, float, Mapping[str, Tensor]]] = []  # lane, items, by name
        # what means and sums of a lane's loss were divided by, by names with their kinds
        self._divisors: list[tuple[int, float, dict[str, Tensor]]] = []

    def named(
        self, loss: Tensor, metrics: Mapping[str, Tensor], divisors: Sequence[Divisor] = ()
    ) -> dict[str, Tensor]:
        """Return a lane's scalars on its device, with what each mean of the loss is divided by.

        `divisors` are those of a loss without a graph.
        """
        divisors = [*divisors, *divisors_of(loss)] if self._has_divisors else []
        named = {
            f"{DIVISOR}{n} {part.kind} {part.means}": part.value
            if isinstance(part.value, Tensor)
            else torch.full((), part.value, dtype=torch.float64, device=loss.device)
            for n, part in enumerate(divisors)
        }
        return {"loss": loss.detach(), **metrics, **named}

    def note(self, lane: int, count: float, scalars: Mapping[str, Tensor]) -> None:
        """Note a lane's loss, metrics and divisors, [] or [2] each, and begin to copy them.

        A lane does so before its backward pass, so that reading waits only for its forward pass.
        """
        copies = dict(zip(scalars, self.copy([*scalars.values()]), strict=True))
        divisors = {name: copies.pop(name) for name in scalars if name.startswith(DIVISOR)}
        self._results.append((lane, count, copies))
        if divisors:
            self._divisors.append((lane, count, divisors))

    def add(self, lane: int, count: float, copies: Mapping[str, Tensor]) -> None:
        """Add a lane whose scalars are copied already."""
        self._results.append((lane, count, copies))

    def wait(self) -> None:
        """Wait until all copies are complete: for all forward passes, not for the last backward."""
        self._copies.wait()

    def loss_of(self, lane: int) -> str | None:
        """Return a text of a lane's loss with its bits, None if the lane has no items."""
        self.wait()
        losses = [copies["loss"] for number, _, copies in self._results if number == lane]
        return float(losses[0]).hex() if losses else None

    def results(self) -> list[tuple[int, float, dict[str, Any]]]:
        """Return (lane, items, metrics) in lane order, as JSON."""
        results = [
            (lane, count, {name: _number(value) for name, value in metrics.items()})
            for lane, count, metrics in self._results
        ]
        return sorted(results, key=itemgetter(0))

    def divisors(self) -> list[tuple[int, float, str, list[float]]]:
        """Return (lane, samples, kinds, divisors) of lanes whose losses have some, as JSON.

        A loss that averages as many means as a lane has samples has one of each sample, which may
        be divided by anything.
        """
        lanes = []
        for lane, count, divisors in self._divisors:
            kinds, kept = "", []
            for name, value in divisors.items():
                _, _, kind, means = name.rsplit(" ", 3)
                if means == "0" or int(means) % count:
                    kinds += kind
                    kept.append(float(value))
            lanes.append((lane, count, kinds, kept))
        return lanes


class HostCopies:
    """Copies scalar and 1-D tensors of GPUs to the host; only `wait` waits, once per GPU.

    It does not wait for what a GPU computes after its last copy.
    """

    def __init__(self) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return float64 copies of a GPU's tensors, valid after `wait`; others as they are."""
        copies = [*tensors]
        for device in dict.fromkeys([tensor.device for tensor in tensors if tensor.is_cuda]):
            numbers = [n for n, tensor in enumerate(tensors) if tensor.device == device]
            # float64 [values], so that each GPU makes one copy
            joined = torch.cat([tensors[n].double().reshape(-1) for n in numbers])
            on_host = joined.to("cpu", non_blocking=True)  # in pinned memory
            event = self._events.setdefault(device, torch.cuda.Event())
            event.record(torch.cuda.current_stream(device))
            sizes = [tensors[n].numel() for n in numbers]
            for n, copy in zip(numbers, on_host.split(sizes), strict=True):
                copies[n] = copy.reshape(tensors[n].shape)
        return copies

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()


def read_together(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of scalar and 1-D tensors, with one wait per device."""
    copies = HostCopies()
    read = copies.of(tensors)
    copies.wait()
    return [tensor.double().reshape(-1).tolist() for tensor in read]


def worst_of(losses: Sequence[float]) -> int:
    """Return the number of the first loss that is not finite, or of the highest."""
    badness = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return badness.index(max(badness))
