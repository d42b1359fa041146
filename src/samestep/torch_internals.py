"""What samestep uses of PyTorch that is not public: each name, why it is needed, and nothing else.

All of it is in PyTorch 2.6 to 2.13. No other module touches it. A test of each function here fails
if a new version of PyTorch changes what it needs (tests/test_torch_internals.py).
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from inspect import currentframe
from math import inf, prod
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._C import _ImperativeEngine
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

TensorsOf = Callable[..., Iterable[Tensor] | None]
BeforeUpdate = Callable[[str, Callable[[], Iterable[Tensor] | None]], object]
Pass = Callable[[], tuple[Tensor, ...]]
AroundBackward = Callable[[Pass, Sequence[Tensor]], tuple[Tensor, ...]]
Subclass = TypeVar("Subclass", bound=Tensor)

# by module, what its collectives call before they communicate
COLLECTIVES: Final = {
    "torch.distributed.distributed_c10d": ("_rank_not_in_group",),
    "torch.distributed._functional_collectives": ("_resolve_group", "_resolve_group_name"),
}
CROSS_ENTROPY: Final = 3  # the place of `reduction` among their arguments
# the place of `reduction` among the arguments of loss functions, whose first ones are broadcast
MEANS: Final[dict[Any, dict[str, int]]] = {
    torch._C._nn: {  # noqa: SLF001
        "cross_entropy_loss": CROSS_ENTROPY,
        "nll_loss_nd": CROSS_ENTROPY,
        "binary_cross_entropy": -1,
        "mse_loss": 2,
        "l1_loss": 2,
        "smooth_l1_loss": 2,
        "huber_loss": 2,
        "soft_margin_loss": 2,
    },
    torch: {"binary_cross_entropy_with_logits": -1},
}
# operations on each tensor of lists, element by element, with which torch updates averages
FOREACH: Final = frozenset(
    {"_foreach_add_", "_foreach_addcdiv_", "_foreach_copy_", "_foreach_lerp_", "_foreach_mul_"}
    | {"_foreach_sub", "_foreach_sub_"}
)
COPY: Final = "__deepcopy__"
SHARDED: Final = WeakSet[Module]()  # by `fully_shard_all`
GRAPH_TREES: Final = "torch._inductor.cudagraph_trees"
NODES: Final = 10_000  # scalars of a loss's graph that are searched for means

# Attributes of every module, such as its hooks, without its buffers, which user code may add to.
MODULE_ATTRIBUTES: Final = frozenset(vars(Module())) - {"_buffers"}
MODULE_DICTS: Final = MODULE_ATTRIBUTES | {"_buffers"}

# One call for many tensors, because each call takes microseconds. torch's optimizers use them.
foreach_add_: Final = torch._foreach_add_
foreach_copy_: Final = torch._foreach_copy_
foreach_mul_: Final = torch._foreach_mul_
foreach_norm: Final = torch._foreach_norm  # noqa: SLF001  no optimizer uses it

# what `watch_updates` got last; empty until it replaces methods
_before_update: Final[list[BeforeUpdate | None]] = []

# The attribute of a module's state_dict with the versions of its submodules. Modules read it there
# when they load the state; a copy of the dict has to have it, too.
STATE_METADATA: Final = "_metadata"


def foreach_has_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 if an element is infinite or NaN, and 0 otherwise, float32 [], as GradScaler does.

    The tensors have one dtype, keep their values, and are at least one.
    """
    found, factor = torch.zeros(2, device=tensors[0].device).unbind()
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, factor.add_(1.0))
    return found


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place; 0 for None.

    `_version` finds changes by user code without a copy of the values to compare.
    """
    return [0 if tensor is None else tensor._version for tensor in tensors]  # noqa: SLF001


def versions_and_addresses(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return how often each tensor was changed in place, and where its memory begins."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]  # noqa: SLF001


def without_storage(kind: type[Subclass], like: Tensor) -> Subclass:
    """Return a tensor of a subclass with the shape, dtype and device of `like`.

    `_make_wrapper_subclass` gives it no memory; other constructors allocate some.
    """
    return Tensor._make_wrapper_subclass(  # noqa: SLF001
        kind, like.shape, dtype=like.dtype, device=like.device
    )


@contextmanager
def reading_arrays(read: Callable[[Any], Any]) -> Iterator[None]:
    """In this block, let `torch.from_numpy` get what `read` returns for its argument.

    It takes arrays only, unlike other functions, which ask an object to become one.
    """
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda ndarray: from_numpy(read(ndarray))
    try:
        yield
    finally:
        torch.from_numpy = from_numpy


def parameters_in(module: Module) -> dict[str, Parameter | None]:
    """Return a module's dict of its own parameters, for fast lookups and replacements."""
    return module._parameters  # noqa: SLF001


