"""Train or evaluate a Vision Transformer on one device: the script that train.py is based on.

python recipes/vit/plain.py recipes/vit/digits.yaml --dir runs/plain
python recipes/vit/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from tqdm import tqdm

from recipes.file_check import FileCheck
from recipes.one_device import autocast, device, load_checkpoint, save_checkpoint, to_device
from recipes.settings import SettingsError, read_arguments, run_script, write_settings
from recipes.vit import training
from recipes.vit.config import Settings
from recipes.vit.data import Split, open_images
from recipes.vit.model import VisionTransformer
from recipes.vit.pretrained import load_pretrained


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the scores on the held-out images."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    check = FileCheck(settings.data, flags.dir, say=print)
    images = open_images(settings.data, settings.model, check, train=not flags.eval)
    models = make_models(settings, evaluates=flags.eval and not flags.dir)
    if not flags.eval:
        return train(flags.dir, settings, models, images)
    epoch = load_checkpoint(flags.dir, **models)
    if epoch == 0:  # no checkpoint was found
        if flags.dir:
            raise SettingsError("--eval needs the --dir of a run with a checkpoint")
        models.pop("ema", None)  # a pretrained file has no average
    scores = evaluate(settings, models, images)
    print(f"epoch {epoch}: {training.shown(scores)}")
    return scores


def train(
    directory: Path | None, settings: Settings, models: dict[str, nn.Module], images: Split
) -> dict[str, float]:
    """Train from the epoch of the checkpoint to the last epoch."""
    model, ema = models["model"], models.get("ema")
    batches = DataLoader(
        images.train, settings.batch_size, shuffle=True, num_workers=settings.data.loader_workers
    )
    steps_per_epoch = -(-len(images.train) // settings.batch_size)
    steps = settings.epochs * steps_per_epoch
    optimizer = training.make_optimizer(model, settings.optimizer, settings.batch_size)
    scheduler = training.make_scheduler(optimizer, settings.optimizer, steps, steps_per_epoch)
    first = 1 + load_checkpoint(directory, **models, optimizer=optimizer, scheduler=scheduler)
    print(training.describe_rate(settings.optimizer, settings.batch_size))
    write_settings(directory, settings)
    loss_fn = training.make_loss(settings)
    done = (first - 1) * steps_per_epoch
    progress = tqdm(total=steps, initial=done, unit="step", disable=None)
    scores: dict[str, float] = {}

    model.train()
    for epoch in range(first, settings.epochs + 1):
        for batch in map(to_device, batches):
            with autocast(settings.precision):
                loss, _ = loss_fn(model, batch)
            loss.backward()
            if settings.optimizer.clip_norm is not None:
                clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update_parameters(model)
            progress.set_postfix(loss=loss.item(), refresh=False)
            progress.update()
            scheduler.step()

        if epoch % settings.evaluate_every == 0 or epoch == settings.epochs:
            scores = evaluate(settings, models, images)
            save_checkpoint(directory, epoch, **models, optimizer=optimizer, scheduler=scheduler)
            progress.write(f"epoch {epoch}: {training.shown(scores)}")
    progress.close()
    return scores or evaluate(settings, models, images)  # a finished run has no steps left


@torch.no_grad()
def evaluate(
    settings: Settings, models: Mapping[str, nn.Module], images: Split
) -> dict[str, float]:
    """Return the scores of each model over all held-out images, such as `model_top1`."""
    scores = {}
    for name, model in models.items():
        sums: dict[str, float] = defaultdict(float)
        model.eval()
        batches = DataLoader(
            images.test,
            settings.evaluate_batch_size or settings.batch_size,
            num_workers=settings.data.loader_workers,
        )
        for batch in map(to_device, batches):
            with autocast(settings.precision):
                means = training.score(model, batch)
            for key, value in means.items():
                # the last batch may be shorter
                sums[key] += value.double().mean().item() * len(batch[0])
        model.train()
        scores |= {f"{name}_{key}": value / len(images.test) for key, value in sums.items()}
    return scores


def make_models(settings: Settings, *, evaluates: bool) -> dict[str, nn.Module]:
    """Make the model and, if configured, the average of its parameters."""
    model = VisionTransformer(settings.model)
    if settings.pretrained is not None:
        print(load_pretrained(model, settings.pretrained, evaluates=evaluates))
    models: dict[str, nn.Module] = {"model": model.to(device())}
    if settings.ema_decay is not None:
        models["ema"] = training.make_ema(model, settings.ema_decay)
    return models


if __name__ == "__main__":
    run_script(main)
