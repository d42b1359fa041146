"""Gradients of parameters: taking, adding and copying them, and refusing those made elsewhere.

If a lane did not use a parameter, its gradient there is None and counts as zeros. If no lane used
it, it gets no gradient, so the optimizer skips it as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress, repeat
from operator import eq, is_
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _ImperativeEngine
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from samestep.comm.base import World
from samestep.errors import LossError, OptimizerError

Parameters = Sequence[Parameter]
Gradients = list[Tensor | None]  # by number of the parameter

SHARDED_ADVICE: Final = (
    "Instead of loss.backward(), write run.backward(loss_fn, model, batch), and call it again for a"
    " penalty; to clip, use run.clip_grad_norm(model, max_norm); for anything else, use the"
    " optimizer without run.shard"
)


def sum_dtype(dtype: torch.dtype, round_to: torch.dtype | None) -> torch.dtype:
    """Return the dtype of sums of gradients of `dtype`: `round_to` if that is narrower."""
    if round_to is None or not dtype.is_floating_point or dtype.itemsize <= round_to.itemsize:
        return dtype
    return round_to


def take_gradients(parameters: Sequence[Tensor], round_to: torch.dtype | None = None) -> Gradients:
    """Return the parameters' gradients, in their `sum_dtype`, and set `.grad` to None."""
    if have_none(parameters):
        return [None] * len(parameters)
    gradients: Gradients = []
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            if gradient.layout != torch.strided:
                issue = f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient"
                raise LossError(f"{issue}; use sparse=False")
            if round_to is not None:
                # rounds the leaves of the tree; sums of this dtype are rounded as well
                gradient = gradient.to(sum_dtype(gradient.dtype, round_to))
        gradients.append(gradient)
    return gradients