def adapts_to_states(module: Module) -> bool:
    """Return whether a module has code of its own to load states, such as of other shapes.

    torch's own layers override this method as well, but not for other shapes or names.
    """
    load = type(module)._load_from_state_dict  # noqa: SLF001
    is_own = not load.__module__.startswith("torch.nn.modules.")
    return is_own or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001


def buffers_in(module: Module) -> dict[str, Tensor | None]:
    """Return a module's dict of its own buffers."""
    return module._buffers  # noqa: SLF001


def submodules_in(module: Module) -> dict[str, Module | None]:
    """Return a module's dict of its children; `named_children` skips a second occurrence."""
    return module._modules  # noqa: SLF001


class _WatchedEngine(_ImperativeEngine):
    """Autograd's engine, with a function around each pass that may change `.grad`."""

    def __init__(self, around: AroundBackward) -> None:
        self.around = around

    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if not kwargs.get("accumulate_grad"):  # of `torch.autograd.grad`
            return super().run_backward(*args, **kwargs)
        return self.around(partial(super().run_backward, *args, **kwargs), args[0])


def watch_backward(around: AroundBackward | None) -> None:
    """Call `around` with each pass of autograd that may change `.grad`, and with its roots.

    None ends that. Every way to call backward gets the engine from `Variable._execution_engine`.
    This costs 0.01 ms a pass; the public hooks of 200 parameters would cost 0.2 ms.
    """
    Variable._execution_engine = (  # noqa: SLF001
        _ImperativeEngine() if around is None else _WatchedEngine(around)
    )


def backward_watcher() -> AroundBackward | None:
    """Return the argument of the last call of `watch_backward`."""
    engine = Variable._execution_engine  # noqa: SLF001
    return engine.around if isinstance(engine, _WatchedEngine) else None


def watch_updates(before: BeforeUpdate | None) -> None:
    """Call `before` with each call that belongs behind backward; None ends that.

    It gets the name of what is called and a function that returns its tensors: parameters, or
    gradients that it clips. None stands for tensors that are not known, or that are not there yet.

    The methods are public, but have no hooks. Functions that clip are imported by name, so that
    what they call is replaced. All of it is replaced once and stays, because an attribute that
    `Module` gets costs time in each of its subclasses.
    """
    is_new = not _before_update
    _before_update[:] = [before]
    if not is_new:
        return
    for kind, name, tensors_of in (
        (Module, "zero_grad", lambda module, *_, **__: module.parameters()),
        (Optimizer, "zero_grad", _optimized),
        (GradScaler, "unscale_", lambda _, optimizer: _optimized(optimizer)),
        (GradScaler, "update", _unknown),
        (AveragedModel, "update_parameters", lambda _, model: model.parameters()),
    ):
        _watch_call(kind, name, f"{kind.__name__}.{name}", tensors_of)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and "step" in vars(kind):
            _watch_call(kind, "step", f"{kind.__name__}.step", _scheduled)
    _watch_call(clip_grad, "_get_total_norm", "clip_grad_norm_", lambda gradients, *_: gradients)
    _watch_call(
        clip_grad,
        "_group_tensors_by_device_and_dtype",
        "clip_grad_value_",
        lambda lists, *_, **__: lists[0],
    )


