"""Refusals: what user code may not do around a step, with the error that says what to do instead.

A model, a gradient or an optimizer that was changed in a way that the run cannot follow would make
the result depend on the number of workers, or lose gradients, without an error.
"""

from __future__ import annotations

import linecache
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from operator import eq, is_
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from samestep.errors import (
    DataError,
    LossError,
    ModelError,
    NonFiniteLossError,
    OptimizerError,
    OutOfMemoryError,
    SamestepError,
    WorldError,
)
from samestep.step.gradients import (
    SHARDED_ADVICE,
    ModuleParameters,
    Parameters,
    SlicedGradient,
    have_none,
    parameters_of,
)
from samestep.step.optimizer_state import (
    LockedState,
    SavedState,
    SavedValues,
    load_optimizer,
)
from samestep.step.replicas import check_unwrapped
from samestep.torch_internals import (
    Pass,
    backward_watcher,
    leaves_of,
    nest_step_hooks,
    post_accumulate_hooks,
    step_hook_numbers,
    versions_of,
    watch_backward,
    watch_updates,
)
from samestep.user_code import is_callers, is_own_hook

REFUSED_BY_TORCH: Final = re.compile(r"([\w ]+) does not have a deterministic implementation")
# parts of the names that torch gives to operations it refuses: what to write instead
REFUSED: Final = {
    "max_unpool": "torch.zeros(...).scatter(-1, indices, values), whose indices must differ",
    "put_": "index_put_, with accumulate=True if indices may repeat",
    "embedding_bag": "torch.nn.Embedding and a maximum over its rows",
    "scatter_reduce": "reduce='sum' of logarithms",
    "index_reduce": "index_add_, or scatter_reduce with 'sum', 'mean', 'amin' or 'amax'",
    "roi_pool": "torchvision.ops.roi_align",
    "ps_roi": "torchvision.ops.roi_align",
    "deform_conv2d": "torch.nn.functional.grid_sample with a convolution",
    "compute_grad_input": "torch.nn.functional.grid_sample with a convolution",  # of deform_conv2d
    "quantized_resize": "a new tensor",
    "median": "torch.median without out=",
    "histc": "torch.histc without out=",
    "bincount": "torch.bincount without out=",
}
FIRST_CALLS, EVERY_CALL = 4, 16  # in which gradients are looked for that a lane set
NOTED_LINE: Final = re.compile(r'File "(.+)", line (\d+)')
# in messages of torch, of the CPU allocator and of GPU libraries, without exception classes
ONE_VALUE: Final = "Expected more than 1 value per channel when training"
NO_MEMORY: Final = re.compile(r"(can't allocate|not enough|out of) memory|_ALLOC_FAILED")
LOCKED: Final = (
    "the state of a sharded {} cannot be read or changed between its updates, because each worker"
    " has a slice of it. run.track saves and restores it, and state_dict() and load_state_dict()"
    " take it back to an earlier one. If the script needs anything else of an optimizer's state,"
    " use it without run.shard"
)
REPLACED: Final = (
    "after run.shard, the script replaced {} of a sharded {}, which would have no effect on the"
    " slices that it updates. Options such as lr may change, and the values of parameters in place."
    " If the script needs anything else of an optimizer, use it without run.shard"
)


BEHIND_LANES: Final = (
    "{} was called in a lane, where it has no effect, or one that depends on the number of workers:"
    " the gradient and the means of a batch are complete after its last lane. Move it behind the"
    " loop over lanes, or out of the loss function, behind run.backward. An inner loop in a lane,"
    " as in meta-learning, trains a copy: copy.deepcopy(model), or torch.func.functional_call"
)


# what the elements of a mean may be proportional to: samples, nothing, all pairs, pairs of others
SIZES: Final[Sequence[Callable[[float], float]]] = (
    lambda samples: samples,
    lambda samples: samples**0,
    lambda samples: samples**2,
    lambda samples: samples**2 - samples or 1,
)
# by kind of a divisor: what is a mean, over what, and what counts that
DIVIDED: Final = {
    "c": (
        "the cross-entropy of {first} is a mean over {0:.6g} for {1} samples, and that of {other}"
        " over {2:.6g} for {3}, the sums of their class weights, or their labels that are not"
        " ignored{advice} weight[batch[1]].sum(), or (batch[1] != ignore_index).sum()"
    ),
    "m": (
        "a part of the loss of {first} is a mean over {0:.6g} elements for {1} samples, and that"
        " of {other} over {2:.6g} for {3}, as with a mask or with padding{advice}"
        " int(batch[2].sum()) of a mask batch[2]"
    ),
    "q": (
        "a part of the loss of {first} is a sum divided by {0:.6g} for {1} samples, and that of"
        " {other} by {2:.6g} for {3}, as by the sum of a mask or of weights{advice}"
        " float(batch[2].sum()) of a mask batch[2]"
    ),
}


