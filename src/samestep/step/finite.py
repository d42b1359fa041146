"""Gradients that are not finite although losses are, found before an optimizer uses them.

A sum is not finite if a part of it is not. So each worker looks at the sums of its own lanes, in
one operation, and what it finds travels with the losses: all workers decide the same. A GPU is not
awaited for this: its result travels with the losses of the next step, or is read before a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from samestep.config import Config
from samestep.errors import NonFiniteLossError
from samestep.step.gradients import Gradients
from samestep.step.lane_results import LaneScalars
from samestep.torch_internals import foreach_has_nonfinite, foreach_norm

# Of the largest number of a dtype: up to this, sums are finite however they are rounded.
SAFE: Final = 0.95
ADVICE: Final = (
    "look for a square root or norm of 0, a logarithm of 0, or a division by 0 whose result"
    " torch.where hides: its derivative is not finite, so add a small number inside; or set"
    " nonfinite_loss='skip'. With a GradScaler that is not from run.grad_scaler, track it, so that"
    " it skips such updates itself"
)


class Nonfinite(NamedTuple):
    """Why a gradient is not used, the step that made it, and its lane if only one is to blame."""

    reason: str
    step: int
    lane: int | None


class GradientSize(NamedTuple):
    """The size of the gradient of a worker's `lanes` at a step, as a share of the largest number.

    That is NaN or infinite if any element is.
    """

    step: int
    lanes: list[int]
    size: float | Tensor


class GradientCheck:
    """Looks at the gradients of one worker, unless one of the `scalers` does so later."""

    def __init__(self, config: Config) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        self._config = config
        self._late: GradientSize | None = None  # what a GPU still computes
        self._carried: GradientSize | None = None  # the same on its way to the host

    def is_due(self, step: int) -> bool:
        """Return whether the gradient of a step must be finite."""
        config = self._config
        if config.nonfinite_loss == "continue" or (config.skip_batches and config.skips(step)):
            return False
        return not any(scaler.is_enabled() for scaler in self.scalers)

    def carry(self, scalars: LaneScalars) -> None:
        """Begin to copy what a GPU has found in the last step, before it computes this one."""
        self._carried = None
        if self._late is not None:
            step, lanes, size = self._late
            self._carried = GradientSize(step, lanes, scalars.copy([torch.as_tensor(size)])[0])

    def report(self, gradient: GradientSize, narrow: Callable[[], list[int]]) -> list[Any] | None:
        """Return JSON for `judge` about this step, or of GPUs about the last one.

        `narrow` returns those of the lanes whose own gradient is not finite.
        """
        step, lanes, size = gradient
        if isinstance(size, Tensor) and not size.is_cpu and self._config.nonfinite_loss == "stop":
            last, self._late = self._carried, gradient
            return None if last is None else [last.step, last.lanes, float(last.size)]
        number = float(size)  # with "skip", the host waits for backward
        if not math.isfinite(number) and self._config.nonfinite_loss == "stop" and lanes[1:]:
            lanes = narrow() or lanes
        return [step, lanes, number]

    def forget(self) -> None:
        """Forget what a GPU has found: the gradient is not used, or an error names it."""
        self._late = None

    def check_late(self) -> None:
        """Raise `NonFiniteLossError` for what a GPU has found in the last step."""
        late, self._late = self._late, None
        if late is not None:
            nonfinite = self.judge([[late.step, late.lanes, float(late.size)]], 1.0)
            if nonfinite is not None:
                raise NonFiniteLossError(f"{nonfinite.reason}; {ADVICE}")

    def judge(
        self, reports: Sequence[list[Any] | None], scale: float, *, is_shared: bool = False
    ) -> Nonfinite | None:
        """Return why a gradient is not used, from the reports of all workers, by rank.

        It is multiplied by `scale`. Raises `NonFiniteLossError` if it may overflow although no
        worker's is infinite: workers divide the lanes in other ways at other numbers of them.
        """
        entries = [(rank, GradientSize(*report)) for rank, report in enumerate(reports) if report]
        bad = [(rank, each) for rank, each in entries if not math.isfinite(each.size)]
        if bad:
            step, lanes = bad[0][1].step, [lane for _, each in bad for lane in each.lanes]
            place = "of the whole batch" if is_shared else " and ".join(map(_place, bad))
            reason = f"the gradient is not finite at step {step} {place}, although the loss is"
            return Nonfinite(reason, step, lanes[0] if len(lanes) == 1 and not is_shared else None)
        if sum(each.size for _, each in entries) * max(scale, 1.0) > SAFE and reports[1:]:
            step = entries[0][1].step
            raise NonFiniteLossError(
                f"the gradient at step {step} is too large: the sum over all workers may exceed the"
                " largest number of its dtype; lower the learning rate, or divide the loss"
            )
        return None


def _place(entry: tuple[int, GradientSize]) -> str:
    rank, (_, numbers, _) = entry
    lanes = ", ".join(map(str, numbers))
    which = f"in one of the lanes {lanes}" if numbers[1:] else f"in lane {lanes}"
    return f"{which} (worker {rank})"


def has_nonfinite(gradients: Gradients) -> Tensor:
    """Return infinity if a gradient on one device is not finite, and 0 otherwise, float32 []."""
    present = [gradient for gradient in gradients if gradient is not None]
    dtypes = {gradient.dtype for gradient in present}
    groups = (
        [present] if len(dtypes) == 1 else [[g for g in present if g.dtype == d] for d in dtypes]
    )
    flags = [foreach_has_nonfinite(_real(group)) for group in groups]
    flag = torch.stack(flags).amax() if flags else torch.zeros(())
    return flag / (1 - flag)


def size_of_flats(flats: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in 1-D tensors of a dtype, as a share of its largest number.

    float64 [], NaN or infinity if any element is. Read only: others may read the tensors as well.
    """
    ends = torch.stack([end for flat in _real(flats) for end in torch.aminmax(flat)])
    return ends.abs().amax().double() / torch.finfo(ends.dtype).max


def size_of_many(gradients: Gradients) -> Tensor:
    """Return at least what `size_of_flats` does for gradients of one dtype on the host."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    norm = torch.stack(foreach_norm(present)).amax()  # of squares, which may overflow
    share = norm.double() / torch.finfo(norm.dtype).max
    return share if share.isfinite() else size_of_flats([part.reshape(-1) for part in present])


def _real(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    is_complex = tensors[0].is_complex()
    return [*map(torch.view_as_real, tensors)] if is_complex else tensors