def _optimized(optimizer: Optimizer, *_: Any, **__: Any) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _scheduled(schedule: LRScheduler, *_: Any, **__: Any) -> list[Tensor]:
    return _optimized(schedule.optimizer)


def _unknown(*_: Any, **__: Any) -> None:
    """Return no tensors."""


def _watch_call(owner: Any, name: str, shown: str, tensors_of: TensorsOf) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if (before := _before_update[0]) is not None:
            before(shown, lambda: tensors_of(*args, **kwargs) or None)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


@contextmanager
def before_reentrant_checkpoints(check: Callable[[Sequence[Any]], object]) -> Iterator[None]:
    """In this block, call `check` with the inputs of each activation checkpoint that is reentrant.

    `CheckpointFunction` is public, but nothing else is called when one begins.
    """
    kind: Any = checkpoint.CheckpointFunction
    apply = kind.apply

    def checked(*args: Any) -> Any:
        check(args)
        return apply(*args)

    kind.apply = checked
    try:
        yield
    finally:
        del kind.apply  # the inherited one is back


@contextmanager
def before_collectives(check: Callable[[str], object]) -> Iterator[None]:
    """In this block, call `check` with the name of each collective that this thread begins.

    Functions of torch.distributed ask `_rank_not_in_group` first, however they were imported, and
    functional collectives resolve their group. Others that ask, such as `get_rank`, only read.
    Those that a world of samestep begins, such as to gather parameters, are not counted.
    """
    thread, c10d = get_ident(), sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():  # without a group there are none
        yield
        return

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        def fn(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread and (name := _collective_begun()) is not None:
                check(name)
            return original(*args, **kwargs)

        return fn

    originals = []
    for module, names in COLLECTIVES.items():
        for name in names:
            original = getattr(sys.modules.get(module), name, None)
            if original is not None:
                originals.append((sys.modules[module], name, original))
                setattr(sys.modules[module], name, checked(original))
    try:
        yield
    finally:
        for namespace, name, original in originals:
            setattr(namespace, name, original)


def _collective_begun() -> str | None:
    """Return the name of the collective that called the caller, None if it only reads or is own."""
    frame = currentframe().f_back.f_back  # type: ignore[union-attr]
    name = frame.f_code.co_name  # type: ignore[union-attr]
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    is_own = frame is not None and frame.f_globals.get("__name__", "").startswith("samestep.comm.")
    return None if is_own or name.lstrip("_").startswith(("get_", "set_", "res")) else name


def leaves_of(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that need a gradient and that a graph begins with, in no order."""
    leaves = [root for root in roots if root.is_leaf and root.requires_grad]
    nodes: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # grows
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
            continue
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return leaves


class Divisor(NamedTuple):
    """What a part of a loss is divided by."""

    kind: str  # c: a mean cross-entropy; m: another mean; q: a quotient of sums; s: a sum of losses
    value: Tensor | float
    means: int = 0  # if the loss averages several such parts itself, their number


def divisors_of(loss: Tensor) -> list[Divisor]:
    """Return what means and sums in a loss are divided by; it may scale, add and stack them.

    A mean cross-entropy is divided by the sum of the class weights of the labels that are not
    ignored. Autograd keeps that, shapes and divisors for backward; other code does not see them. A
    sum that nothing divides is only found if it is a loss function's.
    """
    return _divisors_in([loss.grad_fn], set())


def _divisors_in(nodes: list[Any], seen: set[Any]) -> list[Divisor]:
    found: list[Divisor] = []
    for node in nodes:  # grows, by what comes before a scalar
        if node in seen or _shape_of(node) != () or len(seen) > NODES:
            continue
        seen.add(node)
        kind, reduction = _kind_of(node), getattr(node, "_saved_reduction", None)
        if reduction == 1 and kind.startswith("NllLoss"):
            found.append(Divisor("c", node._saved_total_weight))  # noqa: SLF001
            continue
        before = [before for before, _ in node.next_functions]
        if reduction == 2:  # a sum
            found.append(Divisor("s", 1.0))
        elif kind in {"Sum", "Mean"} and _kind_of(before[0]) == "Stack":
            stacked = [part for part, _ in before[0].next_functions]
            parts = _divisors_in(stacked, seen)
            found += parts if kind == "Sum" else _averaged(parts, len(stacked))
        elif reduction == 1 or kind == "Mean":
            found.append(Divisor("m", prod(next(filter(None, map(_shape_of, before)), ()))))
        elif kind == "Sum" and _kind_of(before[0]) == "Div":
            found += _divided([], _factor_of(before[0]))
        elif kind == "Div":
            found += _divided(_divisors_in(before, seen), _factor_of(node))
        elif kind == "Mul":
            found += _multiplied(_divisors_in(before, seen), _factor_of(node))
        else:
            nodes += before
    return found


def _kind_of(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0]


def _shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the only result of an operation, None if there are several, or none."""
    results: Any = getattr(node, "_input_metadata", ())
    return tuple(results[0].shape) if len(results) == 1 else None


def _factor_of(node: Any) -> Tensor | float | None:
    """Return the scalar by which a tensor is multiplied or divided, if it has no gradient."""
    before = [before for before, _ in node.next_functions]
    factor: Tensor | float
    if len(before) == 1 or before[1] is None:
        factor = node._saved_other  # noqa: SLF001
    elif before[0] is None and _kind_of(node) == "Mul":
        factor = node._saved_self  # noqa: SLF001
    else:
        return None
    if not isinstance(factor, Tensor):
        return factor
    if factor.ndim or factor.device.type != "cpu":
        return None if factor.ndim else factor
    # a mode of the user, as one that counts operations, would get the number of a wrapped tensor
    with torch._C._DisableTorchDispatch():  # noqa: SLF001
        return float(factor)


def _divided(found: list[Divisor], divisor: Tensor | float | None) -> list[Divisor]:
    if divisor is None:
        return found
    if all(part.kind == "s" for part in found):
        return [Divisor("q", divisor)]
    return found if isinstance(divisor, Tensor) else _averaged(found, divisor)


def _multiplied(found: list[Divisor], factor: Tensor | float | None) -> list[Divisor]:
    if factor is None or not (isinstance(factor, Tensor) or factor):
        return found
    if not found:
        return [Divisor("q", 1 / factor)]
    if all(part.kind == "s" for part in found):
        return [Divisor("s", 1 / factor)]
    if isinstance(factor, Tensor) or factor == 1:  # a weight, and no mean of one sample
        return found
    return _averaged(found, 1 / factor)


def _averaged(found: list[Divisor], divisor: float) -> list[Divisor]:
    """Note that a loss averages some parts, if it divides as many of them."""
    if not 1 <= divisor < inf or round(divisor) != divisor or len(found) % round(divisor):
        return found
    return [Divisor(kind, value, max(n, 1) * round(divisor)) for kind, value, n in found]


@contextmanager
def noted_means(note: Callable[[Tensor, Divisor], object]) -> Iterator[None]:
    """In this block, call `note(loss, divisor)` for each loss function of torch that is a mean.

    Without a graph, nothing keeps what it is divided by. The functions of torch.nn look up these,
    which have positional arguments.
    """

    def noting(original: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        def fn(*args: Any) -> Tensor:
            loss = original(*args)
            if args[place] == 1 and type(loss) is Tensor:
                if place != CROSS_ENTROPY:
                    note(loss, Divisor("m", args[0].numel()))
                elif not args[1].is_floating_point():
                    note(loss, Divisor("c", _sum_of_weights(args[1], args[2], args[4])))
            return loss

        return fn

    originals = [
        (namespace, name, getattr(namespace, name), place)
        for namespace, names in MEANS.items()
        for name, place in names.items()
    ]
    for namespace, name, original, place in originals:
        setattr(namespace, name, noting(original, place))
    try:
        yield
    finally:
        for namespace, name, original, _ in originals:
            setattr(namespace, name, original)


def _sum_of_weights(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return the sum of the weights of labels [...] that are not ignored, float64 []."""
    is_kept = target != ignored
    if weight is None:
        return is_kept.sum(dtype=torch.float64)
    return (weight.double()[target.where(is_kept, 0)] * is_kept).sum()


class GradScalerHooks(torch.amp.GradScaler):
    """A GradScaler whose search for infinite gradients can be extended, which is not public."""

    def before_unscale(self, optimizer: Optimizer) -> None:
        """Prepare the gradients of an optimizer."""

    def after_unscale(self, optimizer: Optimizer, has_infinite: Tensor) -> Tensor:
        """Return the decision to skip a step, 1.0 or 0.0; both are float32 scalars.

        `has_infinite` is at least 1.0 if a gradient is infinite or NaN.
        """
        return has_infinite

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless a gradient is infinite; for a scheduler, both are steps of the optimizer.

        It would warn after the first step of a run if that one was skipped.
        """
        result = super().step(optimizer, *args, **kwargs)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        self.before_unscale(optimizer)
        # of each device with gradients; none if there are no gradients
        by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        has_infinite = torch.zeros_like(found_inf)
        for on_device in by_device.values():
            has_infinite += on_device.to(has_infinite.device)
        decision = self.after_unscale(optimizer, has_infinite)
        devices = list(by_device) or [decision.device]
        return {device: decision.to(device, copy=True) for device in devices}


def step_pre_hooks(optimizer: Optimizer) -> Collection[Callable[..., Any]]:
    """Return the hooks that run before an optimizer's step, of which there is no public list."""
    return optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001


HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


@contextmanager
def without_fsdp(root: Module) -> Iterator[None]:
    """Let modules that `fully_shard_all` sharded have their own classes and hooks in this block."""
    kept = [(module, name, vars(module)[name]) for module in root.modules() for name in HOOKS]
    classes = [(module, type(module)) for module in root.modules() if module in SHARDED]
    states = [
        (module, name, vars(module).pop(name))
        for module, _ in classes
        for name in [*vars(module)]
        if name == COPY or str(name).startswith("__composable_api")
    ]
    for module, name, hooks in kept:
        own = [(number, hook) for number, hook in hooks.items() if not _is_of_fsdp(hook)]
        vars(module)[name] = OrderedDict(own)
    for module, kind in classes:
        set_class(module, kind.__bases__[1])  # the first one is FSDPModule
    try:
        yield
    finally:
        for module, name, value in [*kept, *states]:
            vars(module)[name] = value
        for module, kind in classes:
            set_class(module, kind)


def _is_of_fsdp(hook: Any) -> bool:
    module = str(getattr(getattr(hook, "hook", hook), "__module__", ""))
    return module.startswith(("torch.distributed.fsdp", "samestep.sharded"))


def move_module(module: Module, device: torch.device) -> None:
    """Move a module to a device, but leave on the meta device what is there, unlike `to`."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # noqa: SLF001


def set_class(obj: Any, kind: type) -> None:
    """Make an object one of another class of the same layout, such as a subclass of its own."""
    obj.__class__ = kind


def without_torch_function(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a subclass of tensors has intercepted."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return func(*args, **kwargs)


def copy_with(module: Module, copy: Callable[[Any, dict[int, Any]], Module]) -> None:
    """Let `copy.deepcopy` of a module, which FSDP2 refuses, return `copy(module, memo)`."""
    owner = ref(module)
    vars(module)[COPY] = lambda memo: copy(owner(), memo)


def can_shard_fully() -> bool:
    """Return whether FSDP2 can gather parameters in another way than its own: since 2.9."""
    from torch.distributed import fsdp  # takes a second

    return hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather")


def fully_shard_all(
    modules: Sequence[Any],
    mesh: Any,
    *,
    before: Callable[[Module], None],
    after: Callable[[], None],
) -> None:
    """Shard modules, the root last, with FSDP2, which reduces no gradients.

    It frees parameters after each forward pass of a module, and after backward. A unit may be
    called before the root. `before` is called with each module first, and `after` before FSDP2
    looks for parameters that `gather_in_place` got.
    """
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        before(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    SHARDED.update(modules)
    root = modules[-1]
    root.set_requires_gradient_sync(False)
    after()
    root._get_fsdp_state()._lazy_init()  # noqa: SLF001


def end_passes(module: Any) -> None:
    """Free what FSDP2 has gathered for a module, and forget passes through it that have failed.

    It would go on with them: use what it has gathered ahead although parameters have changed since,
    and gather without a wait of its streams for these changes.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    group, idle = state._fsdp_param_group, type(state._training_state).IDLE  # noqa: SLF001
    state._training_state, state._state_ctx.iter_forward_root = idle, None  # noqa: SLF001
    state._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001
    state._comm_ctx.post_forward_order.clear()  # noqa: SLF001
    if group is not None:
        group._training_state = idle  # noqa: SLF001
        group._post_forward_indices.clear()  # noqa: SLF001
        group.wait_for_unshard()  # for what was gathered ahead
    module.reshard()


def gather_in_place(parameter: Any, complete: Tensor, own: Tensor) -> None:
    """Let FSDP2 use memory that all workers share instead of gathering a sharded parameter.

    Both tensors are in it, and have padded rows, as many of each worker. `complete` computes, and
    `own`, of this worker, becomes the local tensor of the parameter and takes its values. FSDP2
    asks local tensors for these two functions, its extension for subclasses; what it gathers then
    is a byte of each worker.
    """
    rows, byte = parameter._local_tensor, torch.zeros(1, dtype=torch.uint8)  # noqa: SLF001
    with torch.no_grad():
        own[: len(rows)] = rows
    vars(own).update(
        fsdp_pre_all_gather=lambda mesh: ((byte,), mesh),
        # without `out`, the result is what computes, and what is freed with it
        fsdp_post_all_gather=lambda *_, out=None: (complete, ()) if out is None else None,
    )
    parameter._local_tensor = own  # noqa: SLF001


def step_hook_numbers(optimizer: Optimizer) -> list[int]:
    """Return the numbers of the hooks of an optimizer's step, which no two hooks share."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    return [*before, *after]


def nest_step_hooks(optimizer: Optimizer, is_inner: Callable[[Callable[..., Any]], bool]) -> None:
    """Let `is_inner` hooks run next to the update: the last before it, the first after it.

    Hooks run in the order in which they were registered, and can be put in front of others only in
    the private dicts. A hook of all optimizers may call this before the others run.
    """
    before: Any = optimizer._optimizer_step_pre_hooks  # noqa: SLF001
    after: Any = optimizer._optimizer_step_post_hooks  # noqa: SLF001
    for number in [number for number, hook in before.items() if is_inner(hook)]:
        before.move_to_end(number)
    for number in [number for number, hook in after.items() if is_inner(hook)][::-1]:
        after.move_to_end(number, last=False)


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], object] | None:
    """Return the optimizer's `step` without hooks, to update some parameters before the others."""
    return getattr(type(optimizer).step, "__wrapped__", None)


def post_accumulate_hooks(parameter: Tensor) -> Collection[Callable[[Tensor], Any]]:
    """Return the hooks that run once autograd has added to `.grad`, of which there is no list."""
    return (parameter._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001


def loader_processes(batches: object) -> Sequence[Any]:
    """Return the processes of a DataLoader's iterator, none without workers."""
    return getattr(batches, "_workers", ())


def end_loader_processes(batches: Any) -> None:
    """End the processes of a DataLoader's iterator; otherwise the garbage collector does it."""
    batches._shutdown_workers()  # noqa: SLF001


def is_forked_after_cuda() -> bool:
    """Return whether a fork after a call of CUDA keeps this process from using GPUs.

    Public functions then only report that there are none.
    """
    return torch.cuda._is_in_bad_fork()  # noqa: SLF001


def recover_from_capture(device: torch.device, pool: Any) -> None:
    """Let a device go on after the capture of a CUDA graph that failed.

    PyTorch leaves its allocator and its generator in the middle: the first would keep memory of
    several streams forever, and the second would refuse to draw.
    """
    with suppress(RuntimeError):  # it was not in the middle
        torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001
    generator = torch.cuda.default_generators[device.index]
    with suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())


def has_compiled_graphs(devices: Iterable[torch.device]) -> bool:
    """Return whether torch.compile has made CUDA graphs on a device, as with "reduce-overhead".

    Only the module that makes them knows; it is imported when there are any.
    """
    trees: Any = sys.modules.get(GRAPH_TREES)
    if trees is None:
        return False
    with suppress(AssertionError):  # before torch 2.13, in threads that have compiled nothing
        return any(
            trees.get_container(device.index).tree_manager is not None
            for device in devices
            if device.type == "cuda"
        )
    return False


def begin_compiled_graphs(devices: Iterable[torch.device]) -> None:
    """Let CUDA graphs of torch.compile write to the memory of earlier lanes and blocks, if any.

    Otherwise each lane may get graphs and memory of its own: torch sees no step end.
    """
    if GRAPH_TREES in sys.modules and has_compiled_graphs(devices):
        torch.compiler.cudagraph_mark_step_begin()


def is_compiled(result: Tensor) -> bool:
    """Return whether code of torch.compile, whose backward pass is one node, led to a result."""
    nodes: list[Any] = [result.grad_fn]
    seen = set(nodes)
    for node in nodes:  # grows
        if type(node).__name__ == "CompiledFunctionBackward":
            return True
        new = {before for before, _ in getattr(node, "next_functions", ())} - {*seen, None}
        seen |= new
        nodes += new
    return False


def is_called_by_compiled_code() -> bool:
    """Return whether this call comes from what torch.compile compiles, where Dynamo gave up.

    Versions that cannot tell return False.
    """
    from torch._C._dynamo import eval_frame

    return callable(getattr(eval_frame, "get_eval_frame_callback", lambda: None)())


def preload_compiler() -> None:
    """Import the 800 modules that torch's optimizers import when they are first used."""
    import torch._dynamo  # noqa: F401


def default_store() -> Any:
    """Return the store of torch.distributed's default group, which has no public name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()  # noqa: SLF001


def set_group_timeout(group: Any, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of an existing process group for one type of device."""
    group._get_backend(device)._set_default_timeout(timeout)  # noqa: SLF001


def on_new_group(call: Callable[[Any, Collection[Any]], object]) -> None:
    """Call `call(group, groups)` with each process group that is made from now on.

    `groups` are the earlier ones that are not destroyed. torch keeps all groups in the dict
    `_pg_map`, and calls nothing else when it adds one.
    """
    from torch.distributed import distributed_c10d

    class Groups(dict[Any, Any]):
        def __setitem__(self, group: Any, value: Any) -> None:
            call(group, self.keys())
            world = distributed_c10d._world  # noqa: SLF001
            world.group_count = max(world.group_count, 1)  # `create_store` may have reset it
            super().__setitem__(group, value)

    if hasattr(distributed_c10d, "_pg_map"):  # not if torch is built without torch.distributed
        distributed_c10d._pg_map = Groups(distributed_c10d._pg_map)  # noqa: SLF001


def on_new_group_store(connect: Callable[[int, int, timedelta], Any]) -> None:
    """Let `connect(rank, size, timeout)` return the store of groups made at MASTER_PORT.

    torch's own store there admits everyone. `register_rendezvous_handler` replaces no handler. The
    default group's name is the number of groups so far, which a failed try increases on some
    workers only, so it starts anew.
    """
    distributed_c10d: Any = import_module("torch.distributed.distributed_c10d")
    module: Any = import_module("torch.distributed.rendezvous")  # the package has such a function
    create = module._create_c10d_store  # noqa: SLF001

    def create_store(hostname: str, port: int, *rest: Any, **named: Any) -> Any:
        master = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
        if (hostname, str(port)) == master:
            rank, size, timeout, *_ = rest
            distributed_c10d._world.group_count = 0  # noqa: SLF001  of the next try
            return connect(rank, size, timeout)
        return create(hostname, port, *rest, **named)

    module._create_c10d_store = create_store  # noqa: SLF001
