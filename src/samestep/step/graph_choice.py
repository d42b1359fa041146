"""The choice between a CUDA graph and an eager lane.

The first lanes of a loss are eager and watched, a graph is used only while what its loss reaches is
the same (`reached_values.py`), and every so often a lane is computed both ways. Whatever does not
fit is computed eagerly, and a line says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from samestep.config import Config
from samestep.data.generators import is_observed
from samestep.errors import ConfigError, LossError
from samestep.step.gradients import Gradients
from samestep.step.guards import is_out_of_memory
from samestep.step.lane_graph import (
    COMPARE_EVERY,
    LaneGraph,
    LaneValues,
    LaneWork,
    Unsuitable,
    differs,
    in_order,
    specs_of,
)
from samestep.step.reached_values import GeneratorStates, ReachedValues
from samestep.torch_internals import (
    before_device_waits,
    has_compiled_graphs,
    recover_from_capture,
)
from samestep.user_code import SAMESTEP

MOST_GRAPHS: Final = 4  # of a device
EAGER_CALLS: Final = 2  # of a loss with equal lanes after its first one, before a capture
PROBATION: Final = 2  # calls after the capture in which graphs are only compared
MOST_CHANGES: Final = 8  # of what a loss reaches, or of losses, without a graph in between
MOST_KEYS: Final = 32  # of lanes that are counted
SYNCHRONIZING: Final = "called a synchronizing CUDA operation"  # in warnings of torch
PROTOTYPE: Final = "Synchronization debug mode is a prototype"
EXCHANGES: Final = f"{SAMESTEP}comm"  # files of code
USE_A_TENSOR: Final = (
    "Pass a value that changes as a tensor on the device, and change it in place: weight ="
    " torch.zeros((), device=run.device) before the loop, and weight.fill_(x) in its body."
    ' graphs="off" computes every lane eagerly'
)
# why lanes are eager; docs/gpu.md explains each
NOTES: Final = {  # also with graphs="on"
    "embed": "a loss with embed= has two passes, with all workers between them",
    "body": "the body of a loop over batch.lanes cannot be captured; pass the loss to"
    " run.backward(loss_fn, model, batch)",
    "batches": "batches of lanes keep having other shapes, or other numbers and texts; use tensors"
    " of few shapes",
    "graphs": "the device has {most} graphs already, of other shapes or losses",
    "memory": "the memory of the device is too small for graphs and {what}; use more lanes",
}
REFUSALS: Final = {  # an error with graphs="on"
    "function": "the loss function, or its model, is a new object in every call; define it once"
    " before the loop",
    "value": "the loss function or the model reads what keeps changing: {what}. " + USE_A_TENSOR,
    "object": "a lane changes {what}, which a graph would not repeat; return scalars in the dict of"
    " the loss function, and keep counts in a buffer",
    "generator": "a lane draws from {what}; draw from torch's default generator on the device,"
    " which is seeded for each lane",
    "wait": "a lane waits for the device at {what}, as item(), bool() and nonzero() do; keep values"
    " in tensors",
    "metric": "the metric {what!r} is not a tensor on the device; log it with run.log",
    "batch": "a batch contains {what}; expected tensors on the device, numbers and texts, in dicts,"
    " lists and tuples",
    "capture": "the capture failed: {what}",
    "compiled": "torch.compile makes CUDA graphs of its own; compile the model in another mode than"
    ' "reduce-overhead" and "max-autotune"',
    "bits": "at step {step}, lane {lane} has other bits as a CUDA graph than eagerly, first in"
    " {what}. The graph repeats the numbers, branches and tensors that the loss function and the"
    " model had when it was captured. " + USE_A_TENSOR,
}


@dataclass
class _Loss:
    """A loss function with its model: what was seen of them, and their graphs."""

    owners: list[Callable[[], Any]]  # of the function and the model: those of the ids in its key
    calls: int = 0
    changes: int = 0  # of `values` since a graph was used
    is_refused: bool = False
    values: dict[torch.device, ReachedValues] = field(default_factory=dict)
    generators: GeneratorStates | None = None
    states: dict[Any, int] = field(default_factory=dict)  # a number for what values were
    # the last call that read them, and the number of that state
    state: dict[torch.device, tuple[int, int]] = field(default_factory=dict)
    seen: dict[Any, tuple[int, int]] = field(default_factory=dict)  # calls with a key, the last
    graphs: dict[Any, LaneGraph] = field(default_factory=dict)  # by key


@dataclass(frozen=True)
class _Comparison:
    """Whether a lane had the same bits both ways: 0 for each of the `names`, on the host later."""

    loss: _Loss
    lane: int
    names: list[str]
    flags: Tensor  # bool [names]
    is_first: bool  # no result of the graph has been used


class LaneGraphs:
    """The graphs of a worker's lanes, and the choice between a graph and an eager lane.

    With `is_required`, a loss whose lanes cannot be graphs is an error. `say` prints a line.
    """

    def __init__(self, *, is_required: bool, say: Callable[[str], object]) -> None:
        self._is_required, self._say = is_required, say
        # `samestep verify` uses the results of graphs from the first capture on
        self._probation = 0 if is_observed() else PROBATION
        self._losses: dict[tuple[int, ...], _Loss] = {}
        self._loss: _Loss | None = None  # of the current call
        self.roots: dict[str, Any] = {}
        self._calls = self._step = 0
        self._is_off = False
        self._new: dict[Any, int] = {}  # objects of the same code
        self._said: set[str] = set()
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._comparisons: list[_Comparison] = []

    @classmethod
    def of(
        cls, config: Config, device: torch.device, say: Callable[[str], object]
    ) -> LaneGraphs | None:
        """Return the graphs that the option `graphs` asks for, None without them.

        Raises `ConfigError` if they are required but there are no GPUs.
        """
        is_required, on_cuda = config.graphs == "on", device.type == "cuda"
        if is_required and not on_cuda:
            raise ConfigError(
                'graphs="on" requires GPUs, but the devices are CPUs; use graphs="auto"'
            )
        if config.graphs == "off" or not on_cuda:
            return None
        if not config.deterministic:
            say('graphs="auto" has no effect with deterministic=False, which lanes need to compare')
            return None
        return cls(is_required=is_required, say=say)

    def close(self) -> None:
        """Free all graphs, and use no more."""
        self._is_off, self._loss = True, None
        self._losses.clear()
        self._comparisons.clear()
        self._pools.clear()

    def begin(self, fn: Any, model: Any, step: int, *, embeds: bool) -> None:
        """Begin a call of `run.backward` with a loss, or of a loop without `fn`."""
        self._calls, self._step, self._loss = self._calls + 1, step, None
        self._comparisons.clear()
        if self._is_off:
            return
        if embeds:
            self.note("embed")
        elif fn is None:
            self.note("body")
        else:
            self.roots = {"loss_fn": fn, "model": model}
            self._loss = self._find(fn, model)

    @contextmanager
    def lane(self, work: LaneWork) -> Iterator[GraphedLane | None]:
        """Compute a lane in the block, which calls `forward` first; None if it is just eager."""
        if self._loss is None:
            yield None
            return
        graphed = GraphedLane(self, self._loss, work)
        try:
            yield graphed
        finally:
            graphed.close()

    def end(self, copy: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Begin to copy the results of comparisons to the host."""
        copies = copy([comparison.flags for comparison in self._comparisons])
        self._comparisons = [
            _Comparison(each.loss, each.lane, each.names, flags, each.is_first)
            for each, flags in zip(self._comparisons, copies, strict=True)
        ]

    def judge(self) -> None:
        """Read the results, whose copies are complete. Raises `LossError` if bits differed."""
        comparisons, self._comparisons = self._comparisons, []
        for comparison in comparisons:
            differing = [
                name
                for name, differs in zip(comparison.names, comparison.flags.tolist(), strict=True)
                if differs
            ]
            if not differing:
                continue
            others = f" and {len(differing) - 1} more" if differing[1:] else ""
            details = {
                "step": self._step, "lane": comparison.lane, "what": f"{differing[0]}{others}"
            }  # fmt: skip
            if not comparison.is_first:  # results of the graph may have been wrong since the last
                raise LossError(REFUSALS["bits"].format(**details))
            self.refuse(comparison.loss, "bits", **details)

    def refuse(self, loss: _Loss, reason: str, **details: Any) -> None:
        """Compute the lanes of a loss eagerly from now on, and say why, as in `REFUSALS`.

        Raises `LossError` instead if graphs are required.
        """
        text = REFUSALS[reason].format(**details)
        if self._is_required:
            raise LossError(
                f'graphs="on", but lanes cannot be computed as CUDA graphs: {text}. With'
                ' graphs="auto", they are computed eagerly'
            )
        loss.is_refused = True
        loss.graphs.clear()
        loss.values.clear()
        self._say_once(text)

    def note(self, reason: str, **details: Any) -> None:
        """Say why some lanes are eager, as in `NOTES`."""
        self._say_once(NOTES[reason].format(**details))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(f"lanes are computed eagerly, not as CUDA graphs: {text}")

    def give_way(self) -> bool:
        """Free the memory of all graphs for eager lanes, for good; return whether there was one."""
        had_graphs = any(loss.graphs for loss in self._losses.values())
        if had_graphs:
            self._free("an eager lane")
        return had_graphs

    def _free(self, what: str) -> None:
        self.close()
        torch.cuda.empty_cache()
        self.note("memory", what=what)

    def _find(self, fn: Any, model: Any) -> _Loss | None:
        """Return what is known of a loss, None if its lanes are just eager."""
        parts = [fn.__self__, fn.__func__] if isinstance(fn, MethodType) else [fn]
        owners = [*parts, model]
        key = tuple(map(id, owners))
        loss = self._losses.get(key)
        if loss is None or any(
            owner() is not own for owner, own in zip(loss.owners, owners, strict=True)
        ):
            code = _code_of(parts[-1])
            self._new[code] = self._new.get(code, 0) + 1
            self._losses.pop(key, None)
            if len(self._losses) == MOST_KEYS:
                self._losses.pop(next(iter(self._losses)))  # the oldest
            loss = self._losses[key] = _Loss([_weak(owner) for owner in owners])
            if self._new[code] >= MOST_CHANGES:
                self.refuse(loss, "function")
        loss.calls += 1
        return None if loss.is_refused else loss

    def state_of(self, loss: _Loss, work: LaneWork) -> int:
        """Return a number for what a loss reaches now; read once for each call and device."""
        device = work.device
        call, number = loss.state.get(device, (0, 0))
        if call == self._calls:
            return number
        values = loss.values.get(device)
        if values is None:  # in the second call: the first one may have created what it reaches
            values = loss.values[device] = ReachedValues(**self.roots)
        else:
            before = values.marks
            if not values.is_same():
                self._note_change(loss, values.difference(before))
                # objects may have been replaced by others, with values of their own
                values = loss.values[device] = ReachedValues(**self.roots)
        tensors = [*work.parameters, *(buffer for _, buffer in work.buffers())]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if len(loss.states) == MOST_KEYS:
            for by_state in (loss.states, loss.seen, loss.graphs):
                by_state.clear()
        number = loss.states.setdefault((values.marks, *addresses), len(loss.states))
        loss.state[device] = self._calls, number
        return number

    def _note_change(self, loss: _Loss, what: str | None) -> None:
        loss.changes += 1
        if loss.changes >= MOST_CHANGES:
            self.refuse(loss, "value", what=what)

    def is_seen(self, loss: _Loss, key: Any) -> bool:
        """Count a call with lanes of this key; return whether there were enough to capture one."""
        calls, last = loss.seen.get(key, (0, 0))
        if last != self._calls:
            if len(loss.seen) == MOST_KEYS:
                loss.seen.clear()
                if not loss.graphs:
                    self.note("batches")
            loss.seen[key] = calls + 1, self._calls
            return calls >= EAGER_CALLS
        return calls > EAGER_CALLS

    def use(self, loss: _Loss, graph: LaneGraph) -> tuple[bool, bool]:
        """Count a lane of a graph; return whether to compare it, and whether to use its result."""
        compares, is_first = graph.take_turn(self._calls, self._probation)
        if not is_first:
            loss.changes = 0  # nothing changed for long enough
        return compares, not (compares or is_first)

    def capture(self, loss: _Loss, key: Any, work: LaneWork) -> LaneGraph | None:
        """Return a new graph of a lane, None if that fails."""
        if has_compiled_graphs([work.device]):  # neither can be captured in the other
            self.refuse(loss, "compiled")
            return None
        graphs = [
            (other, other_key)
            for other in self._losses.values()
            for other_key in other.graphs
            if other_key[0] == work.device
        ]
        if len(graphs) >= MOST_GRAPHS:
            oldest, old_key = min(graphs, key=lambda pair: pair[0].graphs[pair[1]].used_at)
            if self._calls - oldest.graphs[old_key].used_at < COMPARE_EVERY:
                self.note("graphs", most=MOST_GRAPHS)
                return None
            del oldest.graphs[old_key]
        pool = self._pools.get(work.device)
        if pool is None:
            pool = self._pools[work.device] = torch.cuda.graph_pool_handle()
            self._streams[work.device] = torch.cuda.Stream(work.device)
        try:
            graph = LaneGraph(work)
            graph.capture(work, pool, self._streams[work.device])
        except Exception as error:  # noqa: BLE001  of the function, torch or CUDA: then eager
            recover_from_capture(work.device, pool)
            work.restart()
            if is_out_of_memory(error):
                self._free("the capture of another one")
                return None
            text = str(error).strip().partition("\n")[0]
            self.close()  # the device may not be able to try again
            self.refuse(loss, "capture", what=f"{type(error).__name__}: {text}")
            return None
        work.restart()  # seeds, which the capture may have moved
        loss.graphs[key] = graph
        return graph

    def compare(
        self,
        loss: _Loss,
        graph: LaneGraph,
        work: LaneWork,
        expected: Mapping[str, Tensor | None],
        eager: Mapping[str, Tensor | None],
    ) -> None:
        """Compare what a graph computed for a lane with the eager lane, on the device."""
        flags = []
        names = list(dict.fromkeys([*expected, *eager]))
        for name in names:
            left, right = expected.get(name), eager.get(name)
            if left is None or right is None:
                flags.append(torch.full((), left is not right, device=work.device))
            else:
                flags.append(differs(left, right))
        is_first = graph.calls <= self._probation
        self._comparisons.append(_Comparison(loss, work.lane, names, torch.stack(flags), is_first))


