"""Clipping by the global norm, with the same bits for whole and sharded gradients at any number of workers.

Squares are summed by rows of 64 elements of a parameter, which no cut between workers divides, and
the rows of all parameters are then added in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from samestep.comm.base import World
from samestep.step.layout import ALIGNMENT, flattened
from samestep.step.shard import FlatBuffer

Rows = dict[int, torch.Tensor]  # id of a parameter → sums of squares of its rows, float64


def gradient_norm(
    parameters: Sequence[torch.nn.Parameter], blocks: Sequence[FlatBuffer], world: World
) -> torch.Tensor:
    """Return the 2-norm of the parameters' gradients, float64; those in `blocks` have theirs in the workers' slices."""
    rows: Rows = {}
    for block in blocks:
        rows.update(_sharded_rows(block, world))
    for parameter in parameters:
        if id(parameter) not in rows:
            rows[id(parameter)] = _whole_rows(parameter)
    return torch.cat([rows[id(parameter)] for parameter in parameters]).sum().sqrt()


def scale_gradients(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {gradient.dtype for gradient in gradients}:
        torch._foreach_mul_(
            [gradient for gradient in gradients if gradient.dtype == dtype], coefficient.to(dtype)
        )


def _whole_rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    size = parameter.numel()
    if parameter.grad is None:
        return torch.zeros(-(-size // ALIGNMENT), dtype=torch.float64, device=parameter.device)
    values = flattened(parameter.grad)
    return _row_squares(
        values if size % ALIGNMENT == 0 else torch.nn.functional.pad(values, (0, -size % ALIGNMENT))
    )


def _sharded_rows(block: FlatBuffer, world: World) -> Rows:
    own = torch.zeros_like(block.own)
    for segment in block.segments:
        if segment.parameter.grad is not None:
            own[segment.start : segment.start + segment.parameter.numel()].copy_(
                segment.parameter.grad
            )
    rows = own.new_empty(block.exchange.layout.flat_size // ALIGNMENT, dtype=torch.float64)
    world.all_gather(rows, _row_squares(own), "adding up the gradient norm")
    offsets = [offset // ALIGNMENT for offset in block.exchange.layout.offsets]
    return {
        id(parameter): rows[start:stop]
        for parameter, (start, stop) in zip(
            block.exchange.parameters, pairwise(offsets), strict=True
        )
    }


def _row_squares(flat: torch.Tensor) -> torch.Tensor:
    accumulate = torch.promote_types(flat.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(
        flat.view(-1, ALIGNMENT), dim=1, dtype=accumulate
    )
    return norms.double().square()
