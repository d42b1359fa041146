"""The interface of user code: `init` and `Run`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from samestep.cluster import ProcessInfo, find_process
from samestep.config import Config, merge
from samestep.data.batch import Batch
from samestep.data.loader import plan_batches
from samestep.data.plan import GroupBy
from samestep.data.random_state import key
from samestep.errors import ConfigError, ModelError, OptimizerError
from samestep.evaluate import Evaluation
from samestep.host import trim_memory
from samestep.run.loops import PlannedLoop, StreamLoop, make_plan
from samestep.run.mixins import Collectives, Log
from samestep.run.session import Session
from samestep.step.clip import gradient_norm, scale_gradients
from samestep.step.lane_pass import Count, LossFn, LossSpec, Reduction
from samestep.step.means import Means
from samestep.step.replicas import replicate
from samestep.step.shard import Shard, check_shardable

Module = TypeVar("Module", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Collate = Callable[[list[Any]], Any]


def init(**options: Any) -> Run:
    """Join the workers of a run and return the run, a context manager.

    The rank and the address of the other workers come from the environment of `samestep run`,
    `torchrun`, MPI, Slurm or Kubernetes. Without any of them, this process is the only worker.

    Args:
        **options: The options below. `SAMESTEP_*` environment variables override them.

    Raises:
        ConfigError: An option is unknown or its value is invalid.
        WorldError: The workers did not find each other within `timeout`.

    Example:
        >>> with ss.init(lanes=4, dir="runs/one") as run:
        ...     run.print("rank", run.rank, "of", run.world_size, "with", run.lanes, "lanes")
        rank 0 of 1 with 4 lanes
    """
    return Run(merge(options), find_process(os.environ))


class Run(Collectives, Log):
    """A training job, as seen by one of its workers; `init` creates it.

    All workers must make the same calls in the same order.

    Attributes:
        rank (int): Rank of this worker, from 0 to `world_size - 1`.
        world_size (int): Number of workers.
        is_main (bool): Whether this is rank 0.
        lanes (int): Number of lanes, the fixed slices of every global batch.
        device (torch.device): First device of this worker.
        devices (list[torch.device]): All devices of this worker.
        dir (Path | None): Output directory.
        config (Config): Final values of all options.

    Example:
        >>> with ss.init(lanes=2, seed=1) as run:
        ...     print(run.device, run.config.seed, run.dir)
        cpu 1 None
    """

    def __init__(self, config: Config, process: ProcessInfo) -> None:
        self.rank, self.world_size = process.rank, process.world_size
        self.is_main = process.rank == 0
        self._session = session = Session(config, process)
        self.config, self.dir, self.lanes = session.config, config.dir, session.lanes.lanes
        self.devices, self.device = session.devices, session.devices[0]
        self._world, self._record = session.world, session.record
        self._lanes, self._progress = session.lanes, session.progress
        self._sharded: set[torch.nn.Parameter] = set()

    @property
    def step(self) -> int:
        """Number of completed steps, over all loops and resumes.

        Example:
            >>> for batch in run.batches(train_set, 64, steps=2):
            ...     print(run.step)
            0
            1
        """
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Epoch of the last loop, counted from 0.

        Example:
            >>> for batch in run.batches(train_set, 101, epochs=2):
            ...     print(run.epoch)
            0
            1
        """
        return self._progress.epoch

    def replicate(self, module: Module) -> Module:
        """Move a module to the worker's devices, with rank 0's values on every worker.

        Args:
            module: A module with the same names, shapes and dtypes on every worker.

        Returns:
            The same module, changed in place.

        Raises:
            ModelError: Names, shapes or dtypes differ between workers.

        Example:
            >>> model = run.replicate(Net())
        """
        replicate(module, self.device, self._world)
        self._lanes.add(module)
        self._session.divergence.modules.append(module)
        return module

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Make each worker update only its slice of the parameters (ZeRO, stage 1).

        This saves time and memory and gives the same bits. Gradients of these parameters are stored
        in slices, and their `.grad` stays None. Call it before the first step. See `Rajbhandari et
        al., 2020 <https://arxiv.org/abs/1910.02054>`__.

        Args:
            optimizer: An elementwise optimizer of `torch.optim`.

        Returns:
            The same optimizer, changed in place.

        Raises:
            OptimizerError: The optimizer is not elementwise, or a parameter is already sharded.

        Example:
            >>> optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3))
        """
        check_shardable(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._sharded.isdisjoint(parameters):
            raise OptimizerError(
                f"a parameter can be sharded only once, but this {type(optimizer).__name__} has "
                "parameters that are already sharded"
            )
        if self.world_size > 1:
            self._lanes.shards.append(Shard(optimizer, self.lanes, self._world))
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
            trim_memory()  # of the parameters before they moved into flat storage
        self._sharded.update(parameters)
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
        """Return a loop over the global batches of a map-style data set, one per step.

        It continues at the exact sample after a resume. Iterating a batch yields the lane batches
        of this worker. The loop has the attributes `step` (the number of the current step, from 1),
        `steps` (the number of the last step) and `steps_per_epoch`.

        Args:
            dataset: Data set with `__len__` and `__getitem__`, and optionally `__getitems__`.
            batch_size: Samples in a global batch, over all lanes and workers.
            epochs: Total number of epochs, over all resumes and calls with this name.
            steps: Total number of steps, counted the same way. Without both, the current epoch.
            shuffle: Whether to draw a new order of the samples for every epoch.
            drop_last: Whether to drop a last batch that is short.
            collate_fn: Makes a lane batch from a list of samples; default: torch's.
            loader_workers: Number of processes that load ahead; 0 loads in this process.
            group_by: The group of each sample, or a function of its index. All samples of a lane
                batch are then of one group.
            name: Name of the loop, under which its position is saved.

        Raises:
            ConfigError: A number is invalid, or `drop_last` is used with `group_by`.
            DataError: The data set is empty or not map-style, or changed within an epoch.

        Example:
            >>> for batch in run.batches(train_set, 32, epochs=1):
            ...     means = run.backward(loss_fn, model, batch)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        plan = make_plan(
            dataset,
            batch_size,
            self.lanes,
            key(self.config.seed, f"order {name}"),
            shuffle=shuffle,
            drop_last=drop_last,
            group_by=group_by,
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

    def streams(
        self, make_stream: Callable[[int], Any], *, steps: int | None = None, name: str
    ) -> StreamLoop:
        """Return a loop over iterable data, with one endless source per lane.

        Each step takes the next item of every lane's source as its lane batch. After a resume, a
        source with `state_dict` and `load_state_dict` continues from its state; any other is
        created again and read up to its position. The loop has the attributes `step` and `steps`.

        Args:
            make_stream: Returns the iterable of a lane, given the lane's number.
            steps: Total number of steps, over all resumes and calls with this name; None: endless.
            name: Name of the loop, under which its position is saved.

        Raises:
            ConfigError: `steps` is invalid.
            DataError: A source has ended.

        Example:
            >>> from itertools import repeat
            >>> for batch in run.streams(lambda lane: repeat(torch.ones(4)), steps=1, name="ones"):
            ...     print([lane_batch.shape for lane_batch in batch])
            [torch.Size([4]), torch.Size([4])]
        """
        lanes, seed = self._lanes.own, self.config.seed
        return StreamLoop(self._progress, name, make_stream, lanes, seed, steps=steps)

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
        """Add the gradient of the mean loss over all items of a global batch to `.grad`.

        Args:
            loss_fn: Called once per lane as `loss_fn(model, lane_batch)`. Returns a scalar loss,
                the mean over the lane's items, or (loss, dict of scalars).
            model: First argument of `loss_fn`.
            batch: Batch of a loop.
            update: Module whose parameters get gradients; default: `model`.
            count: Returns the number of items in a lane batch, over which the lane's mean is taken;
                default: its samples, or in streams the length of its first tensor. Lanes without
                items are skipped.
            reduction: With "sum", the loss and the scalars are sums, which are divided by
                max(1, items of all lanes). Lanes without items are then run as well.

        Returns:
            The means over all items, with the same bits at any number of workers.

        Raises:
            LossError: The loss is not a scalar, or has no gradient.
            NonFiniteLossError: The loss is NaN or infinite.
            ModelError: The module to update is not a `torch.nn.Module`.

        Example:
            >>> for batch in run.batches(train_set, 32, steps=1):
            ...     means = run.backward(loss_fn, model, batch)
            >>> list(means)
            ['loss', 'accuracy']
        """
        update = model if update is None else update
        if not isinstance(update, torch.nn.Module):
            raise ModelError(
                "backward must update a torch.nn.Module, "
                f"got {type(update).__name__}; choose the module with update="
            )
        if reduction not in {"mean", "sum"}:
            raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        loss, progress = LossSpec(loss_fn, model, count, reduction), self._progress
        result = self._lanes.backward(loss, batch, update, progress.next_call(), progress.note())
        progress.receive(result.notes)
        return Means(result.results, reduction)

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
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.lanes == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        ids = set(map(id, parameters))
        flat_buffers = [
            buffer
            for buffer in self._lanes.flat_buffers()
            if not ids.isdisjoint(map(id, buffer.exchange.parameters))
        ]
        norm = gradient_norm(parameters, flat_buffers, self._world)
        whole = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sharded = [part for buffer in flat_buffers for part in buffer.gradients_of(ids)]
        scale_gradients([*whole, *sharded], norm, max_norm)
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
        """Evaluate a model on every sample of a data set once, without gradients.

        Each worker evaluates blocks of `batch_size` consecutive samples, with the model in
        evaluation mode. Results have the same bits at any number of workers and lanes.

        Args:
            fn: Called once per block as `fn(model, batch)`. Returns what a loss function returns,
                or a dict of scalars (means over the block) and new metrics (`Metric` objects or
                torchmetrics objects), which are merged.
            model: First argument of `fn`.
            dataset: Map-style data set.
            batch_size: Samples per block.
            gather: Whether `fn` returns one output per sample instead: a tensor or a list, or a
                dict or tuple of them.
            count: Returns the number of items in a batch, over which means are taken; default:
                samples.
            collate_fn: Makes a batch from a list of samples; default: torch's.
            loader_workers: Number of processes that load ahead.

        Returns:
            A dict of means and metrics. With `gather`, all outputs in data set order on rank 0, and
            None on other ranks.

        Raises:
            EvaluationError: Results cannot be merged.

        Example:
            >>> sorted(run.evaluate(loss_fn, model, test_set, 16))
            ['accuracy', 'loss']
            >>> logits = lambda model, batch: model(batch[0])
            >>> run.evaluate(logits, model, test_set, 16, gather=True).shape
            torch.Size([53, 10])
        """
        evaluation = Evaluation(
            self._lanes, dataset, batch_size, collate_fn=collate_fn, loader_workers=loader_workers
        )
        with self._world.status.doing("evaluating"):
            return evaluation.outputs(fn, model) if gather else evaluation.means(fn, model, count)

    def track(self, **objects: Any) -> None:
        """Name the objects that snapshots save, and restore them if the run resumes.

        Args:
            **objects: Objects with `state_dict` and `load_state_dict`, with a state of tensors and
                plain values.

        Raises:
            SnapshotError: A name is taken, or the snapshot does not fit an object.

        Example:
            >>> run.track(model=model, optimizer=optimizer)
        """
        for name, item in objects.items():
            shard = next((shard for shard in self._lanes.shards if shard.optimizer is item), None)
            self._session.snapshots.tracked.add(name, item, shard)
            if isinstance(item, torch.optim.Optimizer):
                self._progress.time_steps(item)

    def snapshot(self, *, score: float | None = None) -> None:
        """Take a snapshot of the tracked objects, in a loop at the end of the current step.

        Args:
            score: Snapshots with the highest scores are kept (`keep_best`).

        Raises:
            SnapshotError: An earlier snapshot could not be written.

        Example:
            >>> run.snapshot(score=0.93)
        """
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
        """Leave the run without a last snapshot; the end of a `with` block takes one and closes.

        Example:
            >>> run = ss.init(lanes=2)
            >>> run.close()
        """
        self._session.close()
