"""The forward and backward passes of one worker's lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.config import Config
from samestep.data.batch import Batch
from samestep.data.lane_loop import LaneBatch, LaneSteps, finished, in_turn
from samestep.data.random_state import generators_restored, key, set_generators
from samestep.errors import DataError
from samestep.step.buffers import Buffers
from samestep.step.finite import Nonfinite
from samestep.step.gradients import (
    Gradients,
    Parameters,
    add_gradients,
    copied_gradients,
    take_gradients,
)
from samestep.step.guards import (
    ManualGradients,
    explanation_of,
    refuse_added_twice,
    refuse_collective,
    refuse_reentrant,
)
from samestep.step.lane_results import LaneScalars, split_loss
from samestep.step.layout import Assignment, Span, subtrees, tree_steps, tree_sum
from samestep.step.overlap import NO_OVERLAP, Overlap
from samestep.step.replicas import Replica, Replicas
from samestep.torch_internals import (
    Divisor,
    before_collectives,
    before_reentrant_checkpoints,
    begin_compiled_graphs,
    has_compiled_graphs,
    noted_means,
)

LossFn = Callable[[Any, Any], Any]
Count = Callable[[Any], Any]
Reduction = Literal["mean", "sum"]
Plugin = TypeVar("Plugin")
Value = TypeVar("Value")
NO_CONTEXT: Final = nullcontext()  # each lane enters several


@dataclass(frozen=True)
class LossSpec:
    """The loss of a lane: a mean over its items, or a sum to divide by the items of all lanes.

    Without `fn`, the body of a loop over `batch.lanes` computes it, with the variables `body`, of
    which it does not set the `variables` itself.
    `count` counts the items of a lane batch (default: its samples, as `samples_in` counts them).
    With `embed`, it is the loss of what `embed` returns for all lanes.
    """

    fn: LossFn | None
    model: Any
    count: Count | None = None
    reduction: Reduction = "mean"
    embed: LossFn | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LaneResult:
    """The items of one lane (or block of an evaluation) and the mean, or sum, of each metric.

    Of a metric with an entry per item, or a pair, it has [sum, count] instead.
    """

    lane: int
    rank: int
    count: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """The results of all lanes of a global batch, and the notes that the workers attached.

    `skipped` says why the batch has no gradient, if it was skipped, perhaps because it would be
    `nonfinite`.
    """

    results: list[LaneResult]
    notes: list[Any]
    skipped: str | None = None
    nonfinite: Nonfinite | None = None


class StepPlugin:
    """What watches a step from outside, such as a guard; all workers have the same ones in order.

    A step is one call of `run.backward`. A plugin overrides the methods that it needs; the others
    are not called. Each may raise an error, after which gradients and buffers are as before.
    """

    def begin(self, lane_pass: LanePass) -> None:
        """Prepare for a step, before this worker computes its lanes. May be collective."""

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[Any]:
        """Return a context for the computation of a lane from its batch, on its device."""
        return NO_CONTEXT

    def loss(self, lane_pass: LanePass, lane: int, loss: Tensor) -> None:
        """Look at the loss of a lane, and at its graph, before it is differentiated."""

    def after_lane(self, lane_pass: LanePass, lane: int, gradients: Gradients) -> None:
        """Look at the gradients of a lane, before they are added to those of others."""

    def report(self) -> Callable[[], Any] | None:
        """Look at the lanes of this worker after their end.

        Return what returns JSON for `compare`, as soon as GPUs have computed the lanes.
        """

    def compare(self, reports: Sequence[Any]) -> None:
        """Compare the reports of all workers, by rank, before gradients are set."""

    def end(self, result: StepResult) -> None:
        """Look at the results of the step, after gradients are set."""

    def blocks(self, fn: LossFn, model: Any, own_blocks: int) -> Callable[[], object] | None:
        """Prepare for an evaluation, of which this worker computes `own_blocks` blocks.

        Return what is called after each of them.
        """


def overriding(plugins: Sequence[Plugin], kind: type[Plugin], method: str) -> list[Plugin]:
    """Return the plugins of a kind that override a method: that of others does nothing."""
    default = getattr(kind, method)
    return [plugin for plugin in plugins if getattr(type(plugin), method) is not default]


class StepPlugins:
    """The plugins of a run, of which each step calls what they have."""

    def __init__(self, plugins: Sequence[StepPlugin] = ()) -> None:
        self._all = plugins
        having = partial(overriding, plugins, StepPlugin)
        self._begin, self._lane, self._after = map(having, ("begin", "lane", "after_lane"))
        self._loss = having("loss")
        self._report, self._compare, self._end = map(having, ("report", "compare", "end"))
        self._blocks = having("blocks")

    def without(self, plugin: StepPlugin) -> StepPlugins:
        """Return the others, after a plugin has seen enough."""
        return StepPlugins([each for each in self._all if each is not plugin])

    def begin(self, lane_pass: LanePass) -> None:
        """Prepare all of them for a step."""
        for plugin in self._begin:
            plugin.begin(lane_pass)

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[Any]:
        """Return a context for a lane: those of all of them, the first one outermost."""
        contexts = [plugin.lane(lane_pass, lane, batch) for plugin in self._lane]
        contexts = [context for context in contexts if context is not NO_CONTEXT]
        return _nested(contexts) if contexts else NO_CONTEXT

    def loss(self, lane_pass: LanePass, lane: int, loss: Tensor) -> None:
        """Let all of them look at the loss of a lane."""
        for plugin in self._loss:
            plugin.loss(lane_pass, lane, loss)

    def after_lane(self, lane_pass: LanePass, lane: int, gradients: Gradients) -> None:
        """Let all of them look at the gradients of a lane."""
        for plugin in self._after:
            plugin.after_lane(lane_pass, lane, gradients)

    def report(self) -> list[Callable[[], Any]]:
        """Return what returns the report of each, as JSON."""
        return [plugin.report() or _nothing for plugin in self._report]

    def compare(self, reports: Sequence[Sequence[Any]]) -> None:
        """Let each compare its reports of all workers; `reports` are those of `report`, by rank."""
        for plugin, own in zip(self._report, zip(*reports, strict=True), strict=True):
            if plugin in self._compare:
                plugin.compare(own)

    def end(self, result: StepResult) -> None:
        """Let all of them look at the results of the step."""
        for plugin in self._end:
            plugin.end(result)

    def blocks(self, fn: LossFn, model: Any, own_blocks: int) -> list[Callable[[], object]]:
        """Prepare all of them for an evaluation; return what they do after each block."""
        after = [plugin.blocks(fn, model, own_blocks) for plugin in self._blocks]
        return [look for look in after if look is not None]


def _nothing() -> None:
    """Return the report of a plugin that has none."""


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@dataclass
class LaneContext:
    """The lanes of one worker, with the devices, replicas and buffers that their passes use.

    `pass_of(kind, loss, step)` may return what creates another pass than one of a `kind`.
    """

    world: World
    config: Config
    lanes: int
    devices: Sequence[torch.device]
    pass_of: Callable[[type[LanePass], LossSpec, int], Callable[..., LanePass]] | None = None

    def __post_init__(self) -> None:
        self.plugins = StepPlugins()
        # at least one lane per device
        self.assignment = Assignment(self.world.size, self.lanes)
        self.own = self.assignment.of(self.world.rank)
        self.replicas = Replicas(self.devices, self.own)
        self.buffers = Buffers(self.world, self.assignment, self.replicas)
        self.manual = ManualGradients()
        self._is_in_user_code = False

    @property
    def takes_turns(self) -> bool:
        """Whether all workers compute neighbors at the same time, for a model that is sharded."""
        return self.assignment.is_strided

    @property
    def round_to(self) -> torch.dtype | None:
        """The dtype to which gradients and their sums are rounded, None for the parameters' own."""
        return torch.bfloat16 if self.config.exchange_dtype == "bfloat16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for user code; in float32 a user's own autocast stays in effect."""
        if self.config.precision == "float32":
            return NO_CONTEXT
        return torch.autocast(self.devices[0].type, getattr(torch, self.config.precision))

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Raise `LossError` for what `user_code` in this block may not do.

        It must neither contain reentrant checkpoints nor communicate with other workers. A step
        enters this once, because it takes longer than a lane's `user_code`.
        """

        def in_user_code(refuse: Callable[[Any], object]) -> Callable[[Any], object]:
            return lambda argument: self._is_in_user_code and refuse(argument)

        with before_reentrant_checkpoints(in_user_code(refuse_reentrant)):
            if self.lanes == 1:  # and a single worker
                yield
                return
            refuse = in_user_code(lambda name: refuse_collective(f"torch.distributed.{name}"))
            with before_collectives(refuse):
                yield

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Run the loss function, or `embed`, in this block."""
        begin_compiled_graphs(self.devices)
        self._is_in_user_code = True
        try:
            with self.autocast():
                yield
        finally:
            self._is_in_user_code = False

    @contextmanager
    def own_code(self) -> Iterator[None]:
        """Run what is no user code in this block, such as a gather in the middle of it."""
        before, self._is_in_user_code = self._is_in_user_code, False
        try:
            yield
        finally:
            self._is_in_user_code = before

    def keep_casts(self) -> AbstractContextManager[Any]:
        """Return a context in which several `autocast` blocks cast each parameter once."""
        if self.config.precision == "float32" or self.takes_turns:
            return NO_CONTEXT
        # torch forgets casts at the end of the outermost block, enabled or not
        return torch.autocast(self.devices[0].type, enabled=False)