class ManualGradients:
    """Gradients of a run's parameters from a `backward()` of user code, outside of `run.backward`.

    Such a gradient is that of one worker's samples, so no optimizer may use it. Only the object
    whose `watch` was called last is active, because a script may leave a run without closing it.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by id, also of parameters no longer watched
        self._parameters: list[Tensor] = []  # watched
        self._manual: dict[int, Tensor] = {}  # parameters with such a gradient, by id
        # tensors of no module of the run that a lane differentiates itself; it may own them
        self._differentiated = WeakValueDictionary[int, Tensor]()
        self._in_lane = self._in_backward = self._are_own = False
        self._was_left = False
        self._has_no_graph = False  # the last lane
        self._calls, self._looks_for_set = 0, True  # for gradients that lanes set
        self._lane_called_backward = False  # the loss function did
        self._has_nested = False
        self._depth = 0  # of backward passes inside each other, in the one of `run.backward`

    def watch(self, module: Module) -> None:
        """Watch the module's parameters, including frozen ones, which may be trained later."""
        if not self._is_active():
            watch_backward(self.around_backward)
            watch_updates(self._refuse_update)
        self.watch_named(module, module.named_parameters())

    def watch_named(self, module: Module, named: Iterable[tuple[str, Tensor]]) -> None:
        """Watch parameters of a module, by name."""
        for name, parameter in named:
            has_gradients = parameter.is_floating_point() or parameter.is_complex()
            if id(parameter) not in self._names and has_gradients:
                self._names[id(parameter)] = f"{name!r} of {type(module).__name__}"
                self._parameters.append(parameter)

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, for messages."""
        return self._names.get(id(parameter), "a parameter")

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
            watch_backward(None)
            watch_updates(None)

    def _is_active(self) -> bool:
        return backward_watcher() == self.around_backward

    def around_backward(self, run: Pass, roots: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a pass; note which watched parameters it gives gradients, except `run.backward`'s."""
        if self._in_backward:  # of `run.backward`, or nested in it by a function of the graph
            self._depth += 1
            self._has_nested |= self._depth > 1
            try:
                return run()
            finally:
                self._depth -= 1
        self._lane_called_backward = self._in_lane
        if self._in_lane and self._are_own:
            for leaf in leaves_of(roots):
                if id(leaf) not in self._names:
                    self._differentiated[id(leaf)] = leaf
        parameters = self._parameters
        gradients = [parameter.grad for parameter in parameters]
        versions = versions_of(gradients)  # autograd adds to a gradient in place
        try:
            return run()
        finally:
            are_same = map(eq, versions, versions_of(gradients))
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

    @property
    def in_lane(self) -> bool:
        """Whether lanes are computed now."""
        return self._in_lane

    def note_without_graph(self) -> None:
        """Note that the loss of this lane has no gradient, so that no optimizer may step."""
        self._has_no_graph = True

    def has_nested(self) -> bool:
        """Return whether a function of this lane's graph has begun a backward pass of its own."""
        return self._has_nested

    def refuse_in_own_lane(self, call: str) -> None:
        """Raise `LossError` in a lane that other workers do not compute."""
        if self._in_lane and self._are_own:
            raise LossError(BEHIND_LANES.format(call))

    def _refuse_update(self, call: str, tensors_of: Callable[[], Iterable[Tensor] | None]) -> None:
        """Raise `LossError` in a lane, unless the tensors belong to a model that it made itself.

        It may clear gradients of its own backward pass, such as one to adversarial inputs.
        """
        if not self._in_lane or (self._lane_called_backward and call.endswith("zero_grad")):
            return
        if (tensors := tensors_of()) is not None:
            own = {id(parameter.grad) for parameter in self._parameters} | self._names.keys()
            if own.isdisjoint(map(id, tensors)):
                return
        raise LossError(BEHIND_LANES.format(call))

    @contextmanager
    def lanes(self, *, are_own: bool = False) -> Iterator[None]:
        """Compute lanes in this block, after a call of `forget_cleared`.

        Set `are_own` if each worker computes other ones. A `GeneratorExit` means that user code
        left a loop over `batch.lanes`.
        """
        self.check_complete()
        if self._in_lane:
            raise LossError(
                "a lane cannot begin another computation of a gradient: call run.backward, or write"
                " a loop over batch.lanes, after the one that computes this lane"
            )
        self._in_lane, self._are_own, self._lane_called_backward = True, are_own, False
        self._has_no_graph = False
        self._calls += 1
        self._looks_for_set = self._calls <= FIRST_CALLS or self._calls % EVERY_CALL == 0
        try:
            yield
        except GeneratorExit:
            self._was_left = True
            raise
        finally:
            self._in_lane = False

    def check_complete(self) -> None:
        """Raise `LossError` if user code left a loop over lanes before its end."""
        if self._was_left:
            raise LossError(
                "a loop over batch.lanes was left before its end, by break, return or an exception,"
                " so there is no gradient of its batch, and other workers wait for this one; give"
                " every lane its batch.backward(loss), and leave the loop over batches instead"
            )

    @contextmanager
    def backward(self, parameters: Parameters, lane: int) -> Iterator[None]:
        """Differentiate a lane's loss in this block.

        Raises `LossError` if the loss function itself made gradients of `parameters`.
        """
        self.refuse_gradients(parameters, lane)
        self._in_backward, self._has_nested = True, False
        try:
            yield
        finally:
            self._in_backward = False

    @property
    def may_have_set(self) -> bool:
        """Whether to look for gradients that user code in a lane has made.

        Those that it set without backward() are looked for in some calls, because that takes longer
        than most guards.
        """
        return self._lane_called_backward or self._looks_for_set

    def refuse_gradients(self, parameters: Parameters, lane: int) -> None:
        """Raise `LossError` if user code in a lane has made gradients of `parameters`."""
        if not self.may_have_set:
            return
        if have_none(parameters):  # `any` of a GPU tensor waits
            if self._lane_called_backward:
                self._lane_called_backward = False
                self.forget_cleared()
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.any():
                name = self.name_of(parameter)
                raise LossError(
                    f"the loss function must return the loss, but in lane {lane} it called"
                    f" backward() itself and left a gradient of {name}, or set it: return the sum"
                    " of the losses, or call run.backward once for each; in a loop over"
                    " batch.lanes, call batch.backward(loss) instead. For a gradient of something"
                    " else, such as the inputs, use torch.autograd.grad. One that you compute"
                    " yourself, of each sample or of an adapted copy, is that of the loss"
                    " sum((p * gradient.detach()).sum() for all parameters p)"
                )
        self._lane_called_backward = False
        self.forget_cleared()

    def check(self, optimizer: Optimizer, *, is_sharded: bool) -> None:
        """Raise `OptimizerError` if the optimizer must not make a step now."""
        self.check_complete()
        if not (self._manual or self._in_lane or self._differentiated or self._has_no_graph):
            return
        kind = type(optimizer).__name__
        parameters = parameters_of(optimizer)
        if self._in_lane:
            if is_sharded or any(id(parameter) in self._names for parameter in parameters):
                raise OptimizerError(
                    f"{kind}.step() was called while run.backward computes a lane, in the loss"
                    " function or in a hook of a gradient, where gradients are those of one lane;"
                    " call it after run.backward. The inner loop of a lane trains a copy of the"
                    " model: copy.deepcopy(model)"
                )
            return
        if self._has_no_graph and have_none(parameters):
            raise OptimizerError(
                f"{kind}.step() has no gradient, because the lanes before it ran under"
                " torch.no_grad(), for their means alone; compute them outside of it, or give the"
                " parameters a gradient that is the same on all workers"
            )
        self.forget_cleared()
        for parameter in parameters:
            if self._differentiated.get(id(parameter)) is parameter and parameter.grad is not None:
                raise OptimizerError(
                    f"{kind}.step() would use a gradient of a tensor of shape"
                    f" {list(parameter.shape)} from a backward() in a lane, so that each worker's"
                    " has the samples of its own lanes. Make it a parameter of a module that"
                    " run.replicate got, and name that module in run.backward or batch.lanes; or"
                    " compute its loss from the means of the batch, behind its lanes"
                )
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


