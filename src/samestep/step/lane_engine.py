"""The gradient of a global batch: the passes of all lanes, the sum over all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from samestep.data.batch import Batch
from samestep.data.lane_loop import LaneSteps, finished
from samestep.errors import LossError, NonFiniteLossError
from samestep.step.buffer_rules import Rule
from samestep.step.finite import ADVICE, GradientCheck, GradientSize, Nonfinite, has_nonfinite
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import (
    Gradients,
    Parameters,
    have_none,
    stash_gradients,
)
from samestep.step.guards import (
    ModelGuard,
    OptimizerGuard,
    check_same_call,
    nonfinite_error,
    nonfinite_loss,
)
from samestep.step.lane_pass import (
    LaneContext,
    LanePass,
    LaneResult,
    LossSpec,
    StepPlugin,
    StepPlugins,
    StepResult,
)
from samestep.step.overlap import Overlap, Overlaps, flat_buffers_of
from samestep.step.shard import DividedOptimizer, Shard
from samestep.step.whole_batch import WholeBatchPass


class GpuClock:
    """Measures what a GPU does between points of a program, in its current stream; not on CPUs.

    Events measure it: the host only puts them into the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self) -> torch.cuda.Event | None:
        """Return a point in the stream, after all that the host has given to the GPU so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, phase: str, start: torch.cuda.Event | None, end: torch.cuda.Event | None) -> None:
        """Count the time between two points as a part of a phase."""
        if start is not None and end is not None:
            self._phases.append((phase, start, end))

    def take(self) -> Callable[[], dict[str, float]]:
        """Return a call that returns the seconds of each phase since the last `take`.

        The GPU should have passed all points by then, or the call waits for it.
        """
        phases, self._phases = self._phases, []

        def seconds() -> dict[str, float]:
            totals: dict[str, float] = {}
            for phase, start, end in phases:
                try:
                    milliseconds = start.elapsed_time(end)
                except RuntimeError:  # not yet passed
                    end.synchronize()
                    milliseconds = start.elapsed_time(end)
                totals[phase] = totals.get(phase, 0.0) + milliseconds / 1000
            return totals

        return seconds


@dataclass
class _Call:
    """One call of `backward`: the parameters, their exchanges, and gradients that they had.

    Later also the gradients of this worker's subtrees, [subtrees, parameters], each a tensor or
    None. `started` is the time at which the current phase began.
    """

    parameters: Parameters
    overlap: Overlap
    earlier: Gradients
    started: float
    own_gradients: list[Gradients] = field(default_factory=list)
    computed: torch.cuda.Event | None = None


class LaneEngine(LaneContext):
    """Computes gradients over all lanes, and holds the state shared between steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shards: list[Shard] = []
        self.of_sharded: list[DividedOptimizer] = []  # optimizers of sharded models
        self.optimizers = OptimizerGuard(self.manual)
        self.models = ModelGuard(self.optimizers.check_addresses)
        self.gradients = GradientCheck(self.config)
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self.gpu_clock = GpuClock(self.devices[0])
        self._overlaps = Overlaps(
            self.world,
            self.assignment,
            self.round_to,
            self.shards,
            self.manual.has_nested,
            has_one_device=len(self.devices) == 1,
        )
        self._calls = 0  # of `backward`, also those that failed

    def use(self, plugins: Sequence[StepPlugin]) -> None:
        """Let plugins watch all steps, in this order."""
        self.plugins = StepPlugins(plugins)

    def dismiss(self, plugin: StepPlugin) -> None:
        """Let a plugin watch no further steps."""
        self.plugins = self.plugins.without(plugin)

    def add(self, module: Module, rules: Mapping[str, Rule] | None = None) -> None:
        """Register a replicated module for training, with `rules` for its buffers."""
        self.models.add(module)
        self.replicas.add(module)
        self.buffers.add(module, rules)
        self.manual.watch(module)

    def take_turns(self, around: Callable[..., Overlap], free: Callable[[], None]) -> None:
        """Give this worker each `size`-th lane, so that all workers compute neighbors.

        `around` returns the sums of parameters, some of which are sharded: see `Overlaps`. `free`
        frees what sharded models have gathered.
        """
        self.assignment.stride()
        self.own = self.assignment.of(self.world.rank)
        self.replicas.give(self.own)
        self._overlaps.wrap(around)
        self.models.free_with(free)

    def close(self) -> None:
        """Remove all hooks, which would keep the models in memory."""
        self.manual.close()
        self._overlaps.close()

    def check_models(self) -> None:
        """Raise `ModelError` if a snapshot of replicated models would be wrong.

        User code changed one, or `check_late` finds an error. A model may have moved to another
        device, as for an export at the end of a script.
        """
        self.models.check_all()
        self.check_late()

    def check_late(self) -> None:
        """Raise an error that is only known now, because nothing waits for a GPU.

        Backward wrote a buffer too late, or its gradient is not finite.
        """
        self.buffers.check()
        self.gradients.check_late()

    def settle(self, optimizer: Optimizer) -> None:
        """Wait for gradients of a sharded optimizer, and drop those that user code has cleared."""
        for shard in self.divided:
            if shard.optimizer is optimizer:
                shard.settle()

    @property
    def divided(self) -> list[DividedOptimizer]:
        """The optimizers of which each worker updates a part."""
        return [*self.shards, *self.of_sharded]

    def take_seconds(self) -> dict[str, float]:
        """Return the host's seconds in each phase since the last call."""
        seconds = {"compute": self.compute_seconds, "exchange": self.exchange_seconds}
        self.compute_seconds = self.exchange_seconds = 0.0
        return seconds

    def flat_buffers(self) -> list[FlatBuffer]:
        """Return the flat buffers of every sharded optimizer."""
        return flat_buffers_of(self.divided)

    def backward(
        self,
        loss: LossSpec,
        batch: Batch,
        update: Module,
        seed: tuple[int, ...],
        note: Callable[[], Any],
    ) -> StepResult:
        """Do what `steps` does, for a loss that a function computes."""
        return finished(self.steps(loss, batch, update, seed, note))

    def steps(
        self,
        loss: LossSpec,
        batch: Batch,
        update: Module,
        seed: tuple[int, ...],
        note: Callable[[], Any],
    ) -> LaneSteps[StepResult]:
        """Set `.grad` in `update` to the gradient of the mean loss over the global batch.

        `seed` numbers this call in the run. `note` returns JSON that is sent to all workers; it is
        called when GPUs have completed the steps before. After an error, gradients and buffers are
        as before. So they are if the batch is skipped: it is one of `skip_batches`, or a loss is
        not finite and such batches are skipped.
        """
        self._calls += 1
        call = self._begin(update)
        with self._restoring(call):
            # each lane: forward and backward; then this worker adds the subtrees of its own lanes
            lane_pass = self._pass_of(loss, batch, seed, call)
            self.gradients.carry(lane_pass.scalars)
            report = yield from self._compute(lane_pass, call)
            reports, notes = self._exchange(lane_pass, call, report, note)
            result = self._result(lane_pass, reports, notes)
            self._end_buffers(reports, result)
        self._set_gradients(call, reports, result, lane_pass.scale(result.results))
        self.plugins.end(result)
        return result

    def _begin(self, update: Module) -> _Call:
        """Return a call for the parameters of a module, with room for their gradients."""
        started = time.perf_counter()
        parameters = self.models.trainable(update)
        overlap = self._overlaps.of(parameters, self._calls)
        self.manual.forget_cleared()
        return _Call(parameters, overlap, self._make_room(parameters, overlap), started)

    def _compute(self, lane_pass: LanePass, call: _Call) -> LaneSteps[dict[str, Any]]:
        """Compute the gradients of this worker's subtrees, and return its report, as JSON.

        Loading and exchanges do not count as computation.
        """
        self.plugins.begin(lane_pass)
        begun = self.gpu_clock.mark()
        are_own = self.lanes > 1 and not self.shares(lane_pass.loss)
        with self.manual.lanes(are_own=are_own), self.refusals():
            call.own_gradients = yield from lane_pass.run()
            of_plugins = self.plugins.report()
        call.computed = self.gpu_clock.mark()
        self.gpu_clock.add("compute", begun, call.computed)
        self.world.wait_for_gpu()
        report = lane_pass.report(call.own_gradients)  # reads losses, which a GPU has computed
        elsewhere = lane_pass.inputs.data_seconds + lane_pass.exchange_seconds
        self.compute_seconds += time.perf_counter() - call.started - elsewhere
        self.exchange_seconds += lane_pass.exchange_seconds
        return {**report, "plugins": [read() for read in of_plugins]}

    def _exchange(
        self,
        lane_pass: LanePass,
        call: _Call,
        report: dict[str, Any],
        note: Callable[[], Any],
    ) -> tuple[list[Any], list[Any]]:
        """Exchange gradients and reports; return the reports and notes of all workers, by rank.

        Slice s of every subtree's gradient, [subtrees, parameters], goes to worker s, and the
        losses go to all workers.
        """
        call.started = time.perf_counter()
        call.overlap.finish(call.own_gradients)  # puts those that were not put during backward
        if self.gradients.is_due(lane_pass.seed[0]):
            report["gradient"] = self._look_at(lane_pass, call.own_gradients, report["lanes"])
        message = self._calls, report, note()
        receive = self.world.begin_all_gather_json(message, "exchanging losses")
        call.overlap.start()  # the remaining exchanges, while the message is on its way
        # all workers synchronize here
        calls, reports, notes = zip(*receive(), strict=True)  # [workers] each, by rank
        check_same_call(calls)
        return list(reports), list(notes)

    def _result(self, lane_pass: LanePass, reports: Sequence[Any], notes: list[Any]) -> StepResult:
        """Return the results of all lanes, unless a plugin refuses what workers report."""
        results = _results_of(reports)
        self.plugins.compare([report["plugins"] for report in reports])
        skipped, nonfinite = self._skip_reason(lane_pass, reports, results)
        return StepResult(results, notes, skipped, nonfinite)

    def _set_gradients(
        self, call: _Call, reports: Sequence[Any], result: StepResult, scale: float
    ) -> None:
        """Set `.grad` to the mean over all lanes, added to the gradients of earlier calls."""
        parameters, skipped = call.parameters, result.skipped
        call.overlap.set_gradients(parameters, _missing(parameters, reports, skipped), scale)
        if call.earlier:
            _add_earlier(parameters, call.earlier)
        self.optimizers.seal(parameters)
        self.exchange_seconds += time.perf_counter() - call.started
        self.gpu_clock.add("exchange", call.computed, self.gpu_clock.mark())

    def _skip_reason(
        self, lane_pass: LanePass, reports: Sequence[Any], results: Sequence[LaneResult]
    ) -> tuple[str | None, Nonfinite | None]:
        """Return why a batch makes no update, None if it does, and whether its gradient is why.

        Raises `NonFiniteLossError`.
        """
        config, step, is_shared = self.config, lane_pass.seed[0], self.shares(lane_pass.loss)
        # a batch that the user leaves out may have any loss
        if config.skip_batches and config.skips(step):
            return f"step {step} is in skip_batches={config.skip_batches}", None
        if config.nonfinite_loss == "continue":
            return None, None
        gradients, scale = [report.get("gradient") for report in reports], lane_pass.scale(results)
        nonfinite = self.gradients.judge(gradients, scale, is_shared=is_shared)
        losses = [(result.lane, result.rank, result.metrics["loss"]) for result in results]
        reason = nonfinite_loss(losses, step, is_shared=is_shared)
        if nonfinite is not None and (reason is None or nonfinite.step < step):
            if config.nonfinite_loss == "stop":
                raise NonFiniteLossError(f"{nonfinite.reason}; {ADVICE}", tuple(results), nonfinite)
            return nonfinite.reason, nonfinite
        if reason is not None and config.nonfinite_loss == "stop":
            raise nonfinite_error(reason, results)
        return reason, None

    def _look_at(
        self, lane_pass: LanePass, own_gradients: Sequence[Gradients], results: Sequence[Any]
    ) -> list[Any] | None:
        """Return the report of `self.gradients` about the sums of this worker's lanes."""
        sizes, loss = lane_pass.overlap.sizes, lane_pass.loss
        size = torch.stack(sizes).amax() if sizes else has_nonfinite(own_gradients[0])
        lanes = [lane for lane, *_ in results]

        def narrow() -> list[int]:
            nonfinite = list[int]()
            # not to be computed again, or of all lanes, or only with the other workers
            if loss.fn is None or self.shares(loss) or self.takes_turns:
                return nonfinite
            with self.manual.lanes(), suppress(Exception):  # that of the gradient matters more
                for lane in lanes:
                    with self.buffers.repeating():
                        gradients, _ = lane_pass.compute_again(lane)
                    nonfinite += [lane] * bool(has_nonfinite(gradients))
            return nonfinite

        return self.gradients.report(GradientSize(lane_pass.seed[0], lanes, size), narrow)

    def shares(self, loss: LossSpec) -> bool:
        """Return whether the loss compares samples of all lanes, so that it is no lane's own."""
        return loss.embed is not None and self.lanes > 1

    def _make_room(self, parameters: Parameters, overlap: Overlap) -> Gradients:
        """Return copies of the gradients to which this call adds, none if they are clear.

        This step reuses the memory of exchanges, so what is still needed of it moves out: slices of
        sharded optimizers, then complete gradients, then those that user code holds.
        """
        are_clear = have_none(parameters)
        if not are_clear:
            self.optimizers.open_seals()
        for bucket in overlap.buckets:
            if bucket.flat_buffer is not None:
                bucket.flat_buffer.stash_gradients(are_clear=are_clear and bucket.has_all)
        earlier = [] if are_clear else stash_gradients(parameters)
        for bucket in overlap.buckets:
            if bucket.flat_buffer is None:
                bucket.exchange.spare_held()
        return earlier

    def _pass_of(
        self, loss: LossSpec, batch: Batch, seed: tuple[int, ...], call: _Call
    ) -> LanePass:
        """Return the passes of this worker's lanes for a loss.

        A mean over items is computed lane by lane. A loss of the whole batch compares the
        embeddings of all lanes, so each lane has two passes: to its embeddings and, when all
        workers have computed the loss, back from the gradients of its embeddings.
        """
        kind: type[LanePass] = call.overlap.kind_of_pass or LanePass
        if self.shares(loss):
            if kind is not LanePass:
                raise LossError(
                    "embed= cannot be used with a model that is sharded: replicate it without"
                    " shard='full'"
                )
            kind = WholeBatchPass
        make = kind if self.pass_of is None else self.pass_of(kind, loss, seed[0])
        return make(self, loss, batch, call.parameters, seed, call.overlap)

    def _end_buffers(self, reports: Sequence[Any], result: StepResult) -> None:
        """Agree on the buffers that any lane wrote, or return to those before a skipped batch."""
        if not self.buffers.homes:
            return
        written = sorted({number for report in reports for number in report["buffers"]})
        if result.skipped is not None:
            self.buffers.restore()
            return
        self.buffers.end_step(written, [lane.lane for lane in result.results])

    @contextmanager
    def _restoring(self, call: _Call) -> Iterator[None]:
        """If the block fails, leave buffers and gradients as before this call."""
        try:
            yield
        except BaseException:
            self.buffers.restore()
            self.gradients.forget()
            for parameter, gradient in zip_longest(call.parameters, call.earlier):
                parameter.grad = gradient
            for bucket in call.overlap.buckets:
                if bucket.flat_buffer is not None:
                    bucket.flat_buffer.show()
            self.optimizers.seal(call.parameters)
            raise


def _results_of(reports: Sequence[Any]) -> list[LaneResult]:
    """Return the results of all lanes, in lane order, from the reports of all workers, by rank."""
    results = [
        LaneResult(lane, rank, *result)
        for rank, report in enumerate(reports)
        for lane, *result in report["lanes"]
    ]
    return sorted(results, key=attrgetter("lane"))  # workers of sharded models take turns


def _missing(parameters: Parameters, reports: Sequence[Any], skipped: str | None) -> set[int]:
    """Return the numbers of parameters that get no gradient, because no lane used them.

    Of a skipped batch, what was exchanged is not used.
    """
    if skipped is not None:
        return set(range(len(parameters)))
    return set.intersection(*(set(report["missing"]) for report in reports))


def _add_earlier(parameters: Parameters, earlier: Gradients) -> None:
    """Accumulate onto earlier gradients, as backward does in plain PyTorch."""
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
