"""Train or evaluate a Vision Transformer on images.

samestep run -n 2 recipes/vit/train.py recipes/vit/digits.yaml --dir runs/digits
samestep run -n 2 recipes/vit/train.py --eval --dir runs/digits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

import samestep as ss
from recipes.file_check import FileCheck
from recipes.progress import Progress
from recipes.resume import settings_applied
from recipes.scores import write_scores
from recipes.settings import SettingsError, read_arguments, run_script, write_run_settings
from recipes.vit import training
from recipes.vit.config import Settings
from recipes.vit.data import Split, open_images
from recipes.vit.mistakes import log_mistakes
from recipes.vit.model import VisionTransformer
from recipes.vit.pretrained import load_pretrained


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the scores on the held-out images."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    with ss.init(
        dir=flags.dir,
        read_only=flags.eval,
        lanes=settings.lanes,
        seed=settings.seed,
        precision=settings.precision,
        settings=settings.recorded(),
    ) as run:
        check = FileCheck(settings.data, flags.dir, run)
        images = open_images(settings.data, settings.model, check, train=not flags.eval)
        models = make_models(run, settings, evaluates=flags.eval)
        if not flags.eval:
            return train(run, settings, models, images)
        if run.step == 0:  # no snapshot was found
            if flags.dir:
                raise SettingsError("--eval needs the --dir of a run with a snapshot")
            models.pop("ema", None)  # a pretrained file has no average
        run.track(**models)  # restores them from a snapshot
        scores = evaluate(run, settings, models, images)
        run.print(f"step {run.step}: {training.shown(scores)}")
        write_scores(run, flags.out, scores)
        return scores


def train(
    run: ss.Run, settings: Settings, models: dict[str, nn.Module], images: Split
) -> dict[str, float]:
    """Train from the current step to the last epoch."""
    model, ema = models["model"], models.get("ema")
    loop = run.batches(
        images.train,
        settings.batch_size,
        epochs=settings.epochs,
        loader_workers=settings.data.loader_workers,
    )
    optimizer = training.make_optimizer(model, settings.optimizer, settings.batch_size)
    if settings.optimizer.shard:
        optimizer = run.shard(optimizer)
    steps = loop.steps, loop.steps_per_epoch
    scheduler = training.make_scheduler(optimizer, settings.optimizer, *steps)
    scaler = run.grad_scaler(enabled=run.config.precision == "float16")
    with settings_applied(run, optimizer, scheduler):  # not those of the snapshot
        # restores them if resumed
        run.track(**models, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    run.print(training.describe_batch(settings.batch_size, run.world_size, run.lanes))
    run.print(training.describe_rate(settings.optimizer, settings.batch_size))
    # with the names of the classes, --eval needs no training images
    data = replace(settings.data, class_names=images.class_names)
    write_run_settings(run, replace(settings, data=data))
    loss_fn = training.make_loss(settings, scale=scaler.scale)
    progress = Progress(run, loop, epoch_means=True)
    scores: dict[str, float] = {}

    model.train()
    for batch in loop:
        means = run.backward(loss_fn, model, batch)
        scaler.unscale_(optimizer)
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(model, settings.optimizer.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if ema is not None:
            ema.update_parameters(model)
        run.log(means, learning_rate=scheduler.get_last_lr()[0])
        progress.update(means, sum(batch.counts))
        scheduler.step()

        if progress.is_due(settings.evaluate_every * loop.steps_per_epoch):
            run.snapshot(now=True)  # before the evaluation, which may fail
            scores = evaluate(run, settings, models, images)
            run.log(**scores)
            log_mistakes(run, settings, model, images)
            run.snapshot(score=scores["model_top1"])
            progress.print(f"epoch {loop.step // loop.steps_per_epoch}: {training.shown(scores)}")
    return scores or evaluate(run, settings, models, images)  # a finished run has no steps left


def evaluate(
    run: ss.Run, settings: Settings, models: Mapping[str, nn.Module], images: Split
) -> dict[str, float]:
    """Return the scores of each model over all held-out images, such as `model_top1`."""
    scores = {}
    for name, model in models.items():
        means = run.evaluate(
            training.score,
            model,
            images.test,
            settings.evaluate_batch_size or settings.batch_size,
            loader_workers=settings.data.loader_workers,
        )
        scores |= {f"{name}_{key}": value for key, value in means.items()}
    return scores


def make_models(run: ss.Run, settings: Settings, *, evaluates: bool) -> dict[str, nn.Module]:
    """Make the model and, if configured, the average of its parameters."""
    model = VisionTransformer(settings.model)
    if settings.pretrained is not None and run.step == 0:  # a resumed run has its own parameters
        run.print(load_pretrained(model, settings.pretrained, evaluates=evaluates))
    models: dict[str, nn.Module] = {"model": run.replicate(model)}
    if settings.ema_decay is not None:
        models["ema"] = training.make_ema(model, settings.ema_decay)
    return models


if __name__ == "__main__":
    run_script(main)