class Contents:
    """What a sharded optimizer has during an update: its state, and parameters by group.

    Those of several workers are segments. Between two updates, it has complete parameters again,
    and a state that refuses to be used.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)  # complete
        self._shown = [group["params"] for group in optimizer.param_groups]
        self.updated: list[list[Any]] = self._shown
        self._sizes = [*map(len, self._shown)]
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._state: Any = optimizer.state
        self._locked: Any = LockedState(LOCKED.format(type(optimizer).__name__))
        self._is_open, self._hooks = True, list[int]()
        self.complete: Any = self
        optimizer.register_step_pre_hook(self.open)
        optimizer.register_step_post_hook(self.close)
        optimizer.state_dict = self.save  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load  # type: ignore[method-assign]

    @property
    def state(self) -> Any:
        """The state of what is updated, which loading it replaces."""
        return self.optimizer.state if self._is_open else self._state

    def divide(self, updated: list[list[Any]], complete: Any) -> None:
        """Let updates have these segments, by group, of complete parameters that have moved.

        `complete` has the methods of a tracked object, for the complete state.
        """
        self.updated, self.complete = updated, complete
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._put(updated)

    def _put(self, parameters_by_group: list[list[Any]]) -> None:
        groups = zip(self.optimizer.param_groups, parameters_by_group, strict=True)
        for group, parameters in groups:
            group["params"] = parameters

    def nest_hooks(self) -> None:
        """Let all other hooks of a step run before it opens and after it closes."""
        if step_hook_numbers(self.optimizer) != self._hooks:  # some were added or removed
            nest_step_hooks(self.optimizer, is_own_hook)
            self._hooks = step_hook_numbers(self.optimizer)

    def open(self, *_: object) -> None:
        """Let the optimizer have what it updates, unless user code has replaced it."""
        if self._is_open:  # an update has failed
            return
        self.check()
        self.optimizer.state, self._is_open = self._state, True
        self._put(self.updated)

    def close(self, *_: object) -> None:
        """Let the optimizer have what user code may see."""
        if self._is_open:
            self._state, self._is_open = self.optimizer.state, False
            self.optimizer.state = self._locked
            self._put(self._shown)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the optimizer have what it updates in this block."""
        was_open = self._is_open
        self.open()
        try:
            yield
        finally:
            if not was_open:
                self.close()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let the optimizer have what user code may see in this block, as in a closure."""
        was_open = self._is_open
        self.close()
        try:
            yield
        finally:
            if was_open:
                self.open()

    def check(self) -> None:
        """Raise `OptimizerError` if user code replaced the state, or parameters of a group."""
        kind, groups = type(self.optimizer).__name__, self.optimizer.param_groups
        if self.optimizer.state is not self._locked:
            raise OptimizerError(REPLACED.format("the state", kind))
        sizes = [len(group["params"]) for group in groups]
        parameters = parameters_of(self.optimizer)
        # as many, if the sizes are the same
        if sizes != self._sizes or not all(map(is_, parameters, self.parameters)):
            raise OptimizerError(REPLACED.format("parameters in param_groups", kind))

    def check_addresses(self) -> None:
        """Raise `OptimizerError` if user code gave a parameter other memory."""
        if [parameter.data_ptr() for parameter in self.parameters] != self._addresses:
            raise OptimizerError(
                f"a parameter of a sharded {type(self.optimizer).__name__} was moved or converted"
                " after run.shard, so the optimizer would no longer update it; call model.to(...)"
                " before run.shard, and change values in place"
            )

    def save(self) -> dict[str, Any]:
        """Return what `Optimizer.state_dict` does, with a state that can be copied and loaded."""
        numbers, state = count(), self.state
        groups = [
            {**group, "params": [next(numbers) for _ in parameters]}
            for group, parameters in zip(self.optimizer.param_groups, self._shown, strict=True)
        ]
        saved = [
            SavedValues(start := parameter.data_ptr(), start + parameter.nbytes, state[parameter])
            for parameters in self.updated
            for parameter in parameters
            if parameter in state
        ]
        refusal = LOCKED.format(type(self.optimizer).__name__)
        return {"state": SavedState(refusal, saved), "param_groups": groups}

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `save` returned, or the complete state of an optimizer that is not sharded."""
        saved = state_dict["state"]
        if not isinstance(saved, SavedState):
            self.complete.load_state_dict(state_dict)
            return
        groups, values = [], dict[int, Mapping[str, Any]]()
        for group, parameters in zip(state_dict["param_groups"], self.updated, strict=True):
            numbers = range(len(values), len(values) + len(parameters))
            values.update(zip(numbers, map(saved.of, parameters), strict=True))
            groups.append({**group, "params": [*numbers]})
        state = {number: of_one for number, of_one in values.items() if of_one}
        with self.opened():
            load_optimizer(self.optimizer, {"state": state, "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the optimizer of a single worker."""
        with self.opened():
            return type(self.optimizer).state_dict(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the complete state of the optimizer of a single worker."""
        with self.opened():
            load_optimizer(self.optimizer, state)


class GradientSeal:
    """Keeps user code from changing the gradients of a sharded optimizer, or its parameter groups.

    With several workers, `.grad` of a parameter is not the gradient that the optimizer uses. So
    changes are refused with one worker as well, and each step clears the gradients.
    """

    def __init__(self, optimizer: Optimizer, settle: Callable[[], object]) -> None:
        """`settle` waits for gradients that still arrive, and drops cleared ones."""
        self.optimizer, self._settle = optimizer, settle
        self._parameters = parameters_of(optimizer)
        self._ids = set(map(id, self._parameters))
        self.contents: Contents  # once it is sharded
        self.seal()
        optimizer.register_step_pre_hook(self.check)
        optimizer.add_param_group = self._refuse_group  # type: ignore[method-assign,assignment]

    def close(self, contents: Contents) -> None:
        """Hide what the optimizer updates, from now on and after each update."""
        self.contents = contents
        contents.close()
        self.optimizer.register_step_post_hook(self._clear)

    def seal(self) -> None:
        """Accept the current gradients."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._versions = versions_of(self._gradients)

    def covers(self, parameters: Parameters) -> bool:
        """Return whether any of the parameters was in the optimizer when it was sharded."""
        return any(id(parameter) in self._ids for parameter in parameters)

    def check(self, *_: object) -> None:
        """Raise `OptimizerError` if a gradient was changed, other than by clearing it."""
        gradients = [parameter.grad for parameter in self._parameters]
        versions = versions_of(gradients)
        if versions == self._versions and all(map(is_, gradients, self._gradients)):
            return
        sealed = dict(zip(map(id, self._gradients), self._versions, strict=True))
        for parameter, gradient, version in zip(self._parameters, gradients, versions, strict=True):
            if gradient is None or isinstance(gradient, SlicedGradient):
                continue
            if sealed.get(id(gradient)) != version:
                refuse_unless_zero(gradient)
                parameter.grad = None

    def open(self) -> None:
        """Check gradients, and settle them, so that they can be read."""
        self.check()
        self._settle()
        self.seal()

    def _clear(self, *_: object) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self.seal()

    def _refuse_group(self, *_: object) -> None:
        kind = type(self.optimizer).__name__
        raise OptimizerError(
            f"add_param_group was called on a sharded {kind}, which cannot get more parameters:"
            f" create the {kind} with all groups before run.shard, and freeze those that train"
            " later with requires_grad_(False)"
        )


class OptimizerGuard:
    """Refuses steps of optimizers that would not use exactly the gradients of `run.backward`."""

    def __init__(self, manual: ManualGradients) -> None:
        self.seals: list[GradientSeal] = []  # of sharded optimizers
        self.checks: list[Callable[[Optimizer], object]] = []  # of plugins, before each step
        self._manual = manual
        self._tracked: list[tuple[Optimizer, Sequence[Tensor]]] = []

    def track(self, optimizer: Optimizer) -> None:
        """Accept an optimizer of its parameters, and no others that are not tracked."""
        self._tracked.append((optimizer, parameters_of(optimizer)))

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raise `OptimizerError` if the optimizer must not make a step now.

        A gradient of it is not from `run.backward`, or another one is tracked in its place. A
        closure, which makes the gradients only now, is returned with the same check after it.
        """
        if self._tracked and all(tracked is not optimizer for tracked, _ in self._tracked):
            self._refuse_untracked(optimizer)
        seals = [seal for seal in self.seals if seal.optimizer is optimizer]
        for seal in seals:
            seal.contents.nest_hooks()
        self._manual.check(optimizer, is_sharded=bool(seals))
        for check in self.checks:
            check(optimizer)
        closure, *others = args[1:] or (kwargs.get("closure"),)
        if not callable(closure):
            return None

        def checked() -> object:
            with ExitStack() as stack:
                for seal in seals:
                    stack.enter_context(seal.contents.closed())
                result = closure()
            self._manual.check(optimizer, is_sharded=bool(seals))
            for seal in seals:
                seal.open()
            return result

        if len(args) > 1:
            return (args[0], checked, *others), kwargs
        return args, {**kwargs, "closure": checked}

    def _refuse_untracked(self, optimizer: Optimizer) -> None:
        ids = set(map(id, parameters_of(optimizer)))
        for tracked, parameters in self._tracked:
            if not ids.isdisjoint(map(id, parameters)):
                raise OptimizerError(
                    f"this {type(optimizer).__name__} is not tracked, but updates parameters of the"
                    f" {type(tracked).__name__} that is, so snapshots would hold the state of the"
                    " wrong optimizer; create the optimizer before run.track, or track both"
                )

    def check_addresses(self) -> None:
        """Raise `OptimizerError` if a parameter of a sharded optimizer has other memory now."""
        for seal in self.seals:
            seal.contents.check_addresses()

    def open_seals(self) -> None:
        """Let all gradients of sharded optimizers be read, unless user code changed one."""
        for seal in self.seals:
            seal.open()

    def seal(self, parameters: Parameters) -> None:
        """Accept the current gradients of sharded optimizers with any of the parameters."""
        for seal in self.seals:
            if seal.covers(parameters):
                seal.seal()


class ModelGuard:
    """Refuses models that are no longer as `run.replicate` left them.

    `check_storage` raises an error if user code moved parameters of a sharded optimizer.
    """

    def __init__(self, check_storage: Callable[[], None]) -> None:
        self._check_storage = check_storage
        # parameters by id, with their dtypes and devices when they were replicated
        self._replicated: dict[int, tuple[Parameter, torch.dtype, torch.device]] = {}
        self.modules: list[Module] = []  # replicated
        # their parameters and addresses at the last check, which change with dtypes and devices
        self._checked: WeakKeyDictionary[Module, tuple[Parameters, list[int]]] = WeakKeyDictionary()
        self._parameters: WeakKeyDictionary[Module, ModuleParameters] = WeakKeyDictionary()
        # of sharded ones, by their ids: the parameters that compute, and those of the optimizer
        self._whole: dict[int, Parameter] = {}
        self.segments: dict[int, Parameter] = {}
        self._free: Callable[[], None] = lambda: None

    def add(self, module: Module) -> None:
        """Accept a module's parameters as they are now."""
        for parameter in module.parameters():
            entry = (parameter, parameter.dtype, parameter.device)
            self._replicated.setdefault(id(parameter), entry)
        self.modules.append(module)

    def divide(self, whole: Mapping[int, Parameter], segments: Mapping[int, Parameter]) -> None:
        """Note what computes, and what is updated, for sharded parameters, by their ids."""
        self._whole.update(whole)
        self.segments.update(segments)

    def free_with(self, free: Callable[[], None]) -> None:
        """Call `free` before looking at modules, for what sharded models have gathered."""
        self._free = free

    def places(self) -> dict[int, int]:
        """Return the places of parameters, by id, in the order of replicated modules."""
        return {number: place for place, number in enumerate(self._replicated)}

    def check_all(self) -> None:
        """Raise `ModelError` if user code changed a module, other than by moving it."""
        self._free()
        for module in self.modules:
            self._check(module, self._trainable(module), may_move=True)

    def trainable(self, module: Module) -> Parameters:
        """Return the parameters that require a gradient. Raises `ModelError` if there is none."""
        self._free()
        parameters = self._trainable(module)
        if not parameters:
            raise ModelError(
                f"{type(module).__name__} has no parameter that requires a gradient; call"
                " requires_grad_() or change update="
            )
        self._check(module, parameters)
        if self._whole:
            return [self._whole.get(id(parameter), parameter) for parameter in parameters]
        return parameters

    def _trainable(self, module: Module) -> Parameters:
        return self._parameters.setdefault(module, ModuleParameters()).trainable(module)

    def _check(self, module: Module, parameters: Parameters, *, may_move: bool = False) -> None:
        checked, addresses = self._checked.get(module, (None, None))
        current = [parameter.data_ptr() for parameter in parameters]
        if checked is parameters and addresses == current:
            return
        check_unwrapped(module)  # it may wrap a replicated one
        for parameter in parameters:
            if issue := self._issue(module, parameter, may_move=may_move):
                raise ModelError(f"{type(module).__name__} {issue}")
        self._check_storage()
        if not may_move:
            self._checked[module] = parameters, current

    def _issue(self, module: Module, parameter: Parameter, *, may_move: bool) -> str | None:
        """Return what is wrong with a parameter."""
        entry = self._replicated.get(id(parameter))
        if entry is not None:
            _, dtype, device = entry
            if parameter.dtype == dtype and (may_move or parameter.device == device):
                return None
        elif all(module is not replicated for replicated in self.modules):
            return "has parameters that are not replicated; pass it to run.replicate first"
        named = module.named_parameters()
        name = next((repr(name) for name, other in named if other is parameter), "a parameter")
        if entry is None:
            return (
                f"got the parameter {name} after run.replicate, so its values may differ between"
                " workers, and the optimizer may not include it; change the model before"
                " run.replicate, or replicate it again and create the optimizer after that"
            )
        return (
            f"was changed after run.replicate: {name} had {dtype} on {device}, got"
            f" {parameter.dtype} on {parameter.device}; convert a model before run.replicate, which"
            " also moves it to the worker's devices, or convert a copy of it"
        )


def refuse_unless_zero(gradient: Tensor | None) -> None:
    """Raise `OptimizerError` for a gradient that user code gave to a sharded optimizer."""
    if gradient is not None and gradient.any():
        raise OptimizerError(
            "a gradient of a sharded optimizer was set or changed outside of run.backward, which"
            " has no effect because the gradient is stored in slices, one per worker."
            f" {SHARDED_ADVICE}"
        )


def refuse_reentrant(inputs: Sequence[Any]) -> None:
    """Raise `LossError` if a reentrant checkpoint of these inputs would be part of the loss.

    The backward pass names the parameters that get gradients. Such checkpoints do not see those
    names, so they would raise an error or leave out gradients without one.
    """
    needs_gradient = any(isinstance(part, Tensor) and part.requires_grad for part in inputs)
    if torch.is_grad_enabled() and needs_gradient:
        raise LossError(
            "run.backward does not support torch.utils.checkpoint with use_reentrant=True,"
            " because gradients can get lost; pass use_reentrant=False, in transformers"
            " gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def refuse_collective(name: str) -> NoReturn:
    """Raise `LossError`: code of a lane communicates with other workers."""
    raise LossError(
        f"{name} was called in a lane, by the loss function or the model: each worker runs its"
        " lanes one after another, so it would combine only some of them, or wait for workers that"
        " have fewer. Return the lane's mean, because run.backward averages the loss, its gradient"
        " and the dict of scalars over all lanes. A loss that compares samples of all lanes gets"
        " them with embed=, and a rule of run.replicate makes one value of a buffer (BatchNorm"
        " instead of SyncBatchNorm). Call it in the body of the loop for anything else"
    )


def explanation_of(
    error: Exception,
    lane: int,
    lanes: int,
    samples: int | None,
    device: str,
    step: int,
    again: Callable[[], object],
) -> Exception | None:
    """Return an error that says what caused that of a lane, None if only its user knows.

    The lane is too large for the memory of its device, or too small for BatchNorm. Or a line, which
    is named, calls an operation that is not deterministic: `again` computes the lane once more.
    """
    if (refused := REFUSED_BY_TORCH.match(str(error))) is not None:
        return _not_deterministic(refused[1], _line_of(error, again))
    name = f"lane {lane} of {lanes}"
    if samples is not None:
        name += f", with {samples} sample{'s' * (samples != 1)},"
    if is_out_of_memory(error):
        return _lane_too_large(name, samples, lanes, f"{device} at step {step}")
    if ONE_VALUE in str(error):
        return DataError(
            f"BatchNorm needs more than one value per channel, but {name} has only one at step"
            f" {step}; use drop_last=True if the batch is the last of an epoch, fewer lanes or a"
            " larger batch size, so that every lane has two samples"
        )
    return None


def _not_deterministic(operation: str, line: str) -> LossError:
    advice = next(
        (f"; use {text} instead" for part, text in REFUSED.items() if part in operation), ""
    )
    return LossError(
        f"{operation} has no deterministic kernel on GPUs, so its results differ from run to run"
        f"{line}{advice}. deterministic=False allows it, and gives up that results have the same"
        " bits"
    )


def _line_of(error: Exception, again: Callable[[], object]) -> str:
    """Return the user's line that called the operation of an error, also of its backward pass."""
    frames = [*filter(is_callers, traceback.extract_tb(error.__traceback__))]
    lines = [(frame.filename, frame.lineno) for frame in frames]
    if not lines:  # in backward: torch notes the lines of forward if it looks for anomalies
        with warnings.catch_warnings(record=True) as caught, suppress(Exception):
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly(check_nan=False):
                again()
        notes = [str(warning.message) for warning in caught]
        found = [match for note in notes for match in NOTED_LINE.findall(note)]
        frames = [traceback.FrameSummary(file, int(number), "") for file, number in found]
        lines = [(frame.filename, frame.lineno) for frame in filter(is_callers, frames)]
    if not lines:
        return ""
    file, number = lines[-1]
    return f"; {file}:{number} calls it: {linecache.getline(file, number or 0).strip()}"


def refuse_added_twice(gradients: Iterable[Tensor | None], lane: int) -> None:
    """Raise `LossError` if a parameter got a gradient after that in an exchange was complete."""
    if any(gradient is not None for gradient in gradients):
        raise LossError(
            f"in lane {lane}, a torch.autograd.Function called backward() itself and added to a"
            " gradient that was complete: a parameter that it uses is also used outside of it."
            " Let the function use torch.autograd.grad and return the gradient"
        )


def refuse_accumulated(parameters: Parameters) -> None:
    """Raise `LossError` if a pass that was captured depends on `.grad`, to which it adds nothing.

    A hook of user code that runs after such an addition would not run, and what a function adds to
    `.grad` in its own backward pass would be missing.
    """
    if not have_none(parameters):
        raise LossError(
            "a torch.autograd.Function calls backward() itself and adds to `.grad`; let it use"
            " torch.autograd.grad and return the gradient"
        )
    hooks = (hook for parameter in parameters for hook in post_accumulate_hooks(parameter))
    # those of exchanges do nothing while graphs compute gradients
    if not all(map(is_own_hook, hooks)):
        raise LossError(
            "a parameter has a hook of register_post_accumulate_grad_hook, which a graph would not"
            " call; use register_hook"
        )


def check_same_call(calls: Sequence[int]) -> None:
    """Raise `WorldError` if workers, by rank, exchange the losses of different calls."""
    if len(set(calls)) > 1:
        raise WorldError(
            f"worker {calls.index(max(calls))} went on after an exception in run.backward, which"
            " other workers still wait for; do not catch exceptions of run.backward that only some"
            " workers may raise"
        )


def check_divisors(
    entries: Iterable[tuple[int, float, str, Sequence[float]]],
    part: str = "lane",
    call: str = "run.backward",
    error: type[SamestepError] = LossError,
) -> None:
    """Raise an error if means of lanes, or of blocks, weighted by samples, are not over samples.

    `entries` are (lane, samples, kinds, divisors) as in `torch_internals.Divisor`. A sequence of
    fixed length has as many labels in each sample, so the mean over all labels is the same. That
    over class weights, or labels that are not ignored, is another one. A mean may also be the same
    for any samples, as of parameters, or over pairs of samples.
    """
    firsts: dict[str, tuple[int, float, Sequence[float]]] = {}  # by the kinds of a loss's parts
    for lane, samples, kinds, divisors in entries:
        first, first_samples, first_divisors = firsts.setdefault(kinds, (lane, samples, divisors))
        for kind, divisor, first_divisor in zip(kinds, divisors, first_divisors, strict=True):
            if kind == "s" and not math.isclose(divisor, samples, rel_tol=1e-5):
                raise error(
                    f"the loss of {part} {lane} is a sum over its {samples} samples, with a loss"
                    f" function's reduction='sum', but the mean of all {part}s is taken. Divide it"
                    f" by the {part}'s samples, as in / len(images), or pass reduction='sum' and"
                    f" count= to {call}, which divide the sum of all {part}s"
                )
            if kind == "s" or divisor * first_samples == first_divisor * samples:
                continue
            is_known = not math.isfinite(divisor * first_divisor) or any(
                math.isclose(
                    divisor * size(first_samples), first_divisor * size(samples), rel_tol=1e-5
                )
                for size in (SIZES[:1] if kind == "c" else SIZES)
            )
            if is_known:
                continue
            message = DIVIDED[kind].format(
                *(first_divisor, first_samples, divisor, samples),
                first=f"{part} {first}",
                other=f"{part} {lane}",
                advice=f"; weighted by samples, {part}s do not give the mean of all. Pass count= to"
                f" {call}, such as count=lambda batch:",
            )
            raise error(
                f"{message}; for a mean over samples of each {part}'s mean, pass their number"
            )


def nonfinite_loss(
    losses: Iterable[tuple[int, int, float]], step: int, *, is_shared: bool
) -> str | None:
    """Return which (lane, rank, loss) is infinite or NaN, None if all losses are finite.

    A loss that `is_shared` is that of all lanes, so none is blamed.
    """
    for lane, rank, loss in losses:
        if not math.isfinite(loss):
            place = "of the whole batch" if is_shared else f"in lane {lane} (worker {rank})"
            return f"the loss is {loss} at step {step} {place}"
    return None


def nonfinite_error(issue: str, results: Sequence[Any]) -> NonFiniteLossError:
    """Return the error about a loss that is not finite, with the results of all lanes."""
    advice = "lower the learning rate, clip gradients, or set nonfinite_loss='skip'"
    return NonFiniteLossError(f"{issue}; {advice}", tuple(results))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the memory of the host or of a device was exhausted."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or NO_MEMORY.search(str(error)) is not None


def _lane_too_large(lane: str, samples: int | None, lanes: int, where: str) -> OutOfMemoryError:
    advice = "more lanes would not make it smaller: use"
    if samples != 1:
        advice = (
            f"lanes={2 * lanes} would halve it. The number of lanes affects the result, like the"
            " batch size, and a snapshot's number of lanes cannot change: start a new run with"
            " resume='never'. Or use"
        )
    return OutOfMemoryError(
        f"{lane} does not fit in the memory of {where}; {advice}"
        " precision='bfloat16', activation checkpointing or a smaller model"
    )
