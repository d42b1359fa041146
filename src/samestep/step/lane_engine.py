"""The gradient of a global batch: the passes of all lanes, the sum over all workers, clipping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from samestep.comm.base import World
from samestep.data.batch import Batch
from samestep.errors import ModelError, NonFiniteLossError, OptimizerError, WorldError
from samestep.step import LaneResult
from samestep.step.across_hosts import choose_exchange
from samestep.step.exchange import ExchangeSpec, buckets
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import (
    Gradients,
    GradientSeal,
    ModuleParameters,
    Parameters,
    have_none,
    scaled,
    stash_gradients,
)
from samestep.step.lane_pass import LaneContext, LanePass, LossSpec
from samestep.step.layout import ALIGNMENT, flattened
from samestep.step.overlap import Bucket, EarlyCopies, EarlyExchange, Overlap
from samestep.step.shard import Shard
from samestep.step.whole_batch import WholeBatchPass

# calls of `backward` after which exchanges of other parameters are freed, if they need new ones
KEPT_CALLS: Final = 100


@dataclass(frozen=True)
class StepResult:
    """The results of all lanes of a global batch, and the notes that the workers attached."""

    results: list[LaneResult]
    notes: list[Any]


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
        self.seals: list[GradientSeal] = []
        self.compute_seconds = 0.0
        self.exchange_seconds = 0.0
        self.gpu_clock = GpuClock(self.devices[0])
        # parameters by id, with their dtypes and devices when they were replicated
        self._replicated: dict[int, tuple[Parameter, torch.dtype, torch.device]] = {}
        self._modules: list[Module] = []  # replicated
        # their parameters and addresses at the last check, which change with dtypes and devices
        self._checked: WeakKeyDictionary[Module, tuple[Parameters, list[int]]] = WeakKeyDictionary()
        self._tracked: list[tuple[Optimizer, Parameters]] = []
        self._parameters: WeakKeyDictionary[Module, ModuleParameters] = WeakKeyDictionary()
        self._overlaps: dict[tuple[int, ...], Overlap] = {}
        # of the last step, found by identity: a key of all parameter ids takes longer to make
        self._last_overlap: tuple[Parameters, int, Overlap] | None = None
        self._calls = 0  # of `backward`, also those that failed

    def add(self, module: Module) -> None:
        """Register a replicated module for training."""
        for parameter in module.parameters():
            entry = (parameter, parameter.dtype, parameter.device)
            self._replicated.setdefault(id(parameter), entry)
        self._modules.append(module)
        self.replicas.add(module)
        self.buffers.add(module)
        self.manual.watch(module)

    def close(self) -> None:
        """Remove all hooks, which would keep the models in memory."""
        self.manual.close()
        for overlap in self._overlaps.values():
            overlap.close()

    def places(self) -> dict[int, int]:
        """Return the places of parameters, by id, in the order of replicated modules."""
        return {number: place for place, number in enumerate(self._replicated)}

    def track(self, optimizer: Optimizer, shard: Shard | None) -> None:
        """Register a tracked optimizer, which has the parameters of `shard` if it is sharded."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if shard is not None:  # the optimizer itself has segments of flat storage
            parameters = [
                parameter for flat in shard.flat_buffers for parameter in flat.exchange.parameters
            ]
        self._tracked.append((optimizer, parameters))

    def before_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raise `OptimizerError` if the optimizer must not make a step now.

        A gradient of it is not from `run.backward`, or another one is tracked in its place. A
        closure, which makes the gradients only now, is returned with the same check after it.
        """
        if self._tracked and all(tracked is not optimizer for tracked, _ in self._tracked):
            self._refuse_untracked(optimizer)
        is_sharded = any(shard.optimizer is optimizer for shard in self.shards)
        self.manual.check(optimizer, is_sharded=is_sharded)
        closure, *others = args[1:] or (kwargs.get("closure"),)
        if not callable(closure):
            return None

        def checked() -> object:
            result = closure()
            self.manual.check(optimizer, is_sharded=is_sharded)
            for seal in self.seals:
                if seal.optimizer is optimizer:
                    seal.open()
            return result

        if len(args) > 1:
            return (args[0], checked, *others), kwargs
        return args, {**kwargs, "closure": checked}

    def _refuse_untracked(self, optimizer: Optimizer) -> None:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for tracked, parameters in self._tracked:
            if not ids.isdisjoint(map(id, parameters)):
                raise OptimizerError(
                    f"this {type(optimizer).__name__} is not tracked, but updates parameters of the"
                    f" {type(tracked).__name__} that is, so snapshots would hold the state of the"
                    " wrong optimizer; create the optimizer before run.track, or track both"
                )

    def check_models(self) -> None:
        """Raise `ModelError` if a snapshot of replicated models would be wrong.

        User code changed one, or backward wrote a buffer too late. A model may have moved to
        another device, as for an export at the end of a script.
        """
        for module in self._modules:
            parameters = self._parameters.setdefault(module, ModuleParameters()).trainable(module)
            self._check_unchanged(module, parameters, may_move=True)
        self.buffers.check()

    def _check_unchanged(
        self, module: Module, parameters: Parameters, *, may_move: bool = False
    ) -> None:
        checked, addresses = self._checked.get(module, (None, None))
        current = [parameter.data_ptr() for parameter in parameters]
        if checked is parameters and addresses == current:
            return
        for parameter in parameters:
            entry = self._replicated.get(id(parameter))
            if entry is None and all(module is not replicated for replicated in self._modules):
                issue = "has parameters that are not replicated; pass it to run.replicate first"
            elif entry is None:
                issue = (
                    f"got the parameter {_name_in(module, parameter)!r} after run.replicate, so its"
                    " values may differ between workers, and the optimizer may not include it;"
                    " change the model before run.replicate, or replicate it again and create the"
                    " optimizer after that"
                )
            elif parameter.dtype != entry[1] or not (may_move or parameter.device == entry[2]):
                issue = (
                    f"was changed after run.replicate: {_name_in(module, parameter)!r} had"
                    f" {entry[1]} on {entry[2]}, got {parameter.dtype} on {parameter.device};"
                    " convert a model before run.replicate, which also moves it to the worker's"
                    " devices, or convert a copy of it"
                )
            else:
                continue
            raise ModelError(f"{type(module).__name__} {issue}")
        for flat_buffer in self.flat_buffers():
            flat_buffer.check_addresses()
        if not may_move:
            self._checked[module] = parameters, current

    def open_seals(self) -> None:
        """Wait for all gradients of sharded optimizers, so that they can be read.

        Raises `OptimizerError` if user code changed one.
        """
        for seal in self.seals:
            seal.open()

    def seal(self, parameters: Parameters) -> None:
        """Accept the current gradients of sharded optimizers with any of the parameters."""
        for seal in self.seals:
            if seal.covers(parameters):
                seal.seal()

    def flat_buffers(self) -> list[FlatBuffer]:
        """Return the flat buffers of every sharded optimizer."""
        return [flat_buffer for shard in self.shards for flat_buffer in shard.flat_buffers]

    def backward(
        self,
        loss: LossSpec,
        batch: Batch,
        update: Module,
        seed: tuple[int, ...],
        note: Callable[[], Any],
    ) -> StepResult:
        """Set `.grad` in `update` to the gradient of the mean loss over the global batch.

        `seed` numbers this call in the run. `note` returns JSON that is sent to all workers; it is
        called when GPUs have completed the steps before. After an error, gradients and buffers are
        as before.
        """
        self._calls += 1
        started = time.perf_counter()
        data_before = batch.data_seconds
        parameters = self._trainable(update)
        overlap = self._overlap_of(parameters)
        self.manual.forget_cleared()
        are_clear = have_none(parameters)  # else this call adds to earlier ones
        if not are_clear:
            self.open_seals()
        # this step reuses the memory of exchanges, so what is still needed of it moves out:
        # slices of sharded optimizers, then complete gradients, then those that user code holds
        for bucket in overlap.buckets:
            if bucket.flat_buffer is not None:
                bucket.flat_buffer.stash_gradients(are_clear=are_clear and bucket.has_all)
        earlier = [] if are_clear else stash_gradients(parameters)
        for bucket in overlap.buckets:
            if bucket.flat_buffer is None:
                bucket.exchange.spare_held()
        # a loss of the whole batch needs the embeddings of all lanes, so each lane has two passes
        kind = LanePass if loss.embed is None else WholeBatchPass
        with self._restoring(parameters, earlier, overlap):
            lane_pass = kind(self, loss, batch, parameters, seed, overlap.active)
            begun = self.gpu_clock.mark()
            with self.manual.lanes():
                own_gradients = lane_pass.run()  # [subtrees, parameters], each a tensor or None
            computed = self.gpu_clock.mark()
            self.world.wait_for_gpu()
            report = lane_pass.report(own_gradients)  # reads losses, after a GPU has computed them
            elsewhere = batch.data_seconds - data_before + lane_pass.exchange_seconds
            self.compute_seconds += time.perf_counter() - started - elsewhere
            self.exchange_seconds += lane_pass.exchange_seconds

            started = time.perf_counter()
            overlap.finish(own_gradients)  # those that were not put during backward
            call = self._calls, report, note()
            receive = self.world.begin_all_gather_json(call, "exchanging losses")
            overlap.start()  # the remaining exchanges, while the message is on its way
            # all workers synchronize here; [report, note] of each, by rank
            reports = self._same_call(receive())
            results = [
                LaneResult(lane, rank, *result)
                for rank, (report, _) in enumerate(reports)
                for lane, *result in report["lanes"]
            ]
            self._check_finite(results, seed[0])
        written = sorted({number for report, _ in reports for number in report["buffers"]})
        self.buffers.learn(number for report, _ in reports for number in report["late"])
        self.buffers.end_step(written, [result.lane for result in results])
        if overlap.buckets:
            # a parameter that no lane used gets no gradient on any worker
            missing = set.intersection(*(set(report["missing"]) for report, _ in reports))
            overlap.set_gradients(parameters, missing, lane_pass.scale(results))
        else:
            # a single worker: its only subtree is the whole tree
            _set_gradients(parameters, own_gradients[0], lane_pass.scale(results))
        if earlier:
            _add_earlier(parameters, earlier)
        self.seal(parameters)
        self.exchange_seconds += time.perf_counter() - started
        self.gpu_clock.add("compute", begun, computed)
        self.gpu_clock.add("exchange", computed, self.gpu_clock.mark())
        return StepResult(results, [worker_note for _, worker_note in reports])

    @contextmanager
    def _restoring(
        self, parameters: Parameters, earlier: Gradients, overlap: Overlap
    ) -> Iterator[None]:
        """If the block fails, leave buffers and gradients as before this call."""
        try:
            yield
        except BaseException:
            self.buffers.restore()
            for parameter, gradient in zip_longest(parameters, earlier):
                parameter.grad = gradient
            for bucket in overlap.buckets:
                if bucket.flat_buffer is not None:
                    bucket.flat_buffer.show()
            self.seal(parameters)
            raise

    def _same_call(self, received: Iterable[tuple[int, Any, Any]]) -> list[tuple[Any, Any]]:
        """Return what workers sent in this call. Raises `WorldError` if it was another one."""
        reports = []
        for rank, (call, report, note) in enumerate(received):
            if call != self._calls:
                failed = max((call, rank), (self._calls, self.world.rank))[1]
                raise WorldError(
                    f"worker {failed} went on after an exception in run.backward, which other"
                    " workers still wait for; do not catch exceptions of run.backward that only"
                    " some workers may raise"
                )
            reports.append((report, note))
        return reports

    def _trainable(self, update: Module) -> Parameters:
        parameters = self._parameters.setdefault(update, ModuleParameters()).trainable(update)
        if not parameters:
            raise ModelError(
                f"{type(update).__name__} has no parameter that requires a gradient; call"
                " requires_grad_() or change update="
            )
        self._check_unchanged(update, parameters)
        return parameters

    def _check_finite(self, results: Iterable[LaneResult], step: int) -> None:
        if self.config.nonfinite_loss == "continue":
            return
        for result in results:
            if not math.isfinite(result.metrics["loss"]):
                raise NonFiniteLossError(
                    f"the loss is {result.metrics['loss']} at step {step} in lane {result.lane}"
                    f" (worker {result.rank}); lower the learning rate, clip gradients, or set"
                    " nonfinite_loss='continue'"
                )

    def _overlap_of(self, parameters: Parameters) -> Overlap:
        """Return the exchanges of these parameters, created once; a single worker has none."""
        if self._last_overlap is not None:
            last, shards, overlap = self._last_overlap
            if last is parameters and shards == len(self.shards):
                overlap.used_at = self._calls
                return overlap
        cache_key = (len(self.shards), *map(id, parameters)) if self.world.size > 1 else ()
        if cache_key not in self._overlaps:
            self._close_unused()
            self._overlaps[cache_key] = self._new_overlap(parameters)
        overlap = self._overlaps[cache_key]
        overlap.used_at = self._calls
        if self.world.size > 1:
            self._last_overlap = parameters, len(self.shards), overlap
        return overlap

    def _new_overlap(self, parameters: Parameters) -> Overlap:
        own_buckets = self._buckets_of(parameters) if self.world.size > 1 else []
        # Several hosts, or GPUs, each of which counts as one: send during the last backward. With
        # several devices per worker, sums are complete only when all devices are done.
        if own_buckets and len(self.world.hosts) > 1 and len(self.devices) == 1:
            return EarlyExchange(own_buckets, parameters, self.world, self.manual.has_nested)
        # one host, one lane per worker: a gradient is final when it arrives, and nothing is added
        if own_buckets and self.lanes == self.world.size:
            return EarlyCopies(own_buckets, parameters, self.manual.has_nested)
        return Overlap(own_buckets)  # several lanes are added first; a single worker has no buckets

    def _close_unused(self) -> None:
        """Free the exchanges of parameters that have not been trained together for long."""
        for cache_key, overlap in list(self._overlaps.items()):
            if self._calls - overlap.used_at > KEPT_CALLS:
                self._overlaps.pop(cache_key).close()

    def _buckets_of(self, parameters: Parameters) -> list[Bucket]:
        """Group sharded parameters by flat buffer, and the others by dtype and size."""
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        grouped = []
        for flat_buffer in self.flat_buffers():
            numbers = [
                number_of.pop(id(parameter), None) for parameter in flat_buffer.exchange.parameters
            ]
            if set(numbers) != {None}:
                grouped.append(Bucket(flat_buffer.exchange, numbers, flat_buffer))
        others = [parameters[n] for n in number_of.values()]
        for group in buckets(others, self.world, self.round_to):
            spec = ExchangeSpec(group, self.lanes, self.world, self.round_to)
            grouped.append(Bucket(choose_exchange(spec), [number_of[id(p)] for p in group], None))
        return grouped


def _name_in(module: Module, parameter: Parameter) -> str:
    names = [name for name, candidate in module.named_parameters() if candidate is parameter]
    return names[0] if names else "a parameter"


def _set_gradients(parameters: Parameters, gradients: Gradients, scale: float) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else scaled(gradient, parameter.dtype, scale)


def _add_earlier(parameters: Parameters, earlier: Gradients) -> None:
    """Accumulate onto earlier gradients, as backward does in plain PyTorch."""
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def clip_gradients(
    parameters: Parameters, buffers: Sequence[FlatBuffer], world: World, max_norm: float
) -> Tensor:
    """Scale the parameters' gradients to a norm of at most `max_norm`; return the norm before.

    It has the same bits at any number of workers: squares are summed over rows of 64 elements of a
    parameter, which are never divided between workers, and the rows of all parameters are added in
    the same order. Collective for each of the `buffers` that has any of the parameters.
    """
    ids = set(map(id, parameters))
    buffers = [
        buffer for buffer in buffers if not ids.isdisjoint(map(id, buffer.exchange.parameters))
    ]
    for buffer in buffers:
        buffer.drop_cleared()
    norm = gradient_norm(parameters, buffers, world)
    in_slices = {id(parameter) for buffer in buffers for parameter in buffer.exchange.parameters}
    unsharded = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and id(parameter) not in in_slices
    ]
    sliced = [part for buffer in buffers for part in buffer.gradients_of(ids)]
    scale_gradients([*unsharded, *sliced], norm, max_norm)
    return norm.float()


def gradient_norm(parameters: Parameters, buffers: Sequence[FlatBuffer], world: World) -> Tensor:
    """Return the float64 2-norm of the parameters' gradients, some of them sharded in `buffers`.

    Collective for each buffer.
    """
    rows: dict[int, Tensor] = {}  # float64 sums of squares of each row, by the parameter's id
    for buffer in buffers:
        rows.update(_sharded_rows(buffer, world))
    for parameter in parameters:  # of unsharded optimizers: the same on every worker
        if id(parameter) not in rows:
            rows[id(parameter)] = _rows(parameter)
    # one sum over the rows of all parameters, in the order of the parameters, not of the buffers
    return torch.cat([rows[id(parameter)] for parameter in parameters]).sum().sqrt()


def scale_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {gradient.dtype for gradient in gradients}:
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(group, coefficient.to(dtype))


def _rows(parameter: Parameter) -> Tensor:
    size = parameter.numel()
    if parameter.grad is None:
        return torch.zeros(-(-size // ALIGNMENT), dtype=torch.float64, device=parameter.device)
    values = flattened(parameter.grad)  # in storage order, as in flat storage
    if size % ALIGNMENT:
        values = torch.nn.functional.pad(values, (0, -size % ALIGNMENT))
    return _row_squares(values)


def _sharded_rows(buffer: FlatBuffer, world: World) -> dict[int, Tensor]:
    held, exchange = torch.zeros_like(buffer.own), buffer.exchange
    for segment in buffer.segments:
        if segment.parameter.grad is not None:
            segment.view_in(held).copy_(segment.parameter.grad)
    # across "host", this worker holds the slices of its partners as well, but counts only its own
    own_row = exchange.own_number - exchange.held.start
    # a row of [held, slice_size], to float64 [slice_size / 64]
    squares = _row_squares(held.view(len(exchange.held), -1)[own_row])
    rows = squares.new_empty(world.size, len(squares))  # [workers, slice_size / 64], by rank
    world.all_gather(rows.view(-1), squares, "adding up the gradient norm")
    flat = exchange.by_number(rows).view(-1)  # float64 [flat_size / 64]
    # without rows of padding: unsharded gradients have none
    starts = (offset // ALIGNMENT for offset in exchange.layout.offsets)
    return {
        id(parameter): flat[start : start - (-parameter.numel() // ALIGNMENT)]
        for parameter, start in zip(exchange.parameters, starts, strict=False)
    }


def _row_squares(flat: Tensor) -> Tensor:
    dtype = torch.promote_types(flat.dtype, torch.float32)
    # [rows, 64] to one norm per row
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=dtype)
    return norms.double().square()
