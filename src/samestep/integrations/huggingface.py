"""The Trainer of Hugging Face transformers, running inside a samestep run."""

from __future__ import annotations

import copy
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from accelerate.utils import DistributedType
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    TrainOutput,
    denumpify_detensorize,
    speed_metrics,
)

from samestep.data.batch import Batch
from samestep.data.loader import size_of
from samestep.errors import ConfigError
from samestep.integrations.common import check_devices, shard_if_possible, steps_per_epoch
from samestep.run import Run

# Arguments that must keep their default, and what to do instead.
REFUSED: Final = {
    "accelerator_config.split_batches": "the global batch has per_device_train_batch_size samples "
    "per lane",
    "auto_find_batch_size": "if a lane does not fit, the error says how many lanes do",
    "average_tokens_across_devices": "the loss is always the mean over the global batch",
    "batch_eval_metrics": "compute_metrics gets the predictions of all samples",
    "data_seed": "all random numbers depend on samestep.init(seed=...)",
    "deepspeed": "every worker holds all parameters, and optimizers are sharded anyway",
    "enable_jit_checkpoint": "a run saves a snapshot on a signal",
    "eval_do_concat_batches": "compute_metrics gets the predictions of all samples",
    "fp16": 'use bf16=True and samestep.init(precision="bfloat16")',
    "fp16_full_eval": "evaluation uses the precision of the run",
    "bf16_full_eval": "evaluation uses the precision of the run",
    "fsdp": "every worker holds all parameters, and optimizers are sharded anyway",
    "gradient_accumulation_steps": "set lanes to the number of devices times the accumulation "
    "steps: a worker accumulates the gradients of its lanes",
    "group_by_length": "samestep orders the samples",
    "include_num_input_tokens_seen": "a worker sees only the tokens of its lanes",
    "load_best_model_at_end": "a run keeps the snapshots with the best metric_for_best_model with "
    "samestep.init(keep_best=...), and samestep snapshots export writes one of them",
    "neftune_noise_alpha": "add the noise in the model",
    "parallelism_config": "every worker holds all parameters",
    "push_to_hub": "upload the result of trainer.save_model()",
    "save_only_model": "snapshots are complete; trainer.save_model() writes the model alone",
    "save_total_limit": "use samestep.init(keep_last=...)",
    "torch_compile": "results may then depend on the number of workers",
}
# The variables from which accelerate concludes that there are other processes.
LAUNCHED: Final = (
    "LOCAL_RANK",
    "MV2_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "WORLD_SIZE",
)
UNSET: Final[tuple[Any, ...]] = (None, "", [], {})
NOT_SUPPORTED: Final = ("lomo", "layerwise", "schedule_free")  # optimizers, by parts of their names
# Methods of transformers.Trainer that samestep does not call.
NOT_CALLED: Final = ("_get_train_sampler", "get_train_dataloader", "training_step")
KEPT: Final = ("best_global_step", "best_metric", "epoch", "global_step")  # of the TrainerState
TIMINGS: Final = ("_runtime", "_per_second")


