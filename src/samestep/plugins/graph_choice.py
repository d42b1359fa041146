"""The choice between a CUDA graph and an eager lane.

The user says that the loss can be captured. Lanes are eager in their first steps, then captured,
and every so often one is computed both ways: a difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor

from samestep.config import Config
from samestep.errors import ConfigError, LossError
from samestep.plugins.lane_graph import LaneGraph, LaneWork, Unsuitable, specs_of
from samestep.step.buffer_writes import differs
from samestep.torch_internals import has_compiled_graphs, recover_from_capture

WARM_UP_CALLS: Final = 3  # of run.backward, in which torch and the model create what they keep
COMPARE_EVERY: Final = 101  # lanes of a graph; a prime, so that each lane of a step has its turn
MOST_GRAPHS: Final = 4  # of a device
MOST_KINDS: Final = 16  # of lanes without a graph
USE_A_TENSOR: Final = (
    "Pass a value that changes as a tensor on the device, and change it in place: weight ="
    " torch.zeros((), device=run.device) before the loop, and weight.fill_(x) in its body"
)
# docs/graphs.md explains each
NOTES: Final = {  # why some lanes are eager
    "embed": "a loss with embed= has two passes, with all workers between them",
    "body": "the body of a loop over batch.lanes cannot be captured; pass the loss to"
    " run.backward(loss_fn, model, batch)",
    "kinds": "lanes keep having new loss functions, shapes, numbers or texts; define the loss"
    " function once before the loop, and use tensors of few shapes",
    "graphs": "the device has {most} graphs already, of other shapes or losses",
}
REFUSALS: Final = {  # errors
    "metric": "the metric {what!r} is not a tensor on the device; log it with run.log",
    "batch": "a batch contains {what}; expected tensors on the device, numbers and texts, in dicts,"
    " lists and tuples",
    "capture": "the capture failed: {what}. A lane must not wait for the device, as item(), bool()"
    " and nonzero() do",
    "compiled": "torch.compile makes CUDA graphs of its own; compile the model in another mode than"
    ' "reduce-overhead" and "max-autotune"',
    "bits": "at step {step}, lane {lane} has other bits as a CUDA graph than eagerly, first in"
    " {what}. The graph repeats the numbers, branches and tensors that the loss function and the"
    " model had when it was captured. " + USE_A_TENSOR,
}


class Action(Enum):
    """How to compute a lane: COMPARE uses the eager results."""

    EAGER = "eager"
    CAPTURE = "capture"
    COMPARE = "compare"
    REPLAY = "replay"


@dataclass
class LaneKind:
    """Lanes that one graph can compute, and how far they are on the way to it."""

    owners: Sequence[Any]  # the loss function and the model, kept because ids of them are the key
    calls: int = 0  # of run.backward with such lanes, without a graph
    last_call: int = -1
    graph: LaneGraph | None = None
    lanes: int = 0  # that the graph has computed

    def advance(self, call: int) -> Action:
        """Count a lane of a call of `run.backward`; return how to compute it."""
        if self.graph is None:
            self.calls += call != self.last_call
            self.last_call = call
            return Action.EAGER if self.calls <= WARM_UP_CALLS else Action.CAPTURE
        self.lanes += 1
        is_power = self.lanes & (self.lanes - 1) == 0  # more often after the capture
        is_due = is_power or self.lanes % COMPARE_EVERY == 0
        return Action.COMPARE if is_due else Action.REPLAY


@dataclass(frozen=True)
class _Comparison:
    """Whether a lane had the same bits both ways: 0 for each of the `names`, on the host later."""

    lane: int
    names: list[str]
    flags: Tensor  # bool [names]


class LaneGraphs:
    """The graphs of a worker's lanes, and which lane one computes. `say` prints a line."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._kinds: dict[Any, LaneKind] = {}
        self._owners: Sequence[Any] | None = None  # of this call, None if its lanes are eager
        self._calls = self._step = 0
        self._said: set[str] = set()
        self._pools: dict[torch.device, tuple[Any, torch.cuda.Stream]] = {}
        self._comparisons: list[_Comparison] = []

    @classmethod
    def of(
        cls, config: Config, device: torch.device, say: Callable[[str], object]
    ) -> LaneGraphs | None:
        """Return the graphs that the option `graphs` asks for, None without them.

        Raises `ConfigError` if there are no GPUs.
        """
        if config.graphs == "off":
            return None
        if device.type != "cuda":
            raise ConfigError(
                'graphs="on" requires GPUs, but the devices are CPUs; use graphs="off"'
            )
        return cls(say)

    def close(self) -> None:
        """Free all graphs."""
        self._owners = None
        self._kinds.clear()
        self._comparisons.clear()
        self._pools.clear()

    def begin(self, fn: Any, model: Any, step: int, *, embeds: bool) -> None:
        """Begin a call of `run.backward` with a loss, or of a loop without `fn`."""
        self._calls, self._step, self._owners = self._calls + 1, step, None
        self._comparisons.clear()
        if embeds:
            self._note("embed")
        elif fn is None:
            self._note("body")
        else:  # a bound method is a new object each time
            parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
            self._owners = *parts, model

    def advance(self, work: LaneWork) -> tuple[Action, LaneGraph | None]:
        """Return how to compute a lane, and the graph, which may be new, if it is not eager.

        Raises `LossError` if the lane cannot be a graph.
        """
        if self._owners is None:
            return Action.EAGER, None
        kind = self._kind(self._key(work, self._owners), self._owners)
        action = kind.advance(self._calls)
        if action is Action.CAPTURE:
            devices = [key[0] for key, other in self._kinds.items() if other.graph is not None]
            if devices.count(work.device) == MOST_GRAPHS:
                self._note("graphs", most=MOST_GRAPHS)
                return Action.EAGER, None
            kind.graph = self._capture(work)
            action = kind.advance(self._calls)
        return action, kind.graph

    def compare(
        self,
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
        self._comparisons.append(_Comparison(work.lane, names, torch.stack(flags)))

    def end(self, copy: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Begin to copy the results of comparisons to the host."""
        copies = copy([comparison.flags for comparison in self._comparisons])
        self._comparisons = [
            _Comparison(each.lane, each.names, flags)
            for each, flags in zip(self._comparisons, copies, strict=True)
        ]

    def judge(self) -> None:
        """Read the results, whose copies are complete. Raises `LossError` if bits differed."""
        comparisons, self._comparisons = self._comparisons, []
        for comparison in comparisons:
            flags = zip(comparison.names, comparison.flags.tolist(), strict=True)
            if differing := [name for name, differs in flags if differs]:
                others = f" and {len(differing) - 1} more" if differing[1:] else ""
                raise _refusal(
                    "bits", step=self._step, lane=comparison.lane, what=f"{differing[0]}{others}"
                )

    def _key(self, work: LaneWork, owners: Sequence[Any]) -> Any:
        """Return what has to be equal for lanes that one graph can compute."""
        tensors = [*work.parameters, *(buffer for _, buffer in work.buffers())]
        try:
            specs = tuple(specs_of(work.batch, work.device))
        except Unsuitable as unsuitable:
            raise _refusal("batch", what=unsuitable) from None
        return (
            work.device,
            *map(id, owners),
            *(tensor.data_ptr() for tensor in tensors),
            work.factor is None,
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            specs,
        )

    def _kind(self, key: Any, owners: Sequence[Any]) -> LaneKind:
        if key not in self._kinds:
            without = [other for other, kind in self._kinds.items() if kind.graph is None]
            if len(without) == MOST_KINDS:
                del self._kinds[without[0]]  # the oldest
                self._note("kinds")
            self._kinds[key] = LaneKind(owners)
        return self._kinds[key]

    def _capture(self, work: LaneWork) -> LaneGraph:
        if has_compiled_graphs([work.device]):  # neither can be captured in the other
            raise _refusal("compiled")
        if work.device not in self._pools:
            stream = torch.cuda.Stream(work.device)
            self._pools[work.device] = torch.cuda.graph_pool_handle(), stream
        pool, stream = self._pools[work.device]
        try:
            graph = LaneGraph(work)
            on_host = graph.capture(work, pool, stream)
        except Exception as error:
            recover_from_capture(work.device, pool)
            work.restart()
            text = str(error).strip().partition("\n")[0]
            raise _refusal("capture", what=f"{type(error).__name__}: {text}") from error
        work.restart()  # seeds, which the capture may have moved
        if on_host:
            raise _refusal("metric", what=on_host[0])
        return graph

    def _note(self, reason: str, **details: Any) -> None:
        """Say once why some lanes are eager."""
        text = NOTES[reason].format(**details)
        if text not in self._said:
            self._said.add(text)
            self._say(f"lanes are computed eagerly, not as CUDA graphs: {text}")


def _refusal(reason: str, **details: Any) -> LossError:
    text = REFUSALS[reason].format(**details)
    return LossError(f'graphs="on": {text}. graphs="off" computes every lane eagerly')
