"""Gradients of a list of parameters: take them from autograd, add and copy them.

If a lane did not use a parameter, its gradient there is None and counts as zeros. If no lane used
it, it gets no gradient, so the optimizer skips it as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.errors import LossError

Parameters = Sequence[Parameter]
Gradients = list[Tensor | None]


def take_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Return the parameters' gradients and set `.grad` to None."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            shape = tuple(parameter.shape)
            raise LossError(f"a parameter of shape {shape} has a sparse gradient; use sparse=False")
        parameter.grad = None
    return gradients


def stash_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Return copies of the gradients, because exchanges reuse their memory, and clear `.grad`."""
    if all(parameter.grad is None for parameter in parameters):
        return [None] * len(parameters)
    return [None if one is None else one.clone() for one in take_gradients(parameters)]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of `left` if it has gradients."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if len(both) == len(left):
        return left
    return [
        _plus_zeros(a if b is None else b) if a is None or b is None else a
        for a, b in zip(left, right, strict=True)
    ]


def _plus_zeros(gradient: Tensor | None) -> Tensor | None:
    # -0.0 + 0.0 is 0.0, and workers exchange zeros for a missing gradient
    return None if gradient is None else gradient.add_(0.0)


def copy_gradients(views: Sequence[Tensor], gradients: Gradients) -> None:
    """Copy gradients into views of flat storage, zeros for missing ones; skip those in place."""
    pairs = [
        (view, gradient)
        for view, gradient in zip(views, gradients, strict=True)
        if gradient is not None and gradient is not view
    ]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()


class ModuleParameters:
    """A cache of a module's parameters, refreshed if a parameter or submodule was replaced.

    Walking through a module of 200 layers at every step takes too long. The cache does not keep the
    module alive.
    """

    def __init__(self) -> None:
        self._registries: list[dict[str, Any]] = []
        self._content: list[int] = []
        self._parameters: list[Parameter] = []

    def trainable(self, module: Module) -> list[Parameter]:
        """Return the parameters that now require a gradient; `module` is the same in all calls."""
        if not self._registries or self._ids() != self._content:
            self._registries = [
                registry
                for one in module.modules()
                for registry in (one._parameters, one._modules)  # noqa: SLF001 (no public access)
            ]
            self._content = self._ids()
            self._parameters = list(module.parameters())
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _ids(self) -> list[int]:
        return [id(value) for registry in self._registries for value in registry.values()]