class LaneInputs:
    """The batches of one worker's lanes, which are copied to devices one lane ahead.

    `total` has the planned items of all lanes, so that gradients have the size of a mean while they
    are added. `LanePass.scale` corrects it once all lanes have reported their items, or divides if
    it is None. `batches` has those of lanes with samples; loading them took `data_seconds`.
    """

    def __init__(self, batch: Batch, count: Count | None) -> None:
        counts = batch.counts  # of samples, by lane of the run; None for streams
        self.total = sum(counts) if count is None and counts is not None else None
        self._batch, self._count = batch, count
        before = batch.data_seconds
        self.batches = {
            lane: data
            for lane, data in batch.lane_batches()
            if data is not None or counts is None  # a `collate_fn` dropped all samples
        }
        self.data_seconds = batch.data_seconds - before
        self._begun: dict[int, Callable[[], Any]] = {}  # copies, which these end

    def samples(self, lane: int) -> int | None:
        """Return the number of samples of a lane, None if they cannot be counted."""
        with suppress(DataError):
            return self._batch.samples(lane, self.batches[lane])
        return None

    def items(self, lane: int) -> float:
        """Count the items of a lane's batch where it was loaded: a GPU would have to be awaited."""
        batch = self.batches[lane]
        if self._count is None:
            return self._batch.samples(lane, batch)
        return counted(self._count, batch, f"lane {lane}")

    def moved(self, lane: int, replica: Replica) -> Any:
        """Return a lane's batch on its device, and begin to copy that of the next lane there."""
        # a GPU copies in its own stream, while it still computes this lane
        for n in [n for n in replica.lanes if n >= lane and n in self.batches][:2]:
            if n not in self._begun:
                self._begun[n] = replica.copier.begin(self.batches[n])
        return self._begun.pop(lane)()


