"""The gradient of a global batch: the passes of all lanes, the sum over all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from samestep.data.batch import Batch
from samestep.data.lane_loop import LaneSteps, finished
from samestep.errors import NonFiniteLossError
from samestep.step.buffer_rules import Rule
from samestep.step.finite import ADVICE, Found, GradientCheck, Nonfinite, has_nonfinite
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import Gradients, Parameters, have_none, parameters_of, stash_gradients
from samestep.step.graphed_pass import GraphedPass
from samestep.step.guards import (
    ModelGuard,
    OptimizerGuard,
    check_divisors,
    check_same_call,
    nonfinite_error,
    nonfinite_loss,
)
from samestep.step.lane_pass import LaneContext, LanePass, LaneResult, LossSpec
from samestep.step.lane_state import LaneState
from samestep.step.metric_guard import MetricGuard
from samestep.step.overlap import Overlap, Overlaps, flat_buffers_of
from samestep.step.recheck import Recheck
from samestep.step.scaling import scaled_together
from samestep.step.shard import Shard
from samestep.step.whole_batch import WholeBatchPass


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


class LaneEngine(LaneContext):
    """Computes gradients over all lanes, and holds the state shared between steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shards: list[Shard] = []
        self.models = ModelGuard(partial(_check_storage, self.shards))
        self.optimizers = OptimizerGuard(self.manual)
        self.gradients = GradientCheck(self.config)
        self._state = LaneState(
            self.models.modules,
            self.config.check_every,
            self.buffers.places,
            self.world.wait_for_gpu,
        )
        self._metrics = MetricGuard()
        self._recheck = (
            Recheck(self, self.models.modules, self.shards) if self.config.recheck_every else None
        )
        if self.lanes > 1:
            self.watch = self._state.lane
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self.gpu_clock = GpuClock(self.devices[0])
        self._overlaps = Overlaps(
            self.world,
            self.lanes,
            self.round_to,
            self.shards,
            self.manual.has_nested,
            has_one_device=len(self.devices) == 1,
            keeps_gradients=self.keeps_gradients,
        )
        self._calls = 0  # of `backward`, also those that failed

    def add(self, module: Module, rules: Mapping[str, Rule] | None = None) -> None:
        """Register a replicated module for training, with `rules` for its buffers."""
        self.models.add(module)
        self.replicas.add(module)
        self.buffers.add(module, rules)
        self.manual.watch(module)

    def close(self) -> None:
        """Remove all hooks, which would keep the models in memory."""
        self.manual.close()
        self._overlaps.close()
        if self.graphs is not None:
            self.graphs.close()

    def track(self, optimizer: Optimizer, shard: Shard | None) -> None:
        """Register a tracked optimizer, which has the parameters of `shard` if it is sharded."""
        parameters: Sequence[Tensor] = parameters_of(optimizer)
        if shard is not None:  # the optimizer itself has segments of flat storage
            parameters = [
                parameter for flat in shard.flat_buffers for parameter in flat.exchange.parameters
            ]
        self.optimizers.track(optimizer, parameters)

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
        for shard in self.shards:
            if shard.optimizer is optimizer:
                shard.settle()

    def take_seconds(self) -> dict[str, float]:
        """Return the host's seconds in each phase since the last call."""
        seconds = {"compute": self.compute_seconds, "exchange": self.exchange_seconds}
        self.compute_seconds = self.exchange_seconds = 0.0
        return seconds

    def flat_buffers(self) -> list[FlatBuffer]:
        """Return the flat buffers of every sharded optimizer."""
        return flat_buffers_of(self.shards)

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
        started = time.perf_counter()
        parameters = self.models.trainable(update)
        overlap = self._overlaps.of(parameters, self._calls)
        self.manual.forget_cleared()
        earlier = self._make_room(parameters, overlap)
        with self._restoring(parameters, earlier, overlap):
            # each lane: forward and backward; then this worker adds the subtrees of its own lanes
            lane_pass = self._pass_of(loss, batch, parameters, seed, overlap)
            self.gradients.carry(lane_pass.scalars)
            check = None if self._recheck is None else self._recheck.begin(lane_pass)
            if self.graphs is not None:
                embeds = loss.embed is not None
                self.graphs.begin(loss.fn, loss.model, seed[0], embeds=embeds)
            begun = self.gpu_clock.mark()
            with self.manual.lanes(), self.refusals(), self._watched(loss, seed[0]):
                # [subtrees, parameters], each a tensor or None
                own_gradients = yield from lane_pass.run()
                if check is not None:  # of the hardware: one lane once more
                    check.repeat()
            computed = self.gpu_clock.mark()
            report = self._report(lane_pass, own_gradients, started)
            if check is not None:
                report["recheck"] = check.report()

            started = time.perf_counter()
            overlap.finish(own_gradients)  # puts those that were not put during backward
            if self.gradients.is_due(seed[0]):
                report["gradient"] = self._look_at(lane_pass, own_gradients, report["lanes"])
            reports, notes = self._exchange(overlap, report, note)
            results = _results_of(reports)
            if check is not None:
                check.compare([report["recheck"] for report in reports])
            check_divisors([entry for report in reports for entry in report["divisors"]])
            scale = lane_pass.scale(results)
            skipped, nonfinite = self._skip_reason(reports, results, seed[0], loss, scale)
            self._end_buffers(reports, results, is_skipped=skipped is not None)
        if overlap.buckets:
            overlap.set_gradients(parameters, _missing(parameters, reports, skipped), scale)
        elif skipped is None:
            # a single worker: its only subtree is the whole tree
            _set_gradients(parameters, own_gradients[0], scale)
        if earlier:
            _add_earlier(parameters, earlier)
        self.optimizers.seal(parameters)
        self.exchange_seconds += time.perf_counter() - started
        self.gpu_clock.add("compute", begun, computed)
        self.gpu_clock.add("exchange", computed, self.gpu_clock.mark())
        return StepResult(results, notes, skipped, nonfinite)

    def _exchange(
        self,
        overlap: Overlap,
        report: Mapping[str, Any],
        note: Callable[[], Any],
    ) -> tuple[list[Any], list[Any]]:
        """Exchange gradients and reports; return the reports and notes of all workers, by rank.

        Slice s of every subtree's gradient, [subtrees, parameters], goes to worker s, and the
        losses go to all workers.
        """
        call = self._calls, report, note()
        receive = self.world.begin_all_gather_json(call, "exchanging losses")
        overlap.start()  # the remaining exchanges, while the message is on its way
        # all workers synchronize here
        calls, reports, notes = zip(*receive(), strict=True)  # [workers] each, by rank
        check_same_call(calls)
        return list(reports), list(notes)

    def _skip_reason(
        self,
        reports: Sequence[Any],
        results: Sequence[LaneResult],
        step: int,
        loss: LossSpec,
        scale: float,
    ) -> tuple[str | None, Nonfinite | None]:
        """Return why a batch makes no update, None if it does, and whether its gradient is why.

        Raises `NonFiniteLossError`.
        """
        config, is_shared = self.config, self.shares(loss)
        # a batch that the user leaves out may have any loss
        if config.skips(step):
            return f"step {step} is in skip_batches={config.skip_batches}", None
        if config.nonfinite_loss == "continue":
            return None, None
        gradients = [report.get("gradient") for report in reports]
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
            found = list[int]()
            if loss.fn is None or self.shares(loss):  # not to be computed again, or of all lanes
                return found
            with self.manual.lanes(), suppress(Exception):  # that of the gradient matters more
                for lane in lanes:
                    with self.buffers.repeating():
                        gradients, _ = lane_pass.compute_again(lane)
                    found += [lane] * bool(has_nonfinite(gradients))
            return found

        return self.gradients.report(Found(lane_pass.seed[0], lanes, size), narrow)

    def shares(self, loss: LossSpec) -> bool:
        """Return whether the loss compares samples of all lanes, so that it is no lane's own."""
        return loss.embed is not None and self.lanes > 1

    @contextmanager
    def _watched(self, loss: LossSpec, step: int) -> Iterator[None]:
        """Compute this worker's lanes in the block; they may not change what others read."""
        if self.lanes == 1:  # it has all samples, on the only worker
            yield
            return
        # a body that gets the embeddings of all lanes does the same on all workers
        body = loss.body if loss.embed is None else {}
        roots = {"loss_fn": loss.fn, "embed": loss.embed, "model": loss.model, "body": body}
        function = loss.embed or loss.fn
        # metrics are compared first, because their error says more than that of their tensors
        with self._state.lanes(step, **roots), self._metrics.lanes(function, loss.model, body):
            yield

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
        self,
        loss: LossSpec,
        batch: Batch,
        parameters: Parameters,
        seed: tuple[int, ...],
        overlap: Overlap,
    ) -> LanePass:
        """Return the passes of this worker's lanes for a loss.

        A mean over items is computed lane by lane, perhaps with CUDA graphs. A loss of the whole
        batch compares the embeddings of all lanes, so each lane has two passes: to its embeddings
        and, when all workers have computed the loss, back from the gradients of its embeddings.
        """
        if self.shares(loss):
            return WholeBatchPass(self, loss, batch, parameters, seed, overlap)
        kind = LanePass if self.graphs is None else GraphedPass
        return kind(self, loss, batch, parameters, seed, overlap)

    def _report(
        self, lane_pass: LanePass, own_gradients: Sequence[Gradients], started: float
    ) -> dict[str, Any]:
        """Return the report of a pass. Loading and exchanges do not count as its computation."""
        self.world.wait_for_gpu()
        report = lane_pass.report(own_gradients)  # reads losses, after a GPU has computed them
        elsewhere = lane_pass.inputs.data_seconds + lane_pass.exchange_seconds
        self.compute_seconds += time.perf_counter() - started - elsewhere
        self.exchange_seconds += lane_pass.exchange_seconds
        return report

    def _end_buffers(
        self, reports: Sequence[Any], results: Sequence[LaneResult], *, is_skipped: bool
    ) -> None:
        """Agree on the buffers that any lane wrote, or return to those before a skipped batch."""
        written = sorted({number for report in reports for number in report["buffers"]})
        self.buffers.learn(number for report in reports for number in report["late"])
        if is_skipped:
            self.buffers.restore()
            return
        self.buffers.end_step(written, [result.lane for result in results])

    @contextmanager
    def _restoring(
        self, parameters: Parameters, earlier: Gradients, overlap: Overlap
    ) -> Iterator[None]:
        """If the block fails, leave buffers and gradients as before this call."""
        try:
            yield
        except BaseException:
            self.buffers.restore()
            self.gradients.forget()
            for parameter, gradient in zip_longest(parameters, earlier):
                parameter.grad = gradient
            for bucket in overlap.buckets:
                if bucket.flat_buffer is not None:
                    bucket.flat_buffer.show()
            self.optimizers.seal(parameters)
            raise


def _check_storage(shards: Sequence[Shard]) -> None:
    for shard in shards:
        for flat_buffer in shard.flat_buffers:
            flat_buffer.check_addresses()


def _results_of(reports: Sequence[Any]) -> list[LaneResult]:
    """Return the results of all lanes, in lane order, from the reports of all workers, by rank."""
    return [
        LaneResult(lane, rank, *result)
        for rank, report in enumerate(reports)
        for lane, *result in report["lanes"]
    ]


def _missing(parameters: Parameters, reports: Sequence[Any], skipped: str | None) -> set[int]:
    """Return the numbers of parameters that get no gradient, because no lane used them.

    Of a skipped batch, what was exchanged is not used.
    """
    if skipped is not None:
        return set(range(len(parameters)))
    return set.intersection(*(set(report["missing"]) for report in reports))


def _set_gradients(parameters: Parameters, gradients: Gradients, scale: float) -> None:
    scaled = scaled_together(gradients, parameters, scale)
    for parameter, gradient in zip(parameters, scaled, strict=True):
        parameter.grad = gradient


def _add_earlier(parameters: Parameters, earlier: Gradients) -> None:
    """Accumulate onto earlier gradients, as backward does in plain PyTorch."""
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