class GraphedLane:
    """A lane that may be computed by a graph, eagerly under observation, or both ways."""

    def __init__(self, graphs: LaneGraphs, loss: _Loss, work: LaneWork) -> None:
        self._graphs, self._loss, self._work = graphs, loss, work
        self._graph: LaneGraph
        self.is_compared = False  # the eager lane with the graph
        self._expected: dict[str, Tensor | None] = {}
        self._before: tuple[Any, ReachedValues, GeneratorStates] | None = None
        self._waits = _Waits()

    def forward(self) -> LaneValues | None:
        """Compute the forward pass with a graph, None if the lane is to be computed eagerly.

        The values have no gradients: `backward` computes them.
        """
        graph = self._choose()
        if graph is None:
            return None
        compares, is_used = self._graphs.use(self._loss, graph)
        if not (compares or is_used):
            return None
        self._graph, work = graph, self._work
        values = graph.forward(work)
        if is_used:
            return values
        self.is_compared = True
        # what the eager lane will overwrite, or the next replay
        scalars = {name: value.clone() for name, value in values.scalars.items()}
        self._expected = self._named(
            scalars, in_order(self.backward(work.round_to), work.parameters)
        )
        work.restart()
        return None

    def backward(self, round_to: torch.dtype | None) -> Iterator[dict[int, Tensor]]:
        """Compute the backward pass; yield copies of gradients, as `LaneGraph.backward` does."""
        return self._graph.backward(self._work.parameters, round_to)

    def check(self, scalars: Mapping[str, Tensor], gradients: Gradients) -> None:
        """Compare the eager lane with the graph, or what it changed; before buffers are restored.

        `scalars` are on the device. Raises `LossError` if graphs are required and it cannot be one.
        """
        if self.is_compared:
            eager = self._named(scalars, gradients)
            self._graphs.compare(self._loss, self._graph, self._work, self._expected, eager)
        if self._before is not None:
            reason, what = self._reason(scalars, *self._before)
            if reason:
                self._graphs.refuse(self._loss, reason, what=what)

    def close(self) -> None:
        """End the observation, also after an error."""
        self._waits.end()

    def _choose(self) -> LaneGraph | None:
        """Return the graph for this lane, perhaps a new one; otherwise, observe the eager lane."""
        graphs, loss, work = self._graphs, self._loss, self._work
        if loss.is_refused or loss.calls == 1:  # the first call may create what it reaches
            return None
        try:
            key = self._key()
        except Unsuitable as unsuitable:
            graphs.refuse(loss, "batch", what=unsuitable)
            return None
        if key in loss.graphs or loss.is_refused:
            return loss.graphs.get(key)
        if graphs.is_seen(loss, key):
            return graphs.capture(loss, key, work)
        values = loss.values[work.device]
        states = loss.generators = loss.generators or GeneratorStates(**graphs.roots)
        states.begin()
        self._before = values.marks, values, states
        self._waits.begin()
        return None

    def _key(self) -> Any:
        """Return what has to be equal for lanes that one graph can compute."""
        work = self._work
        return (
            work.device,
            self._graphs.state_of(self._loss, work),
            work.factor is None,
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            tuple(specs_of(work.batch, work.device)),
        )

    def _named(
        self, scalars: Mapping[str, Tensor], gradients: Gradients
    ) -> dict[str, Tensor | None]:
        """Return what a lane has computed, by names for messages."""
        pairs: list[tuple[str, Tensor | None]] = [
            ("the loss" if name == "loss" else f"the metric {name!r}", value)
            for name, value in scalars.items()
        ]
        pairs += [(f"the buffer {name!r}", buffer.clone()) for name, buffer in self._work.buffers()]
        pairs += [
            (f"the gradient of {self._work.name_of(n)}", gradient)
            for n, gradient in enumerate(gradients)
        ]
        named: dict[str, Tensor | None] = {}
        for name, value in pairs:  # a module may have the names of another one
            named[f"{name} of another module {len(named)}" if name in named else name] = value
        return named

    def _reason(
        self,
        scalars: Mapping[str, Tensor],
        marks: Any,
        values: ReachedValues,
        states: GeneratorStates,
    ) -> tuple[str, Any]:
        """Return why an eager lane could not have been a graph, from `REFUSALS`, or nothing."""
        if (place := self._waits.end()) is not None:
            return "wait", place
        if (generator := states.moved()) is not None:
            return "generator", generator
        if not values.is_same():
            return "object", values.difference(marks)
        on_host = [name for name, value in scalars.items() if value.device != self._work.device]
        return ("metric", on_host[0]) if on_host else ("", None)


class _Waits:
    """Notices operations of torch that wait for the device, which a graph cannot contain."""

    def __init__(self) -> None:
        self._caught: Any = None

    def begin(self) -> None:
        with ExitStack() as stack:
            self._caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
            # the line that called what calls this
            warn = partial(warnings.warn, SYNCHRONIZING, stacklevel=2)
            stack.enter_context(before_device_waits(warn))
            self._stack = stack.pop_all()

    def end(self) -> str | None:
        """Stop; return the first line that waited. Other warnings are passed on."""
        if self._caught is None:
            return None
        self._stack.close()
        caught, self._caught = self._caught, None
        waited = None
        for warning in caught:
            text = str(warning.message)
            if SYNCHRONIZING in text:
                # an exchange during the backward pass of the lane is not part of it
                if not warning.filename.startswith(EXCHANGES):
                    waited = waited or f"{warning.filename}:{warning.lineno}"
            elif PROTOTYPE not in text:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return waited


def _weak(owner: Any) -> Callable[[], Any]:
    """Return a call that returns an object; a weak reference to it, if it can have one."""
    with suppress(TypeError):
        return ref(owner)
    return lambda: owner


def _code_of(fn: Any) -> Any:
    """Return what functions have in common that are made again in every step."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", type(fn))