@dataclass
class LanePass:
    """The forward and backward passes of one worker's lanes for one global batch.

    `seed` numbers the pass within the run. `overlap` is active during the backward of the last
    lane, with the sums of the others by span. It gives the gradients of this worker's subtrees that
    were put into exchanges meanwhile, by the parameter's number.
    """

    context: LaneContext
    loss: LossSpec
    batch: Batch
    parameters: Parameters
    seed: tuple[int, ...]
    overlap: Overlap

    def __post_init__(self) -> None:
        self.context.world.status.set_activity("loading data")
        self.inputs = LaneInputs(self.batch, self.loss.count)
        is_mean_of_samples = self.loss.count is None and self.loss.reduction == "mean"
        self.scalars = LaneScalars(has_divisors=is_mean_of_samples and self.context.lanes > 1)
        self._has_buffers = bool(self.context.buffers.homes)
        self.exchange_seconds = 0.0  # of `run`
        self.watched: int | None = None  # the lane that is computed again
        self.weights: dict[int, Tensor | None] = {}  # of the gradients, by lane; None is 1
        self._sums: dict[Span, Gradients] = {}  # of the subtrees of each device
        # what `overlap` gave: gradients of each subtree, by number of the parameter
        self._in_exchange: Mapping[int, Gradients] = {}

    def run(self) -> LaneSteps[list[Gradients]]:
        """Return the gradients of this worker's subtrees, in lane order, on its first device."""
        replicas, sums = self.context.replicas, self._sums
        self._prepare()
        with generators_restored(), self.context.keep_casts():
            yield from in_turn(map(self._run_on, replicas.all))
        first = replicas.all[0].device

        def moved(span: Span) -> Gradients | None:
            gradients = sums.pop(span, None)  # only two are on the first device at a time
            return gradients and [
                None if gradient is None else gradient.to(first) for gradient in gradients
            ]

        # several devices: their subtrees may be parts of one subtree of this worker
        sum_of = sums.get if len(replicas.all) == 1 else moved
        own_spans = subtrees(self.context.own, self.context.lanes)
        own_gradients = [tree_sum(span, sum_of, add_gradients) for span in own_spans]
        for n, in_exchange in self._in_exchange.items():
            for gradients, gradient in zip(own_gradients, in_exchange, strict=True):
                gradients[n] = gradient
        return own_gradients  # [subtrees, parameters], each a tensor or None

    def _prepare(self) -> None:
        """Give all devices the current values, from which their lanes start."""
        if self.context.replicas.all[1:]:
            self.context.replicas.refresh()
        if self._has_buffers:
            self.context.buffers.begin_step()

    def _run_on(self, replica: Replica) -> LaneSteps[None]:
        """Compute the sums of one device's lanes.

        The last lane of a single device stays apart, so that `overlap` may add it during backward.
        """

        def gradients(span: Span) -> LaneSteps[Gradients | None]:
            if span[1] - span[0] > 1:
                return None
            lane_gradients = yield from self._run_lane(span[0], replica)
            self.context.plugins.after_lane(self, span[0], lane_gradients)
            yield None  # the body of a loop goes on
            if self.loss.fn is None and self.context.manual.may_have_set:
                self.context.manual.refuse_gradients(replica.of(self.parameters), span[0])
            return lane_gradients

        parts = [replica.lanes]
        if len(self.context.devices) == 1:  # with more, no lane is last: they take turns
            parts = [replica.lanes[:-1], replica.lanes[-1:]]
        for span in [span for lanes in parts for span in subtrees(lanes, self.context.lanes)]:
            self._sums[span] = yield from tree_steps(span, gradients, add_gradients)

    def watch_lane(self, lane: int) -> None:
        """Prepare to repeat a lane of any worker. Its gradients go into exchanges after it."""
        self.watched = lane
        self.delay_exchange(lane)

    def repeat(self, lane: int, batch: Batch) -> tuple[Gradients, LaneScalars]:
        """Return the gradients and scalars of the lane that is watched, computed here from a batch.

        Buffers must have the values from which lanes start.
        """
        repeated = replace(self, batch=batch, overlap=NO_OVERLAP)
        return repeated.compute(lane), repeated.scalars

    def compute_again(self, lane: int, data: Any = None) -> tuple[Gradients, LaneScalars]:
        """Repeat a lane from its batch, loaded again unless it is `data` or one of a stream.

        Call it in a block of `Buffers.repeating`.
        """
        origin, source = self.batch.origin, self.batch
        if data is None:
            data = self.inputs.batches[lane] if origin is None else origin.load(lane)
        lanes = range(lane, lane + 1)
        batch = Batch(source.epoch, lanes, source.counts, iter([data]), source.is_exact, origin)
        return self.repeat(lane, batch)

    def compute(self, lane: int) -> Gradients:
        """Return the gradients of a lane, computed on this worker's first device."""
        first = self.context.replicas.all[0].device
        with generators_restored(), self.context.keep_casts():
            return finished(self._run_lane(lane, Replica(0, first, range(lane, lane + 1))))

    def keep_gradients(self) -> None:
        """Let all lanes keep their gradients until their backward pass has ended."""
        self.delay_exchange(self.context.own[-1])

    def delay_exchange(self, lane: int) -> None:
        """Let a lane keep its gradients until its backward pass has ended: they are compared."""
        if lane == self.context.own[-1]:
            self.overlap = NO_OVERLAP

    @property
    def is_shared(self) -> bool:
        """Whether the loss compares samples of all lanes, so that it is no lane's own."""
        return self.loss.embed is not None and self.context.lanes > 1

    def scale(self, results: Iterable[LaneResult]) -> float:
        """Return the factor from the sum of gradients to the gradient of the mean."""
        if self.context.lanes == 1:  # `_weight` was the whole factor
            return 1.0
        # rounded once, so it has the same bits in any order; 1 if no lane has items
        return (self.inputs.total or 1) / (math.fsum(result.count for result in results) or 1)

    def report(self, own_gradients: Sequence[Gradients]) -> dict[str, Any]:
        """Return JSON: lane results, parameters without a gradient, buffers."""
        buffers, scalars = self.context.buffers, self.scalars
        scalars.wait()
        # per subtree; a parameter is missing only if no subtree has it
        missing = (
            {n for n, gradient in enumerate(gradients) if gradient is None}
            for gradients in own_gradients
        )
        return {
            "lanes": scalars.results(),
            "missing": sorted(set.intersection(*missing)),
            "buffers": buffers.written() if self._has_buffers else [],
        }

    def divisors(self) -> list[tuple[int, float, str, list[float]]]:
        """Return (lane, samples, kinds, divisors) of what the losses of lanes are divided by."""
        self.scalars.wait()
        return self.scalars.divisors()

    def _run_lane(self, lane: int, replica: Replica) -> LaneSteps[Gradients]:
        if lane not in self.inputs.batches:  # no samples
            return [None] * len(self.parameters)
        return (yield from self.explained(lane, replica, self._gradients))

    def explained(
        self, lane: int, replica: Replica, compute: Callable[[int, Replica], LaneSteps[Value]]
    ) -> LaneSteps[Value]:
        """Compute something of a lane; if it fails, explain why."""
        self.context.world.status.set_activity(f"computing lane {lane}")
        try:
            return (yield from compute(lane, replica))
        except (MemoryError, RuntimeError, ValueError) as error:
            explanation = explanation_of(
                error,
                lane,
                self.context.lanes,
                self.inputs.samples(lane),
                f"{replica.device} on worker {self.context.world.rank}",
                self.seed[0],
                again=lambda: self.context.takes_turns or finished(compute(lane, replica)),
            )
            if explanation is None:
                raise
            raise explanation from error

    def _gradients(self, lane: int, replica: Replica) -> LaneSteps[Gradients]:
        context = self.context
        count = self.inputs.items(lane)
        batch = self.inputs.moved(lane, replica)
        if count == 0 and self.loss.reduction == "mean":  # 0 / 0; a sum may be over none
            return [None] * len(self.parameters)
        device = NO_CONTEXT if replica.is_own_cpu else context.replicas.on(replica)
        with device, context.plugins.lane(self, lane, batch):
            self._seed(lane)
            _, gradients = yield from self._compute(lane, replica, batch, count)
            if self._has_buffers and context.lanes > 1:
                context.buffers.end_lane(lane, replica.number)
        return gradients

    def _compute(
        self, lane: int, replica: Replica, batch: Any, count: float
    ) -> LaneSteps[tuple[dict[str, Tensor], Gradients]]:
        """Return the scalars of a lane on its device, and its gradients. It leaves its buffers."""
        means: list[tuple[Tensor, Divisor]] = []  # without a graph, which has them
        with self.context.user_code(), means_without_graph(means):
            if self.loss.fn is None:
                embed = self.loss.embed  # of the only lane
                shown = batch if embed is None else embed(self.loss.model, batch)
                returned = yield LaneBatch(lane, shown)
            else:
                returned = self.loss.fn(self.loss.model, batch)
            loss, metrics = split_loss(returned, lane)
        self.context.plugins.loss(self, lane, loss)
        divisors = [divisor for mean, divisor in means if mean is loss]
        scalars = self.scalars.named(loss, metrics, divisors)
        self.scalars.note(lane, count, scalars)
        # a single lane leaves in buffers what it wrote
        if self._has_buffers and self.context.lanes > 1:
            self.context.buffers.end_forward(lane, replica.number, self.scalars.copy)
        if not loss.requires_grad:  # under torch.no_grad()
            self.context.manual.note_without_graph()
            return scalars, [None] * len(self.parameters)
        factor = self._factor(count)
        weight = None if factor is None else torch.full_like(loss, factor)
        self.weights[lane] = weight
        parameters = replica.of(self.parameters) if replica.number else self.parameters
        return scalars, self._differentiate(lane, [loss], [weight], parameters)

    def _differentiate(
        self,
        lane: int,
        roots: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        parameters: Parameters,
        *,
        retain_graph: bool = False,
    ) -> Gradients:
        # gradients of other lanes have to wait: they are not sums of subtrees yet
        is_last = lane == self.context.own[-1]
        overlap: AbstractContextManager[Mapping[int, Gradients]]
        overlap = self.overlap.active(self._sums) if is_last else nullcontext({})
        with self.context.manual.backward(parameters, lane), overlap as self._in_exchange:
            torch.autograd.backward(roots, weights, retain_graph, inputs=parameters)
        round_to = self.context.round_to
        if has_compiled_graphs(self.context.devices):  # in memory that the next forward writes
            gradients = copied_gradients(take_gradients(parameters), parameters, round_to)
        else:
            gradients = take_gradients(parameters, round_to)
        refuse_added_twice([gradients[n] for n in self._in_exchange], lane)
        return gradients

    def _factor(self, count: float) -> float | None:
        """Return the factor of a lane's gradient before it is added; `scale` is the rest."""
        share = count if self.loss.reduction == "mean" else 1  # a mean stands for its items
        if self.context.lanes == 1:
            return None if share == count else share / (count or 1)
        return share / (self.inputs.total or 1)

    def _seed(self, lane: int) -> None:
        set_generators(key(self.context.config.seed, "lane", *self.seed, lane))


def means_without_graph(means: list[tuple[Tensor, Divisor]]) -> AbstractContextManager[None]:
    """Return a context that adds mean losses and what they are divided by, under `no_grad`."""
    if torch.is_grad_enabled():
        return NO_CONTEXT
    return noted_means(lambda *mean: means.append(mean))


def counted(count: Count, batch: Any, where: str) -> float:
    """Return the number of items of a batch, or the sum of their weights."""
    returned = count(batch)
    number = float(returned)
    if not 0 <= number < math.inf:  # nor NaN
        expected = "count must return a finite number of at least 0"
        raise DataError(f"{expected}, got {returned!r} for {where}")
    return int(number) if number.is_integer() else number
