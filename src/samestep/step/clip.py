"""Gradient clipping by the global norm, with the same bits at any number of workers.

Squares are summed over rows of 64 elements of a parameter, which are never divided between workers.
The rows of all parameters are then added in the same order, whether gradients are sharded or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.base import World
from samestep.step.gradients import Parameters
from samestep.step.layout import ALIGNMENT, flattened
from samestep.step.shard import FlatBuffer


def gradient_norm(parameters: Parameters, buffers: Sequence[FlatBuffer], world: World) -> Tensor:
    """Return the float64 2-norm of the parameters' gradients, some of them sharded in `buffers`.

    Collective for each buffer.
    """
    rows: dict[int, Tensor] = {}  # float64 sums of squares of each row, by the parameter's id
    for buffer in buffers:
        rows.update(_sharded_rows(buffer, world))
    for parameter in parameters:
        if id(parameter) not in rows:
            rows[id(parameter)] = _rows(parameter)
    return torch.cat([rows[id(parameter)] for parameter in parameters]).sum().sqrt()


def scale_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {gradient.dtype for gradient in gradients}:
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(group, coefficient.to(dtype))


def _rows(parameter: Parameter) -> Tensor:
    size = parameter.numel()
    if parameter.grad is None:
        return torch.zeros(-(-size // ALIGNMENT), dtype=torch.float64, device=parameter.device)
    values = flattened(parameter.grad)
    if size % ALIGNMENT:
        values = torch.nn.functional.pad(values, (0, -size % ALIGNMENT))
    return _row_squares(values)


def _sharded_rows(buffer: FlatBuffer, world: World) -> dict[int, Tensor]:
    own, exchange = torch.zeros_like(buffer.own), buffer.exchange
    for segment in buffer.segments:
        if segment.parameter.grad is not None:
            segment.view_in(own).copy_(segment.parameter.grad)
    rows = own.new_empty(exchange.layout.flat_size // ALIGNMENT, dtype=torch.float64)
    world.all_gather(rows, _row_squares(own), "adding up the gradient norm")
    bounds = pairwise(offset // ALIGNMENT for offset in exchange.layout.offsets)
    return {
        id(parameter): rows[start:stop]
        for parameter, (start, stop) in zip(exchange.parameters, bounds, strict=True)
    }


def _row_squares(flat: Tensor) -> Tensor:
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=dtype)
    return norms.double().square()
