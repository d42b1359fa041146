"""Methods of `Run` for gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samestep.comm.base import World
from samestep.data.batch import Batch
from samestep.data.lane_loop import LaneSteps, finished
from samestep.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from samestep.guards.metric_guard import state_of_body
from samestep.metrics import Means
from samestep.run.progress import Progress
from samestep.run.session import Session
from samestep.step.finite import Nonfinite
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import Count, LaneResult, LossFn, LossSpec, Reduction
from samestep.step.scaling import GradScaler, clip_gradients
from samestep.step.whole_batch import embeddings_of_one_lane, loss_of_one_lane


class Training:
    """The methods of `Run` that compute gradients, in each form of a loop, and change them."""

    _session: Session
    _world: World
    _lanes: LaneEngine
    _progress: Progress
    _joined: dict[tuple[int, ...], torch.nn.ModuleList]  # of `batch.lanes`, by ids
    # around the first `backward`, in which models are compiled
    _first_call: AbstractContextManager[None]
    lanes: int
    device: torch.device

    def backward(
        self,
        loss_fn: LossFn,
        model: Any,
        batch: Batch,
        *,
        update: torch.nn.Module | None = None,
        count: Count | None = None,
        reduction: Reduction = "mean",
        embed: LossFn | None = None,
    ) -> Means:
        """Add the gradient of the mean loss over all items of a global batch to `.grad`.

        Args:
            loss_fn: Called once per lane as `loss_fn(model, lane_batch)`. Returns a scalar loss,
                the mean over the lane's items, or (loss, dict of scalars). A boolean or integer
                tensor in the dict has an entry per item, and of a pair (sum, count) of scalars, the
                sum of sums is divided by the sum of counts; these means over all lanes are exact.
            model: First argument of `loss_fn`.
            batch: `Batch` of a loop; its `lanes` let a script compute losses without a function.
            update: Module whose parameters get gradients; default: `model`.
            count: Returns the number of items in a lane batch, which is still in host memory, over
                which the lane's mean is taken, or the sum of their weights, a float; default: its
                samples, the length that all of its tensors and lists have. Lanes without items are
                skipped.
            reduction: With "sum", the loss and the scalars are sums, which are divided by the
                items of all lanes, if there are any. Lanes without items are then run as well.
            embed: For losses that compare samples with each other. Called per lane as
                `embed(model, lane_batch)`, twice with the same random numbers. Returns a tensor
                [items, ...], or a tuple or dict of them. `loss_fn(model, embeddings)` is then
                called once per worker, with the rows of all lanes, and returns the loss of the
                global batch.

        Returns:
            The means over all items, with the same bits at any number of workers.

        Raises:
            DataError: The batch is not that of a loop, or its samples cannot be counted.
            LossError: The loss is not a scalar, or has no gradient; a mean needs `count`; `embed`
                returns other values when it is called again.
            ConfigError: `reduction` is unknown, or `embed` is used with `count` or `reduction`.
            NonFiniteLossError: The loss or its gradient is NaN or infinite. With
                `nonfinite_loss="skip"`, the call leaves gradients and buffers as they were, and
                only 100 such steps in a row are an error.
            WorldError: A worker caught an exception of an earlier call, which others wait for.
            ModelError: The module to update is not a `torch.nn.Module`.

        Example:
            >>> for batch in run.batches(train_set, 32, steps=1):
            ...     means = run.backward(loss_fn, model, batch)
            >>> list(means)
            ['loss', 'accuracy']
        """
        if not isinstance(batch, Batch):
            raise DataError(
                "run.backward expected a batch of a loop over run.batches or run.streams, got"
                f" {type(batch).__name__}; write `for batch in run.batches(dataset, batch_size):`"
                " and pass that batch"
            )
        update = model if update is None else update
        if not isinstance(update, torch.nn.Module):
            raise ModelError(
                "backward must update a torch.nn.Module, "
                f"got {type(update).__name__}; choose the module with update="
            )
        _check_options(count, reduction, embed)
        if embed is not None and self.lanes == 1:
            loss_fn, embed = loss_of_one_lane(loss_fn, embed), None
        loss = LossSpec(loss_fn, model, count, reduction, embed)
        return finished(self._steps(loss, batch, update))

    def _begin_lanes(
        self,
        batch: Batch,
        modules: tuple[torch.nn.Module, ...],
        *,
        count: Count | None,
        reduction: Reduction,
        embed: LossFn | None,
        variables: Mapping[str, Any],
        kept: Mapping[str, Any],
    ) -> tuple[LaneSteps[Means], bool]:
        """Return the computation of a gradient from losses of the body of a loop.

        Also whether the body runs for some lanes only, on each of several workers.
        """
        for module in modules or [None]:
            if not isinstance(module, torch.nn.Module):
                raise ModelError(
                    "batch.lanes needs the replicated modules that get gradients, as in"
                    f" batch.lanes(model), got {type(module).__name__}"
                )
        _check_options(count, reduction, embed)
        update = modules[0]
        if len(modules) > 1:
            update = self._joined.setdefault(tuple(map(id, modules)), torch.nn.ModuleList(modules))
        if embed is not None and self.lanes == 1:
            embed = embeddings_of_one_lane(embed)
        loss = LossSpec(None, update, count, reduction, embed, state_of_body(variables), kept)
        return self._steps(loss, batch, update), embed is None and self.lanes > 1

    def _steps(self, loss: LossSpec, batch: Batch, update: torch.nn.Module) -> LaneSteps[Means]:
        progress = self._progress
        call, first_call = progress.next_call(batch), self._first_call
        self._first_call = nullcontext()
        try:
            # The engine calls `note` when it sends the losses: it has the signals until then.
            with first_call:
                result = yield from self._lanes.steps(loss, batch, update, call, progress.note)
        except GeneratorExit:  # a loop over lanes was left
            progress.take_back_call()
            raise
        except NonFiniteLossError as error:
            results = [lane for lane in error.results if isinstance(lane, LaneResult)]
            nonfinite = error.gradient if isinstance(error.gradient, Nonfinite) else None
            if advice := self._look_at(batch, call, results, loss, nonfinite):
                raise NonFiniteLossError(f"{error}; {advice}") from None
            raise
        progress.receive(result.notes)  # of all workers, sent along with the losses
        self._look_at(batch, call, result.results, loss, result.nonfinite)
        if result.skipped is not None:
            progress.skipped.add(progress.step, result.skipped)
        means = Means(result.results, loss.reduction)
        progress.show(means)
        return means

    def _look_at(
        self,
        batch: Batch,
        call: tuple[int, int],
        results: Sequence[LaneResult],
        loss: LossSpec,
        nonfinite: Nonfinite | None,
    ) -> str:
        """Return what an alert about a loss or gradient says of its samples, "" without one."""
        alerts = self._progress.alerts
        if nonfinite is not None:
            return alerts.note_gradient(batch, call, results, nonfinite)
        are_sums, is_shared = loss.reduction == "sum", self._lanes.shares(loss)
        return alerts.look(batch, call, results, are_sums=are_sums, is_shared=is_shared)

    def clip_grad_norm(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their global 2-norm is at most `max_norm`.

        Works for complete and sharded gradients. With one lane, it is the same as
        `torch.nn.utils.clip_grad_norm_`. See `Pascanu et al., 2013
        <https://arxiv.org/abs/1211.5063>`__, algorithm 1.

        Args:
            model: Module whose gradients are scaled in place.
            max_norm: Largest norm.

        Returns:
            The norm before scaling, a scalar tensor.

        Example:
            >>> norm = run.clip_grad_norm(model, 1.0)
        """
        self._lanes.optimizers.open_seals()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.lanes == 1:
            segments = self._lanes.models.segments
            updated = [segments.get(id(parameter), parameter) for parameter in parameters]
            norm = torch.nn.utils.clip_grad_norm_(updated, max_norm)
        else:
            norm = clip_gradients(parameters, self._lanes.flat_buffers(), max_norm)
        self._lanes.optimizers.seal(parameters)
        self._progress.add_norm(norm, max_norm)
        return norm

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """Return a `torch.amp.GradScaler` for float16, on whose decisions all workers agree.

        Let the loss function return `scaler.scale(loss)`. Call `scaler.unscale_(optimizer)` before
        clipping, and `scaler.step(optimizer)` and `scaler.update()` on all workers. Track it.

        Args:
            **options: Those of `torch.amp.GradScaler`, such as `init_scale`.

        Example:
            >>> scaler = run.grad_scaler(init_scale=1024.0)
            >>> run.track(scaler=scaler)
        """
        seals = self._lanes.optimizers.seals
        scaler = GradScaler(self._world, seals, self.device.type, **options)
        self._lanes.gradients.scalers.append(scaler)
        return scaler


def _check_options(count: Count | None, reduction: str, embed: LossFn | None) -> None:
    if reduction not in {"mean", "sum"}:
        raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if embed is not None and (count is not None or reduction != "mean"):
        raise ConfigError(
            "embed cannot be used with count or reduction, because the loss is that of the "
            "whole batch; leave them out"
        )
