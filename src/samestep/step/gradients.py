"""Gradients of parameters: taking, adding and copying them.

If a lane did not use a parameter, its gradient there is None and counts as zeros. If no lane used
it, it gets no gradient, so the optimizer skips it as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from samestep.errors import LossError, OptimizerError
from samestep.step.layout import ALIGNMENT
from samestep.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    parameters_in,
    submodules_in,
    without_storage,
)

Parameters = Sequence[Parameter]
Gradients = list[Tensor | None]  # by number of the parameter


SHARDED_ADVICE: Final = (
    "Instead of loss.backward(), write run.backward(loss_fn, model, batch), and call it again for a"
    " penalty; to clip, use run.clip_grad_norm(model, max_norm). If the script needs anything else"
    " of an optimizer, use it without run.shard"
)


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def sum_dtype(dtype: torch.dtype, round_to: torch.dtype | None) -> torch.dtype:
    """Return the dtype of sums of gradients of `dtype`: `round_to` if that is narrower."""
    if round_to is None or not dtype.is_floating_point or dtype.itemsize <= round_to.itemsize:
        return dtype
    return round_to


def take_gradients(parameters: Sequence[Tensor], round_to: torch.dtype | None = None) -> Gradients:
    """Return the parameters' gradients, in their `sum_dtype`, and set `.grad` to None."""
    gradients: Gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = None
            if gradient.layout != torch.strided:
                issue = f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient"
                raise LossError(f"{issue}; use sparse=False")
    if round_to is not None:
        for n, gradient in enumerate(gradients):
            if gradient is not None:
                # rounds the leaves of the tree; sums of this dtype are rounded as well. In place,
                # so that each gradient is freed before the next one is rounded.
                gradients[n] = gradient.to(sum_dtype(gradient.dtype, round_to))
    return gradients


def copied_gradients(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    round_to: torch.dtype | None = None,
) -> Gradients:
    """Return copies with the strides of the parameters, in their `sum_dtype`.

    A CUDA graph writes the next lane's gradients to the memory of this one's.
    """
    copies = {
        n: torch.empty_like(parameters[n], dtype=sum_dtype(gradient.dtype, round_to))
        for n, gradient in enumerate(gradients)
        if gradient is not None
    }
    if copies:  # one call for all, because each call costs microseconds
        present = [gradient for gradient in gradients if gradient is not None]
        foreach_copy_([*copies.values()], present)
    return [copies.get(n) for n in range(len(gradients))]


def have_none(parameters: Sequence[Tensor]) -> bool:
    """Return whether no parameter has a gradient."""
    return all(map(is_, [parameter.grad for parameter in parameters], repeat(None)))


def scaled_together(gradients: Gradients, parameters: Parameters, scale: float) -> Gradients:
    """Return gradients in the dtypes of their parameters, times `scale`, as `scaled` does.

    In one call: one per parameter takes microseconds, and usually there is nothing to do.
    """
    converted = [
        gradient
        if gradient is None or gradient.dtype == parameter.dtype
        else gradient.to(parameter.dtype)
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    if scale != 1.0 and (present := [g for g in converted if g is not None]):
        foreach_mul_(present, scale)
    return converted


def stash_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Return copies of the gradients, because exchanges reuse their memory, and clear `.grad`."""
    return [
        None if gradient is None else gradient.clone() for gradient in take_gradients(parameters)
    ]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of `left` if it has gradients."""
    # one call for all parameters, because each call costs microseconds
    if not any(map(is_, chain(left, right), repeat(None))):  # all lanes use the same parameters
        foreach_add_(left, right)  # type: ignore[arg-type]
        return left
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        foreach_add_([a for a, _ in both], [b for _, b in both])
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
    if pairs:  # rounds gradients that are wider than flat storage
        foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    if len(pairs) == len(views):
        return
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()


def row_squares(flat: Tensor) -> Tensor:
    """Return the square of the norm of each row of 64 elements, float64; the last may be short."""
    if short := len(flat) % ALIGNMENT:
        flat = torch.nn.functional.pad(flat, (0, ALIGNMENT - short))
    dtype = torch.promote_types(flat.dtype, torch.float32)
    # [rows, 64] to one norm per row
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=dtype)
    return norms.double().square()


class ModuleParameters:
    """A cache of a module's parameters, refreshed if a parameter or submodule was replaced.

    Walking through a module of 200 layers at every step takes too long. The cache does not keep the
    module alive.
    """

    def __init__(self) -> None:
        # dicts of submodules: of their parameters, and of their own submodules
        self._registries: list[dict[str, Any]] = []  # with entries, which are compared
        self._empty: list[dict[str, Any]] = []  # without any at the last walk
        self._content: list[Any] = []  # the entries at the last walk
        self._parameters: list[Parameter] = []
        self._required: list[bool] | None = None  # a gradient, by parameter
        self._trainable: list[Parameter] = []

    def trainable(self, module: Module) -> list[Parameter]:
        """Return the parameters that now require a gradient; `module` is the same in all calls.

        The list is the same object until they change.
        """
        if not self._registries or any(self._empty) or not self._is_unchanged():
            registries = [
                registry
                for owner in module.modules()
                for registry in (parameters_in(owner), submodules_in(owner))
            ]
            self._registries = list(filter(None, registries))
            self._empty = [registry for registry in registries if not registry]
            self._content = self._values()
            self._parameters, self._required = list(module.parameters()), None
        required = [parameter.requires_grad for parameter in self._parameters]
        if required != self._required:
            self._required = required
            self._trainable = list(compress(self._parameters, required))
        return self._trainable

    def _is_unchanged(self) -> bool:
        values = self._values()
        return len(values) == len(self._content) and all(map(is_, values, self._content))

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._registries)))


class SlicedGradient(Tensor):
    """A placeholder in `.grad` for a gradient that is stored in slices.

    Operations that clear it add its number to `cleared`; all others raise `OptimizerError`.
    """

    number: int
    cleared: set[int]

    @classmethod
    def of(cls, parameter: Tensor, number: int, cleared: set[int]) -> SlicedGradient:
        """Return a placeholder with a parameter's shape, dtype and device, without storage."""
        placeholder = without_storage(cls, parameter)
        placeholder.number, placeholder.cleared = number, cleared
        return placeholder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        """Clear it, or raise `OptimizerError`."""
        if func.overloadpacket.__name__ not in {"zero_", "_foreach_zero_"}:
            raise OptimizerError(
                f"torch.{func.overloadpacket.__name__} cannot use `.grad` of a parameter of a"
                f" sharded optimizer: it is stored in slices, one per worker. {SHARDED_ADVICE}"
            )
        # `_foreach_zero_` gets a list, `zero_` a single tensor
        for placeholder in args[0] if isinstance(args[0], list) else args[:1]:
            placeholder.cleared.add(placeholder.number)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it."""
        return f"SlicedGradient({tuple(self.shape)})"
