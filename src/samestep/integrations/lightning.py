"""Training of a LightningModule, running inside a samestep run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torchmetrics import Metric

from samestep.data.loader import size_of
from samestep.errors import ConfigError
from samestep.integrations.common import check_devices, shard_if_possible, steps_per_epoch
from samestep.metrics import as_metric
from samestep.run import Run
from samestep.step.lane_pass import Count

# Hooks that `fit` calls, or that belong to the module's own use of data.
CALLED: Final = frozenset(
    {
        "configure_model", "lr_scheduler_step", "on_before_optimizer_step", "on_before_zero_grad",
        "on_fit_end", "on_fit_start", "on_train_end", "on_train_epoch_end", "on_train_epoch_start",
        "on_train_start", "on_validation_end", "on_validation_epoch_end",
        "on_validation_epoch_start", "on_validation_start", "prepare_data", "setup", "teardown",
        "train_dataloader", "val_dataloader",
    }
)  # fmt: skip
NOT_OF_FIT: Final = ("on_test_", "on_predict_", "test_", "predict_")
OWN: Final = (
    "backward", "configure_callbacks", "configure_gradient_clipping", "lr_scheduler_step",
    "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
IN_TRAINING: Final = (
    "log a value of torchmetrics.functional there, which is averaged over samples (on_epoch=True: "
    "over the epoch as well), or update and log the object in validation_step"
)


def fit(
    module: LightningModule,
    train_dataloaders: DataLoader[Any] | LightningDataModule | None = None,
    val_dataloaders: DataLoader[Any] | None = None,
    *,
    run: Run,
    max_epochs: int,
    datamodule: LightningDataModule | None = None,
    gradient_clip_val: float | None = None,
    count: Count | None = None,
) -> dict[str, float]:
    """Train a LightningModule with the same bits at any number of workers.

    Call it once per run. A run that resumes continues at the exact sample.

    Args:
        module: Module with `training_step`, `configure_optimizers` with one optimizer and at most
            one scheduler, and optionally `validation_step` and hooks.
        train_dataloaders: A DataLoader whose `batch_size` is that of the global batch, or a data
            module; default: those of `datamodule` or of the module.
        val_dataloaders: A DataLoader, for an evaluation at the end of each epoch.
        run: The run, from `samestep.init`.
        max_epochs: Total number of epochs, over all resumes.
        datamodule: Data module, in place of DataLoaders.
        gradient_clip_val: Largest norm of a gradient; None or 0: no limit.
        count: Returns the number of items of a batch over which `training_step` and
            `validation_step` take means, as in `Run.backward`; default: samples.

    Returns:
        The last value of everything that was logged, by name.

    Raises:
        ConfigError: The module uses manual optimization, several optimizers, or a hook that would
            have no effect; a DataLoader orders samples on its own, or its data set is iterable.
    """
    if isinstance(train_dataloaders, LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    _check(module, datamodule, run)
    trainer = Trainer(module, run, max_epochs, count)
    try:
        module.trainer = trainer
        module.log = trainer.log
        source = module if datamodule is None else datamodule
        for each in dict.fromkeys((source, module)):
            for rank in range(run.world_size):  # one after the other, as on one machine
                if rank == run.rank:
                    each.prepare_data()
                run.barrier("preparing data")
            each.setup("fit")
        training = train_dataloaders or source.train_dataloader()
        validation = val_dataloaders
        if validation is None and train_dataloaders is None:
            validation = source.val_dataloader() if _overrides(source, "val_dataloader") else None
        trainer.train(training, validation, gradient_clip_val)
        for each in dict.fromkeys((source, module)):
            each.teardown("fit")
    finally:
        module.trainer = None
        del module.log
    return trainer.callback_metrics


class Trainer:
    """What a module finds as `self.trainer` in a run."""

    progress_bar_callback = logger = None
    loggers: Final = ()
    sanity_checking = barebones = False

    def __init__(
        self, module: LightningModule, run: Run, max_epochs: int, count: Count | None = None
    ) -> None:
        self._module, self._run, self._count = module, run, count
        self.max_epochs, self.world_size, self.global_rank = max_epochs, run.world_size, run.rank
        self.is_global_zero = run.is_main
        self.current_epoch = self.global_step = self.num_training_batches = 0
        self.training, self.validating = True, False
        self.callback_metrics: dict[str, float] = {}
        self._logged: dict[str, Any] | None = None  # of one lane or block; None: between them
        self._of_epoch: set[str] = set()  # names of training_step that are also logged per epoch
        self._sums: dict[str, list[float]] = {}  # of this epoch, with the number of samples
        self._metrics = [
            submodule for submodule in module.modules() if isinstance(submodule, Metric)
        ]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name} does not exist in a run: samestep has no Trainer of Lightning; "
            "use the run's own attributes, or one optimizer with automatic optimization"
        )

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of steps of the run."""
        return self.max_epochs * self.num_training_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the logged values and the sums of the current epoch."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        of_epoch = sorted(self._of_epoch)
        return {"metrics": dict(self.callback_metrics), "sums": sums, "of_epoch": of_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.callback_metrics = dict(state["metrics"])
        self._sums = {name: list(pair) for name, pair in state["sums"].items()}
        self._of_epoch = set(state["of_epoch"])

    def log(
        self,
        name: str,
        value: Any,
        *_: Any,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **__: Any,
    ) -> None:
        """Take the place of `LightningModule.log`: means are over all samples."""
        if reduce_fx not in {"mean", torch.mean}:
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported: values are means "
                "over samples; log a torchmetrics object in validation_step instead"
            )
        if self._logged is None:  # a hook
            self._record({name: self._equal(name, float(value))})
            return
        if self.training:
            if as_metric(name, value) is not None:
                raise ConfigError(
                    f"self.log({name!r}) in training_step got a metric, but updates are not merged "
                    f"over workers; {IN_TRAINING}"
                )
            if on_epoch:
                self._of_epoch.add(name)
        self._logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def _equal(self, name: str, value: float) -> float:
        """Return the value that a hook logs. Raises `ConfigError` if it differs between workers."""
        values = self._run.all_gather(value)
        if len({repr(worker_value) for worker_value in values}) > 1:
            raise ConfigError(
                f"self.log({name!r}) in a hook got different values on workers, {values}, because "
                "each of them has seen only its own samples; log it in training_step or "
                "validation_step, which samestep averages, or log a torchmetrics object there"
            )
        return value

    def _check_metrics(self, step: str, advice: str) -> None:
        if any(metric.update_called for metric in self._metrics):
            raise ConfigError(
                f"{step} updated a torchmetrics object of the module that run.evaluate does not "
                f"merge over workers; {advice}"
            )

    def _record(self, values: Mapping[str, Any]) -> None:
        self._run.log(values)
        self.callback_metrics.update({name: float(value) for name, value in values.items()})

    def train(self, training: Any, validation: Any, clip: float | None) -> None:
        """Train to the last epoch."""
        run, module = self._run, self._module
        dataset, batch_size, options = _data(training, "train_dataloader")
        size = size_of(dataset)
        per_epoch = steps_per_epoch(size, batch_size, drop_last=options["drop_last"])
        self.num_training_batches = per_epoch
        if validation is not None:
            _data(validation, "val_dataloader")
        module.to(run.device)
        module.configure_model()
        run.replicate(module)
        optimizer, scheduler = _optimizer(module)
        shard_if_possible(run, optimizer)
        run.track(model=module, optimizer=optimizer, trainer=self)
        if scheduler is not None:
            run.track(scheduler=scheduler.scheduler)
        loop = run.batches(dataset, batch_size, epochs=self.max_epochs, **options)
        self.global_step = first = loop.step
        module.on_fit_start()
        module.on_train_start()
        for batch in loop:
            self.current_epoch, index = batch.epoch, (loop.step - 1) % per_epoch
            if index == 0 or loop.step == first + 1:
                module.on_train_epoch_start()
            module.train()
            means = run.backward(
                _Step(self, "training_step", index), module, batch, count=self._count
            )
            if clip is not None and clip > 0:
                run.clip_grad_norm(module, clip)
            module.on_before_optimizer_step(optimizer)
            optimizer.step()
            module.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
            self.global_step = loop.step
            self._check_metrics("training_step", IN_TRAINING)
            samples = min(batch_size, size - index * batch_size)
            for name, mean in means.items():
                total, earlier = self._sums.get(name, (0.0, 0))
                self._sums[name] = [total + mean * samples, earlier + samples]
            self._record(means)
            self._schedule(scheduler, "step", loop.step)
            if index == per_epoch - 1:
                self._end_epoch(validation, scheduler)
        module.on_train_end()
        module.on_fit_end()

    def _end_epoch(self, validation: Any, scheduler: Any) -> None:
        if validation is not None and _overrides(self._module, "validation_step"):
            self._validate(validation)
        # rank 0 has samples in every step
        if names := self._run.broadcast(sorted(self._of_epoch & self._sums.keys())):
            means = {name: self._sums[name][0] / self._sums[name][1] for name in names}
            self._record({f"{name}_epoch": mean for name, mean in means.items()})
            self.callback_metrics.update(means)
        self._module.on_train_epoch_end()
        self._schedule(scheduler, "epoch", self.current_epoch + 1)
        self._sums = {}

    def _validate(self, validation: Any) -> None:
        run, module = self._run, self._module
        dataset, batch_size, options = _data(validation, "val_dataloader")
        blocks = -(-size_of(dataset) // batch_size)
        first = -(-run.rank * blocks // run.world_size)  # of this worker
        self.training, self.validating = False, True
        module.on_validation_start()
        module.on_validation_epoch_start()
        scores = run.evaluate(
            _Step(self, "validation_step", first),
            module,
            dataset,
            batch_size,
            count=self._count,
            collate_fn=options["collate_fn"],
            loader_workers=options["loader_workers"],
        )
        self._check_metrics("validation_step", "log the object there, with self.log(name, metric)")
        self._record(scores)
        module.on_validation_epoch_end()
        module.on_validation_end()
        self.training, self.validating = True, False

    def _schedule(self, config: Any, interval: str, count: int) -> None:
        if config is None or config.interval != interval or count % config.frequency:
            return
        metric = None
        if config.reduce_on_plateau:
            if config.monitor not in self.callback_metrics:
                raise ConfigError(
                    f"the scheduler monitors {config.monitor!r}, which was not logged; got "
                    f"{', '.join(sorted(self.callback_metrics))}"
                )
            metric = self.callback_metrics[config.monitor]
        self._module.lr_scheduler_step(config.scheduler, metric)


class _Step:
    """Calls a step of the module for a lane or block; returns the loss, and what was logged."""

    def __init__(self, trainer: Trainer, name: str, index: int) -> None:
        self._trainer, self._name, self._index = trainer, name, index

    def __call__(self, module: Any, batch: Any) -> Any:
        step, trainer = getattr(module, self._name), self._trainer
        arguments = (batch, self._index)[: len(inspect.signature(step).parameters)]
        logged: dict[str, Any] = {}
        trainer._logged = logged  # noqa: SLF001  of the same file
        try:
            returned = step(*arguments)
        finally:
            trainer._logged = None  # noqa: SLF001
        if self._name == "validation_step":
            self._index += 1
            return logged
        loss = returned["loss"] if isinstance(returned, Mapping) else returned
        if "loss" in logged and torch.equal(torch.as_tensor(logged["loss"]), loss.detach()):
            del logged["loss"]
        return loss, logged


def _check(module: LightningModule, datamodule: Any, run: Run) -> None:
    """Raise `ConfigError` for what would have no effect in a run."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} uses manual optimization (automatic_optimization=False), which needs the loop "
            "of Lightning; write the loop with run.backward, as in docs/moving.md"
        )
    check_devices(run, "fit")
    bases = (ModelHooks, DataHooks, CheckpointHooks)
    hooks = {hook for base in bases for hook in vars(base) if not hook.startswith("_")} | {*OWN}
    hooks = {hook for hook in hooks - CALLED if not hook.startswith(NOT_OF_FIT)}
    for owner in (module, datamodule):
        if overridden := sorted(hook for hook in hooks if owner and _overrides(owner, hook)):
            raise ConfigError(
                f"{type(owner).__name__}.{overridden[0]} would have no effect, because samestep "
                f"runs the lanes; put it elsewhere. fit calls {', '.join(sorted(CALLED))}"
            )


def _overrides(owner: Any, hook: str) -> bool:
    base = LightningDataModule if isinstance(owner, LightningDataModule) else LightningModule
    return getattr(type(owner), hook, None) is not getattr(base, hook, None)


def _optimizer(module: LightningModule) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer, and Lightning's configuration of the scheduler, if there is one."""
    optimizers, schedulers, monitor = _configure_optimizers(module.configure_optimizers())
    configs = _configure_schedulers_automatic_opt(schedulers, monitor)
    if len(optimizers) != 1 or len(configs) > 1:
        raise ConfigError(
            "configure_optimizers must return one optimizer and at most one scheduler, got "
            f"{len(optimizers)} and {len(configs)}; write the loop with run.backward"
        )
    return optimizers[0], next(iter(configs), None)


def _data(loader: Any, what: str) -> tuple[Any, int, dict[str, Any]]:
    """Return the data set, the batch size and the options of `run.batches` of a DataLoader."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{what} must be one DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{what} has an iterable data set, {type(loader.dataset).__name__}, which cannot be "
            "divided into the same batches at any number of workers; use a map-style one, with "
            "__len__ and __getitem__, or write the loop with run.streams"
        )
    if loader.worker_init_fn is not None and loader.num_workers > 0:
        raise ConfigError(
            f"worker_init_fn of {what} would have no effect, because samestep starts the loader "
            "processes and seeds all generators for each lane batch; leave it out, and open files "
            "in the data set's first __getitem__"
        )
    sampler: Any = loader.sampler
    shuffles = type(sampler) is RandomSampler
    usual = shuffles and not sampler.replacement and sampler.num_samples == size_of(loader.dataset)
    if loader.batch_size is None or not (usual or type(sampler) is SequentialSampler):
        raise ConfigError(
            f"{what} must be a DataLoader with batch_size and shuffle, got {type(sampler).__name__}"
            "; samestep orders the samples, so that each is used once at any number of workers"
        )
    options = {
        "shuffle": shuffles,
        "drop_last": loader.drop_last,
        "collate_fn": loader.collate_fn,
        "loader_workers": loader.num_workers,
    }
    return loader.dataset, loader.batch_size, options
