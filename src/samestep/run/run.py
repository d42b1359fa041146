"""The interface of user code: `init` and `Run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from samestep.cluster import ProcessInfo
from samestep.comm.connect import find_worker
from samestep.config import Config, merge
from samestep.data.exclude import Exclude, indices_of, within
from samestep.data.generators import is_observed
from samestep.data.loader import plan_batches
from samestep.data.mixture import Mixture, plan_for
from samestep.data.mixture_plan import BatchSize, MixturePlan, Weights
from samestep.data.orders import Order
from samestep.data.packed import Packed
from samestep.data.plan import NONE, GroupBy, Plan
from samestep.data.random_state import add_seeder, key
from samestep.errors import ConfigError, ModelError, OptimizerError
from samestep.evaluate import Evaluation
from samestep.host import trim_memory
from samestep.run.compilation import reported_compilation
from samestep.run.environment import plain_settings
from samestep.run.loops import MixtureLoop, PlannedLoop, StreamLoop, without_loader_options
from samestep.run.mixins import Collectives, Recording
from samestep.run.process import (
    announce,
    reaches_terminal,
    refuse_finished,
    refuse_unknown_to_launcher,
    warn_of_late_options,
)
from samestep.run.session import Session
from samestep.run.training import Training
from samestep.sharded.choice import Units
from samestep.sharded.model import Keep
from samestep.sharded.models import ShardedModels
from samestep.snapshot.read import Snapshot
from samestep.step.buffer_rules import Rule
from samestep.step.exchange import Across
from samestep.step.gradients import parameters_of
from samestep.step.guards import Contents, GradientSeal
from samestep.step.lane_pass import Count
from samestep.step.replicas import replicate
from samestep.step.shard import WHOLE, Shard, check_shardable, choose_across

Module = TypeVar("Module", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Collate = Callable[[list[Any]], Any]


def init(*, settings: Any = None, **options: Any) -> Run:
    """Join the workers of a run and return the run, a context manager.

    The rank and the address of the other workers come from torch.distributed's default group if the
    script has made one, else from the environment of `samestep run`, `torchrun`, MPI, Slurm or
    Kubernetes. Without any of them, this process is the only worker.

    Args:
        settings: The job's own settings, such as its learning rate: nested dicts or dataclasses of
            plain values, which are recorded and shown, to compare runs. Other values become text.
        **options: Options of the run, such as `lanes` and `dir`; `samestep run --help` lists all of
            them. Flags of `samestep run` and `SAMESTEP_*` environment variables override them.

    Raises:
        ConfigError: An option is unknown or its value is invalid, or this process has already
            finished a run in `dir`.
        WorldError: The workers did not find each other within `timeout`.

    Example:
        >>> with ss.init(lanes=4, dir="runs/one") as run:
        ...     run.print("rank", run.rank, "of", run.world_size, "with", run.lanes, "lanes")
        rank 0 of 1 with 4 lanes
    """
    config, process = merge(options), find_worker(os.environ)
    if config.dir is not None and config.resume == "auto" and not config.read_only:
        refuse_finished(config.dir)
    refuse_unknown_to_launcher(config, os.environ)
    if process.rank == 0:
        warn_of_late_options()
    return Run(config, process, plain_settings(settings or {}))


class Run(Training, Collectives, Recording):
    """A training job, as seen by one of its workers; `init` creates it.

    All workers must make the same calls in the same order.

    Attributes:
        rank (int): Rank of this worker, from 0 to `world_size - 1`.
        world_size (int): Number of workers.
        is_main (bool): Whether this is rank 0.
        has_terminal (bool): Whether this is rank 0, and its stderr reaches a terminal, directly or
            through the launcher's: it may draw a progress bar.
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

    def __init__(
        self, config: Config, process: ProcessInfo, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.rank, self.world_size = process.rank, process.world_size
        self.is_main = process.rank == 0
        self.has_terminal = self.is_main and reaches_terminal()
        # Joins the other workers, and loads the snapshot to resume from.
        self._session = session = Session(config, process, settings or {})
        self.config, self.dir = session.config, session.config.dir
        self.lanes = session.lanes.lanes
        self.devices, self.device = session.devices, session.devices[0]
        self._world, self._record = session.world, session.record
        self._lanes, self._progress = session.lanes, session.progress
        self._sharded: set[torch.nn.Parameter] = set()
        self._models = ShardedModels(self._lanes)
        self._joined = {}
        self._first_call = reported_compilation() if self.is_main else nullcontext()

    @property
    def step(self) -> int:
        """Number of completed steps, over all loops and resumes.

        Example:
            >>> for batch in run.batches(train_set, 64, steps=2):
            ...     print(run.step)
            0
            1
        """
        return self._progress.read("step")

    @property
    def epoch(self) -> int:
        """Epoch of the last loop, counted from 0.

        Example:
            >>> for batch in run.batches(train_set, 101, epochs=2):
            ...     print(run.epoch)
            0
            1
        """
        return self._progress.read("epoch")

    @property
    def finished(self) -> bool:
        """Whether `finish` was called, in this or an earlier start of the run.

        Example:
            >>> run.finished
            False
        """
        return self._progress.finished

    def replicate(
        self,
        module: Module,
        *,
        buffers: Mapping[str, Rule] | None = None,
        shard: Literal["full"] | None = None,
        units: Units | None = None,
        keep: Keep = "forward",
        weights: str | Path | None = None,
    ) -> Module:
        """Move a module to the worker's devices, with rank 0's values on every worker.

        Args:
            module: A module with the same names, shapes and dtypes on every worker.
            buffers: Rules for buffers that the lanes of a step write, by name or pattern, as in
                `{"*.tokens": "sum"}`. After the step, a buffer has the "mean" of the lanes' values,
                the "sum" of their changes added to its value before the step, the "min" or "max",
                or the value of the "first" lane; with "refuse", no lane may write it. Lanes without
                samples do not count. Those of torch's normalization layers, observers and spectral
                norms are known. Without a rule, lanes must write the same bits.

            shard: With "full", divide the parameters, their gradients and the state of their
                optimizer among all workers, with the same bits. `run.shard` has to get the
                optimizer. FSDP2 gathers the parameters (`Zhao et al., 2023
                <https://arxiv.org/abs/2304.11277>`__). Call it before `run.shard` and the first
                step. It needs PyTorch 2.9 or later.
            units: Classes of modules whose parameters are gathered at once, or a function of the
                name and the module; default: the repeated blocks of at least 1 MiB.
            keep: How long gathered parameters stay: until the end of the "forward" of their unit,
                of the "lane", or of the last lane of the "step".
            weights: With `shard="full"`: path of a safetensors file with the values of the model,
                or of a directory with such files and their index. Each worker reads its rows, so
                that the module may be on the meta device, and larger than any worker's memory.

        Returns:
            The same module, changed in place.

        Raises:
            ModelError: Names, shapes or dtypes differ between workers, or a rule does not fit. In a
                step: lanes wrote different values to a buffer without a rule.
            ConfigError: A rule does not exist, or the model cannot be sharded here.

        Example:
            >>> model = run.replicate(Net())
        """
        if shard not in {None, "full"}:
            raise ConfigError(f"shard must be 'full' or None, got {shard!r}")
        if shard is None and units is not None:
            raise ConfigError("units= are those of a sharded model: add shard='full'")
        if shard is None and weights is not None:
            raise ConfigError(
                "weights= are those of a sharded model: add shard='full', or load the file before"
                " run.replicate"
            )
        if shard is not None and self._progress.place is not None:
            raise ModelError("call run.replicate(..., shard='full') before the first step")
        if shard is not None:
            self._models.check(module, keep)
        # Collective. The order of calls numbers the modules for the comparison of workers.
        replicate(module, self.device, self._world, may_be_meta=weights is not None)
        if shard is not None:
            opened = None if weights is None else self._models.open(module, weights)
            # a replay looks into the gradients of whole parameters, whose bits are the same
            if self._session.replay is None:
                self._models.add(module, buffers, units, keep, opened)
                self._record.event("sharded_model", model=type(module).__name__, keep=keep)
                return module
            if opened is not None:
                self._models.fill(module, opened)
        self._lanes.add(module, buffers)
        modules = self._session.divergence.modules
        if all(module is not known for known in modules):
            modules.append(module)
        return module

    @contextmanager
    def full_parameters(self, model: Module) -> Iterator[None]:
        """Let a sharded model have its whole parameters in a block, on all workers.

        What the block writes to them is kept, and has to be the same on all workers. A model that
        is not sharded has its parameters anyway.

        Args:
            model: The module that `run.replicate` got.

        Raises:
            ModelError: The module is a part of a sharded model, or contains one.

        Example:
            >>> with run.full_parameters(model):
            ...     weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        """
        with self._models.full(model):
            yield

    def shard(self, optimizer: Optimizer, *, across: Across | None = None) -> Optimizer:
        """Make each worker update only its slice of the parameters (ZeRO, stage 1).

        This saves time and memory and gives the same bits. Gradients of these parameters are stored
        in slices: changing `.grad`, other than to None, is an error with any number of workers, and
        each step clears it. So is using `state` of the optimizer. Call it before the first step.
        See `Rajbhandari et al., 2020 <https://arxiv.org/abs/1910.02054>`__.

        Muon (`Jordan et al., 2024 <https://kellerjordan.github.io/posts/muon/>`__) and Adafactor
        need all of a parameter, so that each parameter is updated by one worker.

        Args:
            optimizer: An elementwise optimizer of `torch.optim`, Muon or Adafactor.
            across: What to divide the parameters among, if there are several hosts. The bits are
                the same. With "host", each host updates all parameters, divided among its workers.
                Gradients are sent during backward, and parameters are not sent. With "world",
                parameters are divided among all workers and sent after the update. This takes the
                least memory. The default is "host" if the additional state fits in half of the
                free memory, and otherwise "world". It is "world" for Muon, whose update takes
                longer than sending it, and for Adafactor. GPUs, more than 64 hosts, and hosts with
                different numbers of workers always use "world". The record's `sharded` event has
                the choice.

        Returns:
            The same optimizer, changed in place.

        Raises:
            OptimizerError: The optimizer is another one, a parameter is already sharded, or
                `across` has another value.

        Example:
            >>> optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3))
        """
        if across not in {None, "host", "world"}:
            raise OptimizerError(f'across must be "host", "world" or None, got {across!r}')
        parameters = parameters_of(optimizer)
        if not self._sharded.isdisjoint(parameters):
            raise OptimizerError(
                f"a parameter can be sharded only once, but this {type(optimizer).__name__} has "
                "parameters that are already sharded"
            )
        is_full = self._models.holds(optimizer)
        check_shardable(optimizer, is_full=is_full)
        self._lanes.manual.unwatch(parameters)
        # first, so that its hooks run first
        seal = GradientSeal(optimizer, partial(self._lanes.settle, optimizer))
        if is_full:
            divided = self._models.shard(optimizer)
            self._lanes.of_sharded.append(divided)
            seal.close(divided.contents)
        elif self.world_size > 1:
            # A single worker has no slices, but the same restrictions, so that a script that works
            # alone also works with others.
            round_to = self._lanes.round_to
            if across is None:
                is_whole = type(optimizer) in WHOLE
                across = "world" if is_whole else choose_across(parameters, self._world)
            places = self._lanes.models.places()
            shard = Shard(optimizer, self._lanes.assignment, self._world, round_to, across, places)
            self._lanes.shards.append(shard)
            kind, hosts = type(optimizer).__name__, len(self._world.hosts)
            self._record.event("sharded", optimizer=kind, across=shard.across, hosts=hosts)
            seal.close(shard.contents)
            trim_memory()  # of the parameters before they moved into flat storage
        else:
            seal.close(Contents(optimizer))
        self._lanes.optimizers.seals.append(seal)
        self._sharded.update(parameters)
        return optimizer

    @without_loader_options
    def batches(
        self,
        dataset: Any,
        batch_size: BatchSize | None = None,
        *,
        weights: Weights | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        loader_workers: int = 0,
        group_by: GroupBy | None = None,
        order: Order | None = None,
        exclude: Exclude | None = None,
        name: str = "train",
    ) -> PlannedLoop:
        """Return a loop over the global batches of a map-style data set, one per step.

        It continues at the exact sample after a resume. Iterating a batch yields the lane batches
        of this worker. The loop has the attributes `step` (the number of the current step, from 1),
        `steps` (the number of the last step) and `steps_per_epoch`.

        Args:
            dataset: Data set with `__len__` and `__getitem__`, and optionally `__getitems__`. Or a
                dict of data sets, by name: a mixture, whose samples that are dicts get an entry
                "source", the number of their data set.
            batch_size: Samples in a global batch, over all lanes and workers. Leave it out with
                `ByLength`. Or a function of the loop's step (0 for the first) that returns it.
            weights: How often a mixture uses each data set, by name. Or a function of the loop's
                step that returns them.
            epochs: Total number of epochs, over all resumes and calls with this name.
            steps: Total number of steps, counted the same way. Without both, the current epoch.
            shuffle: Whether to draw a new order of the samples for every epoch; no effect with
                indices, a function or a `ShardOrder`.
            drop_last: Whether to drop a last batch that is short.
            collate_fn: Makes a lane batch from a list of samples; default: torch's. It may drop
                some, such as those that are None.
            loader_workers: Number of processes that load ahead; 0 loads in this process.
            group_by: The group of each sample, or a function of its index. All samples of a lane
                batch are then of one group.
            order: `Weighted` draws with replacement, `ByLength` limits the tokens of lane batches
                instead of `batch_size`, and `ShardOrder` shuffles data in shards. Or indices of the
                samples of every epoch, or a function of the epoch that returns them, of the same
                length for all epochs. They may repeat or leave out samples. Indices need 8 bytes
                each, for a function those of 4 epochs. It is called ahead and more than once per
                epoch, with the global generators seeded for the epoch.
            exclude: Indices of samples to leave out, or a file with them (one per line, a .npy
                array, or a JSON list); of a mixture, also rows by the names of sources. All others
                stay in their steps and lanes, which have fewer samples. They are left out in
                addition to those of the option `exclude`.
            name: Name of the loop, under which its position is saved.

        Raises:
            ConfigError: A number is invalid, options contradict each other, or an option of
                DataLoader is used that is not one of these.
            DataError: The data set is empty or not map-style; it or its order changed within an
                epoch or differs between workers; an order is unusable; or a function of the step
                returns something else when it is called again.

        Example:
            >>> for batch in run.batches(train_set, 32, epochs=1):
            ...     means = run.backward(loss_fn, model, batch)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        dataset, plan = plan_for(
            dataset,
            batch_size,
            self.lanes,
            key(self.config.seed, f"order {name}"),
            weights=weights,
            name=name,
            shuffle=shuffle,
            drop_last=drop_last,
            group_by=group_by,
            order=order,
        )
        sources = dataset.sources.values() if isinstance(dataset, Mixture) else [dataset]
        self._say({source.notice for source in sources if isinstance(source, Packed)})
        self._leave_out(plan, dataset, exclude, name)
        # The loop asks for batches when it is iterated, from its position then.
        batches = partial(
            plan_batches,
            plan,
            dataset,
            self._lanes.own,
            check=self._session.data_check,
            name=name,
            seed=key(self.config.seed, f"fetch {name}"),
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            pin_memory=self.device.type == "cuda",
        )
        loop = (self._progress, name, self._begin_lanes)
        if isinstance(plan, MixturePlan):
            return MixtureLoop(*loop, plan, batches, epochs=epochs, steps=steps)
        return PlannedLoop(*loop, plan, batches, epochs=epochs, steps=steps)

    def _leave_out(self, plan: Plan, dataset: Any, exclude: Exclude | None, loop: str) -> None:
        """Leave out samples of a loop: those of the option, and those that it has itself."""
        sizes = dataset.sizes if isinstance(dataset, Mixture) else {}
        of_loop = NONE if exclude is None else indices_of(exclude, plan.size, sizes)
        of_option = self._progress.loops.exclusion.of(loop)
        plan.exclude(within(np.union1d(of_loop, of_option), plan.size))
        plan.check_left()
        if count := len(plan.excluded):
            self._say({f"loop {loop!r} leaves out {count:,} of {plan.size:,} samples"})
        elif exclude is not None:
            self._say({f"exclude of loop {loop!r} is empty: no sample is left out"})

    def _say(self, notices: set[str]) -> None:
        """Announce what is not said yet."""
        said = self._progress.loops.said
        new = sorted(notices - {"", *said})
        said.update(new)
        for line in new if self.is_main and not is_observed() else ():
            announce(line)

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
            DataError: `make_stream` is not a function, or a source has ended.

        Example:
            >>> from itertools import repeat
            >>> for batch in run.streams(lambda lane: repeat(torch.ones(4)), steps=1, name="ones"):
            ...     print([lane_batch.shape for lane_batch in batch])
            [torch.Size([4]), torch.Size([4])]
        """
        lanes, seed = self._lanes.own, self.config.seed
        begin = self._begin_lanes
        return StreamLoop(self._progress, name, begin, make_stream, lanes, seed, steps=steps)

    @without_loader_options
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
                or a dict of scalars (means over the block), boolean or integer tensors with an
                entry per item, pairs (sum, count) of scalars, and new metrics (`Metric` objects or
                torchmetrics objects), which are merged.
            model: First argument of `fn`.
            dataset: Map-style data set.
            batch_size: Samples per block.
            gather: Whether `fn` returns one output per sample instead: a tensor or a list, or a
                dict or tuple of them.
            count: Returns the number of items in a batch, over which means are taken, or the sum of
                their weights; default: samples, counted as in `backward`.
            collate_fn: Makes a batch from a list of samples; default: torch's.
            loader_workers: Number of processes that load ahead.

        Returns:
            A dict of means and metrics. With `gather`, all outputs in data set order on rank 0, and
            None on other ranks.

        Raises:
            DataError: The data set is empty, not map-style, or differs between workers, or samples
                cannot be counted.
            EvaluationError: Results cannot be merged.

        Example:
            >>> sorted(run.evaluate(loss_fn, model, test_set, 16))
            ['accuracy', 'loss']
            >>> logits = lambda model, batch: model(batch[0])
            >>> run.evaluate(logits, model, test_set, 16, gather=True).shape
            torch.Size([53, 10])
        """
        self._lanes.manual.refuse_in_own_lane("run.evaluate")
        evaluation = Evaluation(
            self._lanes,
            dataset,
            batch_size,
            self._session.data_check,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
        )
        with self._world.status.doing("evaluating"), self._progress.times.measuring("evaluation"):
            return evaluation.outputs(fn, model) if gather else evaluation.means(fn, model, count)

    def track(self, **objects: Any) -> None:
        """Name the objects that snapshots save, and restore them if the run resumes.

        Args:
            **objects: Objects with `state_dict` and `load_state_dict`, with a state of tensors and
                plain values, or dicts, lists and tensors, which are changed in place. After a
                resume, the parameters of a module have the `requires_grad` of the snapshot. An
                object that the snapshot never had, such as the optimizer of a later stage, starts
                anew if all others are tracked.

        Raises:
            SnapshotError: A name is taken, the snapshot does not fit an object, or a run with
                `read_only` has found none.
            ConfigError: With `snapshot_every=None`, `dir` is not shared by all hosts.

        Example:
            >>> run.track(model=model, optimizer=optimizer)
        """
        self._session.directory.check()
        self._session.start.check_read()
        tracked, lines = self._session.snapshots.tracked, list[str]()
        tracked.begin_call(self._progress.place)
        # Those of the snapshot first: only then it is certain that others are new, not renamed.
        for name in sorted(objects, key=lambda name: not tracked.is_saved(name)):
            item = objects[name]
            # saved as slices
            shard = next((each for each in self._lanes.divided if each.optimizer is item), None)
            seals = (seal for seal in self._lanes.optimizers.seals if seal.optimizer is item)
            complete = next((seal.contents.complete for seal in seals), None)
            complete = self._models.state_of(item) or complete
            is_restored = tracked.is_saved(name)
            lines += tracked.add(name, item, complete)
            if is_restored and self.is_main and self._session.restored is not None:
                self._session.restored.keep(name, item, tracked.objects[name])
            if shard is not None:
                self._session.divergence.shards[name] = shard
            if isinstance(item, torch.nn.Module):
                self._lanes.manual.watch(item)
            if isinstance(item, torch.amp.GradScaler):
                self._lanes.gradients.scalers.append(item)
            if isinstance(item, torch.optim.Optimizer):
                self._progress.times.watch(name, item)
                self._lanes.optimizers.track(item)
                if self._session.replay is not None:
                    self._session.replay.track(
                        name, item, shard if isinstance(shard, Shard) else None
                    )
        for line in lines if self.is_main and not is_observed() else ():
            announce(line)

    def on_lane_seed(self, fn: Callable[[int], Any]) -> None:
        """Call `fn(seed)` whenever samestep seeds the generators of Python, NumPy and torch.

        Those are seeded before each lane, and before each lane batch is loaded. Use it for
        generators that samestep does not find by itself, such as one that the loss function draws
        from. Call it before the first loop.

        Args:
            fn: Seeds a generator, given an integer from 0 to 2**32 - 1 that depends on the run's
                seed, the step and the lane.

        Example:
            >>> noise = torch.Generator()
            >>> run.on_lane_seed(noise.manual_seed)
        """
        self._session.call_at_close(add_seeder(fn))

    def snapshot(self, *, score: float | None = None, now: bool = False) -> None:
        """Take a snapshot of the tracked objects, in a loop at the end of the current step.

        After the steps of an epoch of your own loop over epochs, it is taken when the next loop
        begins or the run ends, so that it holds what follows, such as a step of a schedule.

        Args:
            score: Snapshots with the highest scores are kept (`keep_best`), and of equal scores
                the earliest. If lower is better, negate it. The live page ranks runs by it, under
                the name of the value that was logged.
            now: Whether to take it immediately, and in a loop wait until it is on disk. Call it
                after the last change of the step to a tracked object, before work that may fail,
                such as an evaluation.

        Raises:
            SnapshotError: An earlier snapshot could not be written.

        Example:
            >>> run.snapshot(score=0.93)
        """
        self._lanes.manual.refuse_in_own_lane("run.snapshot")
        self._progress.snapshot(score, now=now)

    def best_snapshot(self) -> Snapshot:
        """Return the snapshot with the highest score, and of equal scores the earliest.

        Call it on all workers, outside of loops, for example to evaluate or export the best model.
        The current state is saved first: what you load from the best one is not saved in its place.

        Returns:
            The snapshot, as `read_snapshot` returns it, with the states of objects in `state`.

        Raises:
            SnapshotError: No snapshot in `dir` or `remote` has a score, or it cannot be read.
            ConfigError: The run has no `dir`, or `keep_best` is 0.

        Example:
            >>> run.track(model=model)
            >>> run.snapshot(score=0.93)
            >>> best = run.best_snapshot()
            >>> _ = model.load_state_dict(best.state["model"])
            >>> best.step, best.score
            (0, 0.93)
        """
        return self._progress.best_snapshot(self._session.start.load_best)

    def finish(self) -> None:
        """End the run's loops, as if they were complete, now and at every later start.

        Call it on all workers, for example to stop early, and leave your own loop over epochs with
        `break`. In a loop, the current step is the last one. A snapshot saves this.

        Example:
            >>> for batch in run.batches(train_set, 32, epochs=10):
            ...     if run.step == 1:
            ...         run.finish()
            >>> run.step, run.finished
            (2, True)
        """
        self._lanes.manual.refuse_in_own_lane("run.finish")
        self._progress.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._world.abandon()
            if error is None:
                for shard in self._lanes.divided:
                    shard.complete()  # gradients that were not used may still arrive
                self._session.end()
            # A stop, by a signal, `stop_after` or user code, is no failure. `Progress` has taken a
            # snapshot where one can be resumed from. In the middle of a step, none can be taken.
            elif not isinstance(error, (SystemExit, KeyboardInterrupt)):
                self._session.report_failure(error)
        finally:
            self._session.close()

    def close(self) -> None:
        """Leave the run without a last snapshot; the end of a `with` block takes one and closes.

        Example:
            >>> run = ss.init(lanes=2)
            >>> run.close()
        """
        try:
            if sys.exc_info()[1] is None:
                self._world.wait_for_gpu()  # a hang is reported only while the watchdog runs
            else:  # in `finally`, after an exception
                self._world.abandon()
        finally:
            self._session.close()
