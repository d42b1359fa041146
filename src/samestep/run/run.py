"""Run: what user code sees. Every call is made by all workers, in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from samestep.cluster import ProcessInfo, find_process
from samestep.config import Config, merge
from samestep.data.batch import Batch, LaneStream, stream_batches
from samestep.data.loader import plan_batches
from samestep.data.plan import GroupBy, GroupedPlan, Plan, ShuffledPlan
from samestep.data.random_state import key
from samestep.errors import ConfigError, DataError, ModelError, OptimizerError
from samestep.evaluate import Evaluation
from samestep.host import trim_memory
from samestep.run.loops import PlannedLoop, StreamLoop
from samestep.run.session import Session
from samestep.run.values import pixels, scalars_of
from samestep.step.clip import gradient_norm, scale_gradients
from samestep.step.lane_pass import Count, LossFn, LossSpec, Reduction
from samestep.step.means import Means
from samestep.step.replicas import replicate
from samestep.step.shard import Shard, check_shardable

Module = TypeVar("Module", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Collate = Callable[[list[Any]], Any]


def init(**options: Any) -> Run:
    """Join what started this process (`samestep run`, `torchrun`, or nothing) and return the run, a context manager.

    `options` are the fields of `samestep.config.Config`; `SAMESTEP_*` variables win over them.
    Raises `ConfigError` for a wrong option and `WorldError` when the workers do not find each
    other.
    """
    return Run(merge(options), find_process(os.environ))


class Run:
    """One training job, as one of its workers sees it.

    Attributes: `rank` of `world_size`; `is_main`, true on rank 0; `lanes`; `device`, and all
    `devices` of this worker; `dir`, the output directory or None; `config`, every option as it was
    given and settled.
    """

    def __init__(self, config: Config, place: ProcessInfo) -> None:
        self.rank, self.world_size, self.is_main = place.rank, place.world_size, place.rank == 0
        self._session = session = Session(config, place)
        self.config, self.dir, self.lanes = session.config, config.dir, session.lanes.lanes
        self.devices, self.device = session.devices, session.devices[0]
        self._world, self._record, self._lanes, self._progress = (
            session.world,
            session.record,
            session.lanes,
            session.progress,
        )
        # by id, which is theirs as long as they are here
        self._sharded: dict[int, torch.nn.Parameter] = {}

    @property
    def step(self) -> int:
        """Steps completed, over all loops; in the body of a loop, the index of the step that runs."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Epoch of the loop that ran last."""
        return self._progress.epoch

    def replicate(self, module: Module) -> Module:
        """Move a module to the worker's devices and make it equal everywhere, as rank 0 has it; returns the same module.

        Raises `ModelError` when names, shapes or dtypes differ between workers.
        """
        replicate(module, self.device, self._world)
        self._lanes.add(module)
        self._session.divergence.modules.append(module)
        return module

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Let each worker update its slice of the optimizer's parameters; returns the same optimizer.

        Its parameters' gradients then live in slices, and their `.grad` stays None. Call it before
        the first step. Raises `OptimizerError` for optimizers that are not elementwise, and for
        parameters that are sharded already.
        """
        check_shardable(optimizer)
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if not self._sharded.keys().isdisjoint(map(id, parameters)):
            raise OptimizerError(
                f"this {type(optimizer).__name__} has parameters that were sharded before; shard a parameter once"
            )
        if self.world_size > 1:
            self._lanes.shards.append(Shard(optimizer, self.lanes, self._world))
            parameters += [piece for group in optimizer.param_groups for piece in group["params"]]
            trim_memory()  # where parameters were before they moved into flat storage
        self._sharded.update((id(parameter), parameter) for parameter in parameters)
        return optimizer

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        loader_workers: int = 0,
        group_by: GroupBy | None = None,
        name: str = "train",
    ) -> PlannedLoop:
        """Return the global batches of a map-style data set, one a step, from where the loop `name` stands.

        `batch_size` is the global one. The loop ends after `epochs` epochs or `steps` steps in all,
        counted over resumes and over every call with this name; with neither, at the end of the
        epoch. `group_by` (a group a sample, or a function of the index) fills lane batches with
        samples of one group. `loader_workers` processes load ahead.

        The returned loop counts: `loop.steps_per_epoch`, `loop.steps` (the number of the last step)
        and, in its body, `loop.step`, the number of the current step, which is 1 for the first.
        """
        iterable = isinstance(dataset, torch.utils.data.IterableDataset)  # these may say a length
        if iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"{type(dataset).__name__} has no length or no __getitem__; for iterable data use run.streams"
            )
        plan = self._plan(
            len(dataset),
            batch_size,
            key(self.config.seed, f"order {name}"),
            shuffle,
            drop_last,
            group_by,
        )
        batches = partial(
            plan_batches,
            plan,
            dataset,
            self._lanes.own,
            seed=key(self.config.seed, f"fetch {name}"),
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            pin_memory=self.device.type == "cuda",
        )
        return PlannedLoop(self._progress, name, plan, batches, epochs=epochs, steps=steps)

    def _plan(
        self,
        size: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        group_by: GroupBy | None,
    ) -> Plan:
        if group_by is None:
            return ShuffledPlan(
                size, batch_size, self.lanes, seed, shuffle=shuffle, drop_last=drop_last
            )
        if drop_last:
            raise ConfigError(
                "drop_last was given with group_by; expected one of them: grouped batches have no last one, any may be short"
            )
        return GroupedPlan(size, batch_size, self.lanes, seed, shuffle=shuffle, groups=group_by)

    def streams(
        self, make_stream: Callable[[int], Any], *, steps: int | None = None, name: str
    ) -> StreamLoop:
        """Return batches, one a step: each lane's next item of its own endless source `make_stream(lane)`.

        The loop ends after `steps` steps in all, counted over resumes and over every call with this
        name; without `steps`, never. A lane's items are counted by its batch's first tensor; where
        batches are lists, give `count` to `backward`. A source with `state_dict` and
        `load_state_dict` continues by them after a resume; any other is read again from its start.
        """
        self._progress.settle()
        streams = {
            lane: LaneStream(make_stream, name, lane, self.config.seed) for lane in self._lanes.own
        }
        for lane, stream in streams.items():
            if lane in self._session.resumed_streams.get(name, {}):
                stream.load_state_dict(self._session.resumed_streams[name][lane])
        self._progress.streams[name] = streams
        batches = partial(stream_batches, streams, self._lanes.own)
        return StreamLoop(self._progress, name, batches, steps=steps)

    def backward(
        self,
        loss_fn: LossFn,
        model: Any,
        batch: Batch,
        *,
        update: torch.nn.Module | None = None,
        count: Count | None = None,
        reduction: Reduction = "mean",
    ) -> Means:
        """Run every lane of a batch and leave the gradient of the mean over all its items in `.grad`; returns the global means.

        `loss_fn(model, lane_batch)` returns a scalar loss, the mean over the lane's items, or
        (loss, dict of scalars). `update` is the module whose parameters get gradients (default
        `model`). `count(lane_batch)` gives the number of items a lane's mean is over (default: its
        samples). With `reduction="sum"` the loss and the scalars are sums, which the items of all
        lanes divide (1 where there are none); lanes without items are run then, too. Like backward
        in PyTorch, it adds to gradients that are there. Raises `LossError` for a loss that is no
        scalar or has no gradient, `NonFiniteLossError` for NaN and infinity.
        """
        update = model if update is None else update
        if not isinstance(update, torch.nn.Module):
            raise ModelError(
                f"backward was to update {type(update).__name__}; expected a torch.nn.Module: name it with update="
            )
        if reduction not in {"mean", "sum"}:
            raise ConfigError(f"reduction={reduction!r} was given; expected 'mean' or 'sum'")
        loss = LossSpec(loss_fn, model, count, reduction)
        result = self._lanes.backward(
            loss, batch, update, self._progress.next_call(), self._progress.note()
        )
        self._progress.agree(result.notes)
        return Means(result.results, reduction)

    def clip_grad_norm(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients of a model so that their 2-norm is at most `max_norm`; returns the norm before, a scalar tensor.

        Right for whole and sharded gradients. With one lane it is `torch.nn.utils.clip_grad_norm_`.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.lanes == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        ids = set(map(id, parameters))
        flat_buffers = [
            flat_buffer
            for flat_buffer in self._lanes.flat_buffers()
            if ids.intersection(map(id, flat_buffer.exchange.parameters))
        ]
        norm = gradient_norm(parameters, flat_buffers, self._world)
        whole = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale_gradients(
            [*whole, *(part for one in flat_buffers for part in one.gradients_of(ids))],
            norm,
            max_norm,
        )
        return norm.float()

    def evaluate(
        self,
        fn: Callable[[Any, Any], Any],
        model: Any,
        dataset: Any,
        batch_size: int,
        *,
        gather: bool = False,
        count: Count | None = None,
        collate_fn: Collate | None = None,
        loader_workers: int = 0,
    ) -> Any:
        """Return means and metrics of `fn(model, batch)` over a data set, using each sample once.

        Each worker evaluates blocks of `batch_size` consecutive samples; results have the same bits
        at any number of workers. `fn` returns what a loss function returns, or a dict of scalars
        and metrics (new `samestep.Metric` objects, or torchmetrics objects), which are merged. With
        `gather`, it returns one output per sample (a tensor, a list, or a dict or tuple of them),
        and rank 0 gets all of them in data set order (None elsewhere). The model is in evaluation
        mode and no gradients are kept. Raises `EvaluationError` for results that cannot be merged.
        """
        evaluation = Evaluation(
            self._lanes, dataset, batch_size, collate_fn=collate_fn, loader_workers=loader_workers
        )
        with self._world.status.doing("evaluating"):
            return evaluation.outputs(fn, model) if gather else evaluation.means(fn, model, count)

    def gather(self, obj: Any) -> list[Any] | None:
        """Return every worker's picklable object by rank on rank 0, None elsewhere."""
        return self._world.gather_object(obj, "gathering an object")

    def all_gather(self, obj: Any) -> list[Any]:
        """Return every worker's picklable object, by rank."""
        return self._world.all_gather_object(obj, "gathering an object")

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's picklable object."""
        return self._world.broadcast_object(obj, "broadcasting an object")

    def reduce_dict(self, values: Mapping[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Return the sums, or means, over workers of a dict of scalars and tensors; all workers have the same names."""
        everyone = self._world.all_gather_object(dict(values), "reducing a dict")
        for rank, other in enumerate(everyone):
            if other.keys() != everyone[0].keys():
                raise DataError(
                    f"reduce_dict got {sorted(everyone[0])} on worker 0 and {sorted(other)} on worker {rank}; expected the same names"
                )
        return {
            name: sum(other[name] for other in everyone) / (self.world_size if average else 1)
            for name in everyone[0]
        }

    def barrier(self, what: str) -> None:
        """Return when every worker has arrived; `what` names the reason in errors."""
        self._world.barrier(what)

    def log(self, means: Mapping[str, Any] | None = None, **scalars: Any) -> None:
        """Record scalars of this step: means of `backward` (with the lowest and highest worker), and others by name.

        Means that are given by name have it in front: `generators=means` gives `generators/loss`
        and so on.
        """
        values, low, high = scalars_of(means or {}, scalars)
        self._record.scalars(
            self.step, self.epoch, values, low, high, between=self._progress.between_steps
        )

    def log_image(self, name: str, image: Any) -> None:
        """Record an image: [H, W], [1, H, W], [3, H, W] or [H, W, 3], uint8, or floating point in [0, 1]."""
        if self.is_main and self.dir is not None:
            self._record.image(self.step, name, pixels(image), between=self._progress.between_steps)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, not once a worker."""
        if self.is_main:
            print(*values, **{"flush": True, **options})  # noqa: T201

    def track(self, **objects: Any) -> None:
        """Name what a snapshot holds (anything with `state_dict` and `load_state_dict`), and restore it when the run resumes."""
        for name, item in objects.items():
            shard = next((shard for shard in self._lanes.shards if shard.optimizer is item), None)
            self._session.keeper.tracked.add(name, item, shard)
            if isinstance(item, torch.optim.Optimizer):
                self._progress.time_steps(item)

    def snapshot(self, *, score: float | None = None) -> None:
        """Take a snapshot of what is tracked; inside a loop's body, at the end of the step. The highest scores are kept."""
        self._progress.snapshot(score)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._session.end()
            elif not isinstance(error, (SystemExit, KeyboardInterrupt)):
                self._session.report_failure(error)
        finally:
            self.close()

    def close(self) -> None:
        """Leave the world and put the process back as it was."""
        self._session.close()