class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` that leave communication to the run.

    Those of transformers let accelerate create a process group wherever a launcher started the
    script.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
        try:
            device: torch.device = super()._setup_devices
            return device
        finally:
            os.environ.update(hidden)


class WorkerState(NamedTuple):
    """What `TrainingArguments` ask accelerate: this worker trains alone, and only rank 0 writes."""

    process_index: int
    local_process_index: int
    device: torch.device
    num_processes: int = 1
    distributed_type: DistributedType = DistributedType.NO


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` that trains with the same bits at any number of workers.

    The global batch has `per_device_train_batch_size` samples per lane. The run's snapshots take
    the place of checkpoints.

    Args:
        model, args, ...: The arguments of `transformers.Trainer`; `args` are the
            `TrainingArguments` of this module.
        run: The run, from `samestep.init`.

    Raises:
        ConfigError: An argument has no meaning in a run; the message says what to do instead.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        run: Run,
        **options: Any,
    ) -> None:
        args = args or TrainingArguments("tmp_trainer")
        if not isinstance(args, TrainingArguments):
            raise ConfigError(
                f"expected TrainingArguments of samestep.integrations.huggingface, got those of "
                f"{type(args).__module__}, which start their own communication; change the import"
            )
        _check(args, run, type(self))
        super().__init__(model, _of_worker(args, run), *more, **options)
        is_masking = isinstance(self.data_collator, transformers.DataCollatorForLanguageModeling)
        seed = getattr(self.data_collator, "seed", None)
        if is_masking and seed is not None:
            raise ConfigError(
                f"DataCollatorForLanguageModeling(seed={seed}) has a generator in each process, "
                "so masks would depend on the number of workers; omit seed, because all random "
                "numbers depend on samestep.init(seed=...)"
            )
        self.model_init = None  # has been called
        self.run, self._has_trained, self._stopped = run, False, False
        self.control: TrainerControl
        if run.device.type == "cuda":
            torch.cuda.set_device(run.device)  # TrainingArguments have chosen the first one
        run.track(model=run.replicate(self.model))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **options: Any
    ) -> TrainOutput:
        """Train to the end of the run; a run that resumes continues at the exact sample.

        Raises:
            ConfigError: `resume_from_checkpoint` or `trial` is given, the method was called before,
                or a callback ends an epoch early.
        """
        if resume_from_checkpoint:
            raise ConfigError(
                "resume_from_checkpoint has no meaning in a run, which resumes from its newest "
                f"snapshot, got {resume_from_checkpoint!r}; use samestep.init(dir=..., resume=...)"
            )
        if trial is not None:
            raise ConfigError("hyperparameter_search is not supported; start one run per trial")
        if self._has_trained:
            raise ConfigError(
                "train was called twice in one run; increase num_train_epochs or max_steps instead"
            )
        self._has_trained = True
        return super().train(**options)

    def _inner_training_loop(
        self, *_: Any, ignore_keys_for_eval: list[str] | None = None, **__: Any
    ) -> TrainOutput:
        run, args, handler = self.run, self.args, self.callback_handler
        loader = self.get_train_dataloader()
        samples, batch_size = size_of(loader.dataset), args.train_batch_size * run.lanes
        drop_last = args.dataloader_drop_last
        per_epoch = max(1, steps_per_epoch(samples, batch_size, drop_last=drop_last))
        max_steps = args.max_steps
        if max_steps <= 0:
            max_steps = math.ceil(args.num_train_epochs * per_epoch)
        handler.train_dataloader = loader
        self._prepare(max_steps, per_epoch)
        start_time, first_step = time.time(), self.state.global_step
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and first_step == 0:
            self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
        loop = run.batches(
            loader.dataset,
            batch_size,
            steps=first_step if self._stopped else max_steps,
            shuffle=getattr(args, "train_sampling_strategy", "random") != "sequential",
            drop_last=drop_last,
            collate_fn=partial(_collate, loader.collate_fn),
            loader_workers=args.dataloader_num_workers,
        )
        for batch in loop:
            if loop.step == first_step + 1 or loop.step % per_epoch == 1 % per_epoch:
                self.control = handler.on_epoch_begin(args, self.state, self.control)
            norm, rate = self._update(batch)
            self.state.global_step, self.state.epoch = loop.step, loop.step / per_epoch
            report = partial(
                self._maybe_log_save_evaluate,
                self._tr_loss,
                norm,
                self.model,
                None,
                batch.epoch,
                ignore_keys_for_eval,
                start_time,
                learning_rate=rate,
            )
            self.control = handler.on_step_end(args, self.state, self.control)
            report()
            if loop.step % per_epoch == 0 or loop.step == max_steps:
                self.control = handler.on_epoch_end(args, self.state, self.control)
                report()
            elif self.control.should_epoch_stop:
                raise ConfigError(
                    "a callback ended an epoch early (should_epoch_stop), but each epoch of a run "
                    "uses all samples; use should_training_stop or a smaller data set"
                )
            if self.control.should_training_stop and loop.step < max_steps:
                break
        return self._finish(start_time, self.state.global_step - first_step, batch_size)

    def _prepare(self, max_steps: int, per_epoch: int) -> None:
        """Create the optimizer, the scheduler and the state, and restore them on a resume."""
        run, handler = self.run, self.callback_handler
        self.create_optimizer()
        shard_if_possible(run, self.optimizer)
        self.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.state = TrainerState(
            max_steps=max_steps,
            num_train_epochs=math.ceil(max_steps / per_epoch),
            is_local_process_zero=run.is_main,
            is_world_process_zero=run.is_main,
        )
        self.state.compute_steps(self.args, max_steps)
        self._tr_loss = torch.zeros((), dtype=torch.float64)  # since the last log
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, 0
        run.track(optimizer=self.optimizer, scheduler=self.lr_scheduler, trainer=self)

    def _update(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """Take a step; return the norm of the gradient and the learning rate."""
        run, args, handler = self.run, self.args, self.callback_handler
        self.control = handler.on_step_begin(args, self.state, self.control)
        self.model.train()
        means = run.backward(self._loss_of_lane, self.model, batch, count=self.count_items)
        norm = run.clip_grad_norm(self.model, args.max_grad_norm or math.inf)
        self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        self.control = handler.on_optimizer_step(args, self.state, self.control)
        rate = float(self.optimizer.param_groups[0]["lr"])
        # `_evaluate` steps the others, such as ReduceLROnPlateau
        if "metrics" not in inspect.signature(self.lr_scheduler.step).parameters:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self._tr_loss += means.get("loss", 0.0)  # a batch without labels has no loss
        run.log(means, grad_norm=norm, learning_rate=rate)
        return norm, rate

    def _finish(self, start_time: float, steps: int, batch_size: int) -> TrainOutput:
        total = self._total_loss_scalar + float(self._tr_loss)
        train_loss = total / max(self.state.global_step, 1)
        metrics = speed_metrics(
            "train", start_time, num_samples=steps * batch_size, num_steps=steps
        )
        metrics["train_loss"] = train_loss
        self.is_in_train = False
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def count_items(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of items over which the loss of a batch is the mean.

        They are the labels that the Trainer of transformers counts, such as tokens, otherwise
        samples. Override it together with `compute_loss`.
        """
        items = self._get_num_items_in_batch([inputs], self.args.device)
        return int(find_batch_size(inputs) if items is None else items)

    def _loss_of_lane(self, model: Any, inputs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        with self.compute_loss_context_manager():
            return self.compute_loss(model, inputs, num_items_in_batch=items)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate each sample once; `compute_metrics` runs on rank 0 with all predictions."""
        run, args, included = self.run, self.args, self.args.include_for_metrics
        if prediction_loss_only is None:
            prediction_loss_only = args.prediction_loss_only
        self.callback_handler.eval_dataloader = dataloader

        def evaluate(model: Any, inputs: Any) -> list[BlockOutput | None]:
            items, samples = self.count_items(inputs), find_batch_size(inputs)
            main = (
                inputs[getattr(model, "main_input_name", "input_ids")]
                if "inputs" in included
                else None
            )
            loss, logits, labels = self.prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            # one entry per sample, all but the first of them empty
            first = BlockOutput(items, samples, loss, logits, labels, main)
            return [first] + [None] * (samples - 1)

        entries = run.evaluate(
            evaluate,
            self.model,
            dataloader.dataset,
            args.eval_batch_size,
            gather=True,
            collate_fn=partial(_collate, dataloader.collate_fn),
            loader_workers=args.dataloader_num_workers,
        )
        output = None
        if run.is_main:
            blocks = [block for block in entries if block is not None]
            output = self._output(blocks, metric_key_prefix)
            if description != "Prediction":
                output = output._replace(predictions=None, label_ids=None)
        output = run.broadcast(output)
        run.log({name: value for name, value in output.metrics.items() if _is_number(value)})
        return output

    def _output(self, blocks: list[BlockOutput], prefix: str) -> EvalLoopOutput:
        """Return the predictions of all blocks, in data set order, and their metrics."""
        predictions, labels, inputs = (
            _joined([getattr(block, name) for block in blocks])
            for name in ("logits", "labels", "inputs")
        )
        losses = [(float(block.loss), block) for block in blocks if block.loss is not None]
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            optional_fields: dict[str, Any] = {}
            if "inputs" in self.args.include_for_metrics:
                optional_fields["inputs"] = inputs
            if "loss" in self.args.include_for_metrics:
                values, samples = zip(
                    *((loss, block.samples) for loss, block in losses), strict=True
                )
                optional_fields["losses"] = np.repeat(values, samples)
            prediction = EvalPrediction(
                predictions=predictions, label_ids=labels, **optional_fields
            )
            metrics = denumpify_detensorize(self.compute_metrics(prediction))
        if losses:
            # the loss of a block without items is NaN
            total = math.fsum(loss * block.items for loss, block in losses if block.items)
            metrics[f"{prefix}_loss"] = total / sum(block.items for _, block in losses)
        named = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
            for name, value in metrics.items()
        }
        return EvalLoopOutput(predictions, labels, named, sum(block.samples for block in blocks))

    def _save_checkpoint(self, *_: Any) -> None:
        """Take a snapshot, with the metric for the best model as its score."""
        name, score = self.args.metric_for_best_model, None
        if name is not None and self.state.log_history:
            name = name if name.startswith("eval_") else f"eval_{name}"
            newest = self.state.log_history[-1]
            if newest["step"] == self.state.global_step and name in newest:
                score = newest[name] if self.args.greater_is_better else -newest[name]
        self.run.snapshot(score=score)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and of its callbacks, without times, ranks and paths."""
        state = self.state
        return {
            "state": {name: getattr(state, name) for name in KEPT},
            "log_history": [
                {name: value for name, value in entry.items() if not name.endswith(TIMINGS)}
                for entry in state.log_history
            ],
            "loss": self._tr_loss.clone(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "stopped": self.control.should_training_stop and state.global_step < state.max_steps,
            "callbacks": [
                dict(callback.state()["attributes"]) for callback in self._stateful_callbacks()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises `ConfigError` if the trainer has other callbacks."""
        callbacks = self._stateful_callbacks()
        if len(callbacks) != len(state["callbacks"]):
            raise ConfigError(
                f"the snapshot has the states of {len(state['callbacks'])} callbacks, got "
                f"{len(callbacks)} callbacks with a state; resume with the same callbacks"
            )
        vars(self.state).update(state["state"], log_history=list(state["log_history"]))
        self._tr_loss = state["loss"].clone()
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self._stopped = state["stopped"]
        for callback, attributes in zip(callbacks, state["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _stateful_callbacks(self) -> list[Any]:
        return [
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        ]


class BlockOutput(NamedTuple):
    """The outputs of one block of an evaluation."""

    items: int
    samples: int
    loss: Any
    logits: Any
    labels: Any
    inputs: Any


def _collate(collator: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return a batch as a plain dict, as loader processes and devices expect it.

    With `partial`, samestep finds the generators of the collator, and seeds them.
    """
    batch = collator(samples)
    return dict(batch) if isinstance(batch, Mapping) else batch


def _check(args: TrainingArguments, run: Run, kind: type) -> None:
    """Raise `ConfigError` for what has no meaning in a run."""
    for name, advice in REFUSED.items():
        owner, _, option = name.rpartition(".")
        holder = getattr(args, owner) if owner else args
        value, default = getattr(holder, option, None), getattr(type(holder), option, None)
        if value not in (default, *UNSET):
            raise ConfigError(
                f"TrainingArguments.{name}={value!r} has no meaning in a run: {advice}"
            )
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy must be random or sequential, got {sampling!r}; "
            "samestep orders the samples, so that each is used once at any number of workers"
        )
    if args.bf16 != (run.config.precision == "bfloat16") or run.config.precision == "float16":
        raise ConfigError(
            f"bf16={args.bf16} needs samestep.init(precision="
            f'"{"bfloat16" if args.bf16 else "float32"}"), got "{run.config.precision}"'
        )
    if args.seed not in (run.config.seed, type(args).seed):
        raise ConfigError(
            f"TrainingArguments.seed={args.seed} differs from the seed of the run, which is "
            f"{run.config.seed}; use samestep.init(seed={args.seed})"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in NOT_SUPPORTED):
        raise ConfigError(f"optim={optimizer!r} updates parameters on its own; use another one")
    check_devices(run, "the Trainer")
    for name in NOT_CALLED:
        if getattr(kind, name) is not getattr(transformers.Trainer, name):
            raise ConfigError(
                f"{kind.__name__}.{name} would have no effect, because samestep orders the samples "
                "and runs the lanes; override compute_loss or count_items, or the data set"
            )


def _of_worker(args: TrainingArguments, run: Run) -> TrainingArguments:
    """Return a copy of the arguments for a worker, which is alone as far as its Trainer knows."""
    args = copy.copy(args)
    args.distributed_state = WorkerState(run.rank, run.rank, run.device)
    # two cached values, and tokens, which run.backward averages
    args.__dict__.update(_setup_devices=run.device, _n_gpu=int(run.device.type == "cuda"))
    args.average_tokens_across_devices = False
    return args


def _joined(parts: list[Any]) -> Any:
    """Return the arrays of all blocks, padded with -100 to the same shape."""
    container = EvalLoopContainer(do_nested_concat=True, padding_index=-100)
    for part in parts:
        if part is not None:
            container.add(part)
    return container.get_arrays()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