def scaled(gradient: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return a gradient in `dtype` times `scale`, in the same memory if it has that dtype."""
    if gradient.dtype != dtype:  # `to` takes a microsecond even if there is nothing to do
        gradient = gradient.to(dtype)
    return gradient if scale == 1.0 else gradient.mul_(scale)


def have_none(parameters: Sequence[Tensor]) -> bool:
    """Return whether no parameter has a gradient."""
    return all(map(is_, [parameter.grad for parameter in parameters], repeat(None)))


def stash_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Return copies of the gradients, because exchanges reuse their memory, and clear `.grad`."""
    return [
        None if gradient is None else gradient.clone() for gradient in take_gradients(parameters)
    ]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of `left` if it has gradients."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:  # one call for all parameters, because each call costs microseconds
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if len(both) == len(left):  # as usual: all lanes use the same parameters
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
    if pairs:  # rounds gradients that are wider than flat storage
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    if len(pairs) == len(views):
        return
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()


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
                for registry in (owner._parameters, owner._modules)  # noqa: SLF001  not public
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


class ManualGradients:
    """Gradients of a run's parameters from a `backward()` of user code, outside of `run.backward`.

    Such a gradient is that of one worker's samples, so no optimizer may use it. Only the object
    whose `watch` was called last is active, because a script may leave a run without closing it.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by id, also of parameters no longer watched
        self._parameters: list[Tensor] = []  # watched
        self._manual: dict[int, Tensor] = {}  # parameters with such a gradient, by id
        self._in_lane = self._in_backward = False
        self._lane_called_backward = False  # the loss function did
        self._has_nested = False
        self._depth = 0  # of backward passes inside each other, in the one of `run.backward`

    def watch(self, module: Module) -> None:
        """Watch the module's parameters, including frozen ones, which may be trained later."""
        if not self._is_active():
            Variable._execution_engine = _WatchedEngine(self)  # noqa: SLF001
        for name, parameter in module.named_parameters():
            has_gradients = parameter.is_floating_point() or parameter.is_complex()
            if id(parameter) not in self._names and has_gradients:
                self._names[id(parameter)] = f"{name!r} of {type(module).__name__}"
                self._parameters.append(parameter)

    def unwatch(self, parameters: Iterable[Tensor]) -> None:
        """Stop watching parameters of a sharded optimizer, which a `GradientSeal` watches."""
        ids = set(map(id, parameters))
        self._parameters = [parameter for parameter in self._parameters if id(parameter) not in ids]
        for number in ids:
            self._names.setdefault(number, "a parameter")
            self._manual.pop(number, None)

    def close(self) -> None:
        """Stop watching."""
        for content in self._parameters, self._names, self._manual:
            content.clear()
        if self._is_active():
            Variable._execution_engine = _ImperativeEngine()  # noqa: SLF001

    def _is_active(self) -> bool:
        engine = Variable._execution_engine  # noqa: SLF001
        return isinstance(engine, _WatchedEngine) and engine.manual is self

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Note which watched parameters get gradients in this block, except from `run.backward`."""
        if self._in_backward:  # of `run.backward`, or nested in it by a function of the graph
            self._depth += 1
            self._has_nested |= self._depth > 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self._lane_called_backward = self._in_lane
        parameters = self._parameters
        gradients = [parameter.grad for parameter in parameters]
        versions = _versions(gradients)  # autograd adds to a gradient in place
        try:
            yield
        finally:
            are_same = map(eq, versions, _versions(gradients))
            for parameter, gradient, is_same in zip(parameters, gradients, are_same, strict=True):
                if parameter.grad is not gradient or not is_same:
                    self._manual[id(parameter)] = parameter

    def forget_cleared(self) -> None:
        """Forget gradients that were cleared."""
        if self._manual:
            self._manual = {
                number: parameter
                for number, parameter in self._manual.items()
                if parameter.grad is not None and bool(parameter.grad.any())
            }

    def has_nested(self) -> bool:
        """Return whether a function of this lane's graph has begun a backward pass of its own."""
        return self._has_nested

    @contextmanager
    def lanes(self) -> Iterator[None]:
        """Compute lanes in this block, after a call of `forget_cleared`."""
        self._in_lane, self._lane_called_backward = True, False
        try:
            yield
        finally:
            self._in_lane = False

    @contextmanager
    def backward(self, parameters: Parameters, lane: int) -> Iterator[None]:
        """Differentiate a lane's loss in this block.

        Raises `LossError` if the loss function itself made gradients of `parameters`.
        """
        if self._lane_called_backward:  # only then, because `any` of a GPU tensor waits
            self._refuse_gradients(parameters, lane)
        self._in_backward, self._has_nested = True, False
        try:
            yield
        finally:
            self._in_backward = False

    def _refuse_gradients(self, parameters: Parameters, lane: int) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.any():
                name = self._names.get(id(parameter), "a parameter")
                raise LossError(
                    f"the loss function must return the loss, but in lane {lane} it called"
                    f" backward() itself and left a gradient of {name}: return the sum of the"
                    " losses, or call run.backward once for each. For a gradient of something else,"
                    " such as the inputs, use torch.autograd.grad"
                )
        self._lane_called_backward = False
        self.forget_cleared()

    def check(self, optimizer: Optimizer, *, is_sharded: bool) -> None:
        """Raise `OptimizerError` if the optimizer must not make a step now."""
        if not (self._manual or self._in_lane):
            return
        kind = type(optimizer).__name__
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if self._in_lane:
            if is_sharded or any(id(parameter) in self._names for parameter in parameters):
                raise OptimizerError(
                    f"{kind}.step() was called while run.backward computes a lane, in the loss"
                    " function or in a hook of a gradient, where gradients are those of one lane;"
                    " call it after run.backward"
                )
            return
        self.forget_cleared()
        for parameter in parameters:
            if id(parameter) in self._manual:
                raise OptimizerError(
                    f"{kind}.step() would use a gradient of {self._names[id(parameter)]} that"
                    " run.backward did not make: loss.backward() only sees the samples of this"
                    " worker, so the result would depend on the number of workers. Write"
                    " run.backward(loss_fn, model, batch), where loss_fn(model, lane_batch)"
                    " returns the loss. Add a penalty to that loss, or call run.backward again for"
                    " it, before the step. If you wanted the gradient for something else, call"
                    " optimizer.zero_grad() before run.backward, or use torch.autograd.grad"
                )


class _WatchedEngine(_ImperativeEngine):
    """Autograd's engine, which reports each backward pass to `ManualGradients`.

    That costs 0.01 ms a pass; hooks of 200 parameters would cost 0.2 ms.
    """

    def __init__(self, manual: ManualGradients) -> None:
        self.manual = manual

    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Differentiate; `accumulate_grad` says whether that changes `.grad`."""
        if not kwargs.get("accumulate_grad"):
            return super().run_backward(*args, **kwargs)
        with self.manual.around_backward():
            return super().run_backward(*args, **kwargs)


class SlicedGradient(Tensor):
    """A placeholder in `.grad` for a gradient that is stored in slices.

    Operations that clear it add its number to `cleared`; all others raise `OptimizerError`.
    """

    number: int
    cleared: set[int]

    @classmethod
    def of(cls, parameter: Tensor, number: int, cleared: set[int]) -> SlicedGradient:
        """Return a placeholder with a parameter's shape, dtype and device, without storage."""
        make = Tensor._make_wrapper_subclass  # noqa: SLF001
        placeholder: SlicedGradient = make(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
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


class GradientSeal:
    """Keeps user code from changing the gradients of a sharded optimizer, or its parameter groups.

    With several workers, `.grad` of a parameter is not the gradient that the optimizer uses. So
    changes are refused with one worker as well, and each step clears the gradients.
    """

    def __init__(self, optimizer: Optimizer, settle: Callable[[], object]) -> None:
        """`settle` waits for gradients that still arrive, and drops cleared ones."""
        self.optimizer, self._settle = optimizer, settle
        # before `Shard` replaces the parameters by segments
        self._ids = set(map(id, self._parameters()))
        self.seal()
        optimizer.register_step_pre_hook(self.check)
        optimizer.register_step_post_hook(self._clear)
        optimizer.add_param_group = self._refuse_group  # type: ignore[method-assign,assignment]

    def seal(self) -> None:
        """Accept the current gradients."""
        self._gradients = [parameter.grad for parameter in self._parameters()]
        self._versions = _versions(self._gradients)

    def covers(self, parameters: Parameters) -> bool:
        """Return whether any of the parameters was in the optimizer when it was sharded."""
        return any(id(parameter) in self._ids for parameter in parameters)

    def check(self, *_: object) -> None:
        """Raise `OptimizerError` if a gradient was changed, other than by clearing it."""
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        if len(gradients) != len(self._gradients):
            pass  # segments were divided
        elif all(map(is_, gradients, self._gradients)) and _versions(gradients) == self._versions:
            return
        sealed = dict(zip(map(id, self._gradients), self._versions, strict=True))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None or isinstance(gradient, SlicedGradient):
                continue
            if sealed.get(id(gradient)) != gradient._version:  # noqa: SLF001
                refuse_unless_zero(gradient)
                parameter.grad = None

    def open(self) -> None:
        """Check gradients, and settle them, so that they can be read."""
        self.check()
        self._settle()
        self.seal()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _clear(self, *_: object) -> None:
        parameters = self._parameters()
        for parameter in parameters:
            parameter.grad = None
        self._gradients, self._versions = [None] * len(parameters), [0] * len(parameters)

    def _refuse_group(self, *_: object) -> None:
        kind = type(self.optimizer).__name__
        raise OptimizerError(
            f"add_param_group was called on a sharded {kind}, which cannot get more parameters:"
            f" create the {kind} with all groups before run.shard, and freeze those that train"
            " later with requires_grad_(False)"
        )


def refuse_unless_zero(gradient: Tensor | None) -> None:
    """Raise `OptimizerError` for a gradient that user code gave to a sharded optimizer."""
    if gradient is not None and gradient.any():
        raise OptimizerError(
            "a gradient of a sharded optimizer was set or changed outside of run.backward, which"
            " has no effect because the gradient is stored in slices, one per worker."
            f" {SHARDED_ADVICE}"
        )


def _versions(gradients: Gradients) -> list[int]:
    """Return how often each gradient was changed in place; 0 for none."""
    return [0 if gradient is None else gradient._version for gradient in gradients]  # noqa: SLF001


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` of workers that agree whether gradients are finite.

    Each worker of a sharded optimizer sees a slice of the gradients. If only one of them found an
    overflow, it alone would skip the step, and its scale would differ.
    """

    def __init__(
        self, world: World, seals: Sequence[GradientSeal], device: str, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._world, self._seals = world, seals
        if self.is_enabled():  # a worker without samples may never call `scale`
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        seals = [seal for seal in self._seals if seal.optimizer is optimizer]
        for seal in seals:
            seal.open()
        # float32 scalars: 1.0 if a gradient on that device is infinite or NaN
        found_infs: dict[torch.device, Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        own_inf = torch.zeros_like(found_inf)
        for value in found_infs.values():
            own_inf += value.to(own_inf.device)
        infs = own_inf.new_empty(self._world.size)  # float32 [workers]
        self._world.all_gather(infs, own_inf.view(1), "agreeing whether gradients are finite")
        # a scalar: 1.0 if any worker has one
        agreed = infs.sum().clamp_(max=1.0).view(own_inf.shape)
        for seal in seals:
            seal.seal()
        # a worker whose slice is empty has no entry
        devices = list(found_infs) or [agreed.device]
        return {device: agreed.to(device, copy=True) for device in devices}
