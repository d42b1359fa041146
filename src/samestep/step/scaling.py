"""Scaling of gradients: to the mean, to a norm, and for float16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.comm.base import World
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import Parameters, row_squares
from samestep.step.guards import GradientSeal
from samestep.step.layout import ALIGNMENT, flattened
from samestep.torch_internals import GradScalerHooks, foreach_mul_


def scaled(gradient: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return a gradient in `dtype` times `scale`, in the same memory if it has that dtype."""
    if gradient.dtype != dtype:  # `to` takes a microsecond even if there is nothing to do
        gradient = gradient.to(dtype)
    return gradient if scale == 1.0 else gradient.mul_(scale)


def clip_gradients(
    parameters: Parameters, buffers: Sequence[FlatBuffer], max_norm: float
) -> Tensor:
    """Scale the parameters' gradients to a norm of at most `max_norm`; return the norm before.

    It has the same bits at any number of workers: squares are summed over rows of 64 elements of a
    parameter, which are never divided between workers, and the rows of all parameters are added in
    the same order. Collective for each of the `buffers` that has any of the parameters.
    """
    ids = set(map(id, parameters))
    buffers = [buffer for buffer in buffers if not ids.isdisjoint(map(id, buffer.parameters))]
    for buffer in buffers:
        buffer.drop_cleared()
    norm = gradient_norm(parameters, buffers)
    in_slices = {id(parameter) for buffer in buffers for parameter in buffer.parameters}
    unsharded = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and id(parameter) not in in_slices
    ]
    sliced = [part for buffer in buffers for part in buffer.gradients_of(ids)]
    scale_gradients([*unsharded, *sliced], norm, max_norm)
    return norm.float()


def gradient_norm(parameters: Parameters, buffers: Sequence[FlatBuffer]) -> Tensor:
    """Return the float64 2-norm of the parameters' gradients, some of them sharded in `buffers`.

    Collective for each buffer.
    """
    rows: dict[int, Tensor] = {}  # float64 sums of squares of each row, by the parameter's id
    for buffer in buffers:
        rows.update(buffer.squares())
    for parameter in parameters:  # of unsharded optimizers: the same on every worker
        if id(parameter) not in rows:
            rows[id(parameter)] = _rows(parameter)
    # one sum over the rows of all parameters, in the order of the parameters, not of the buffers
    return torch.cat([rows[id(parameter)] for parameter in parameters]).sum().sqrt()


def scale_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {gradient.dtype for gradient in gradients}:
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        foreach_mul_(group, coefficient.to(dtype))


def on_host(norm: Tensor) -> float | Tensor:
    """Return a norm as a number, or from a GPU as a tensor that holds it after the next wait.

    The host does not wait for the GPU here: it may read the value once it has waited for a result
    that the GPU computes later.
    """
    return norm.item() if norm.is_cpu else norm.to("cpu", non_blocking=True)


def _rows(parameter: Parameter) -> Tensor:
    size = parameter.numel()
    if parameter.grad is None:
        return torch.zeros(-(-size // ALIGNMENT), dtype=torch.float64, device=parameter.device)
    values = flattened(parameter.grad)  # in storage order, as in flat storage
    return row_squares(values)


class GradScaler(GradScalerHooks):
    """`torch.amp.GradScaler` of workers that agree whether gradients are finite.

    Each worker of a sharded optimizer sees a slice of the gradients. If only one of them found an
    overflow, it alone would skip the step, and its scale would differ.
    """

    def __init__(
        self, world: World, seals: Sequence[GradientSeal], device: str, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._world, self._seals = world, seals
        # the first call makes the scale, and a worker without samples may never call it
        self.scale(torch.zeros((), device=device))

    def before_unscale(self, optimizer: Optimizer) -> None:
        for seal in self._seals:
            if seal.optimizer is optimizer:
                seal.open()
                seal.contents.open()  # whose gradients are unscaled

    def after_unscale(self, optimizer: Optimizer, has_infinite: Tensor) -> Tensor:
        by_rank = has_infinite.new_empty(self._world.size)  # float32 [workers]
        self._world.all_gather(
            by_rank, has_infinite.view(1), "agreeing whether gradients are finite"
        )
        for seal in self._seals:
            if seal.optimizer is optimizer:
                seal.contents.close()
                seal.seal()
        return by_rank.sum().clamp_(max=1.0).view(has_infinite.shape)
