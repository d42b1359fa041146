"""Train or evaluate a Vision Transformer on images.

samestep run -n 2 recipes/vit/train.py recipes/vit/digits.yaml --dir runs/digits
samestep run -n 2 recipes/vit/train.py --eval --dir runs/digits
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.progress import Progress
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script, write_settings
from recipes.vit.config import Settings
from recipes.vit.data import open_images
from recipes.vit.losses import score, shown, training_loss
from recipes.vit.mistakes import log_mistakes
from recipes.vit.model import VisionTransformer
from recipes.vit.optimizer import describe_scaling, make_optimizer, make_scheduler
from recipes.vit.pretrained import load_pretrained

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from torch import nn

    from recipes.vit.data import Split


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores on the held-out images."""
    flags, settings = read_arguments(arguments)
    with ss.init(
        dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision
    ) as run:
        images = open_images(settings.data, settings.model)
        models = make_models(run, settings)
        if not flags.eval:
            return train(run, settings, models, images)
        if run.step == 0:  # nothing was resumed: there is no snapshot
            if settings.pretrained is None:
                raise SettingsError(
                    "--eval found no snapshot and no pretrained file; expected a run's --dir, or --pretrained FILE"
                )
            models.pop("ema", None)  # of a pretrained file there is no average
        run.track(**models)  # and restore them where the run resumes
        scores = evaluate(run, settings, models, images)
        run.print(f"step {run.step}: {shown(scores)}")
        return scores


def train(
    run: ss.Run, settings: Settings, models: dict[str, nn.Module], images: Split
) -> dict[str, float]:
    """Train from where the run stands to the last epoch."""
    model, ema = models["model"], models.get("ema")
    steps_per_epoch = math.ceil(len(images.train) / settings.batch_size)
    steps, warmup_steps = (
        settings.epochs * steps_per_epoch,
        round(settings.optimizer.warmup_epochs * steps_per_epoch),
    )
    evaluate_every = settings.evaluate_every * steps_per_epoch
    optimizer = make_optimizer(model, settings.optimizer, settings.batch_size)
    if settings.optimizer.shard:
        optimizer = run.shard(optimizer)
    scheduler = make_scheduler(optimizer, settings.optimizer, steps, warmup_steps)
    # and restore them where the run resumes
    run.track(**models, optimizer=optimizer, scheduler=scheduler)
    run.print(describe_scaling(settings.optimizer, settings.batch_size))
    write_settings(run, settings)
    loss_fn = partial(training_loss, mixup=settings.mixup, label_smoothing=settings.label_smoothing)
    batches = run.batches(
        images.train,
        settings.batch_size,
        epochs=settings.epochs,
        loader_workers=settings.data.loader_workers,
    )
    progress = Progress(run, steps, steps_per_epoch)
    scores: dict[str, float] = {}

    model.train()
    for steps_done, batch in enumerate(batches, run.step + 1):
        means = run.backward(loss_fn, model, batch)
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(model, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update_parameters(model)
        run.log(means, learning_rate=scheduler.get_last_lr()[0])
        progress.update(means, sum(batch.counts))
        scheduler.step()

        if steps_done % evaluate_every == 0 or steps_done == steps:
            scores = evaluate(run, settings, models, images)
            run.log(**scores)
            log_mistakes(run, settings, model, images)
            run.snapshot(score=scores["model_top1"])
            progress.say(f"epoch {steps_done // steps_per_epoch}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(run, settings, models, images)


def evaluate(
    run: ss.Run, settings: Settings, models: Mapping[str, nn.Module], images: Split
) -> dict[str, float]:
    """Return the scores of each model over all held-out images, as `model_top1` and so on."""
    scores = {}
    for name, model in models.items():
        means = run.evaluate(
            score,
            model,
            images.test,
            settings.batch_size,
            loader_workers=settings.data.loader_workers,
        )
        scores |= {f"{name}_{key}": value for key, value in means.items()}
    return scores


def make_models(run: ss.Run, settings: Settings) -> dict[str, nn.Module]:
    """Make the model and, where settings ask for it, the average of its parameters."""
    model = VisionTransformer(settings.model)
    # a run that resumes has its own parameters
    if settings.pretrained is not None and run.step == 0:
        run.print(load_pretrained(model, settings.pretrained))
    models: dict[str, nn.Module] = {"model": run.replicate(model)}
    if settings.ema_decay is not None:
        models["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))
    return models


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, "Train or evaluate a Vision Transformer on images.")
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, record, snapshots; a run there is continued",
    )
    flags_parser.add_argument(
        "--eval",
        action="store_true",
        help="evaluate the newest snapshot in DIR, or the pretrained FILE",
    )
    flags_parser.add_argument("--pretrained", metavar="FILE", help="as pretrained=FILE")
    flags = flags_parser.parse_intermixed_args(arguments)
    if flags.eval and flags.dir and flags.pretrained:
        flags_parser.error("--eval takes --dir or --pretrained, not both")
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval and flags.dir else []
    from_flags = [f"pretrained={flags.pretrained}"] if flags.pretrained else []
    return flags, read(Settings, [*from_run, *flags.settings, *from_flags])


if __name__ == "__main__":
    run_script(main)
