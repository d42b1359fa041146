"""Train or evaluate a Vision Transformer on images, on one device: the script that train.py came from.

python recipes/vit/plain.py recipes/vit/digits.yaml --dir runs/plain
python recipes/vit/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.one_device import (
    autocast,
    device,
    load_checkpoint,
    save_checkpoint,
    to_device,
    write_settings,
)
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script
from recipes.vit.config import Settings
from recipes.vit.data import open_images
from recipes.vit.losses import score, shown, training_loss
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
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    images = open_images(settings.data, settings.model)
    models = make_models(settings)
    if not flags.eval:
        return train(flags.dir, settings, models, images)
    epochs_done = load_checkpoint(flags.dir, **models)
    if epochs_done == 0:
        if settings.pretrained is None:
            raise SettingsError(
                "--eval found no checkpoint and no pretrained file; expected a run's --dir, or --pretrained FILE"
            )
        models.pop("ema", None)  # of a pretrained file there is no average
    scores = evaluate(settings, models, images)
    print(f"epoch {epochs_done}: {shown(scores)}")
    return scores


def train(
    directory: Path | None, settings: Settings, models: dict[str, nn.Module], images: Split
) -> dict[str, float]:
    """Train from the epoch of the checkpoint to the last epoch."""
    model, ema = models["model"], models.get("ema")
    steps_per_epoch = math.ceil(len(images.train) / settings.batch_size)
    steps, warmup_steps = (
        settings.epochs * steps_per_epoch,
        round(settings.optimizer.warmup_epochs * steps_per_epoch),
    )
    optimizer = make_optimizer(model, settings.optimizer, settings.batch_size)
    scheduler = make_scheduler(optimizer, settings.optimizer, steps, warmup_steps)
    begun_at = load_checkpoint(directory, **models, optimizer=optimizer, scheduler=scheduler)
    print(describe_scaling(settings.optimizer, settings.batch_size))
    write_settings(directory, settings)
    loss_fn = partial(training_loss, mixup=settings.mixup, label_smoothing=settings.label_smoothing)
    batches = DataLoader(
        images.train, settings.batch_size, shuffle=True, num_workers=settings.data.loader_workers
    )
    progress = tqdm(total=steps, initial=begun_at * steps_per_epoch, unit="step", disable=None)
    scores: dict[str, float] = {}

    model.train()
    for epochs_done in range(begun_at + 1, settings.epochs + 1):
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

        if epochs_done % settings.evaluate_every == 0 or epochs_done == settings.epochs:
            scores = evaluate(settings, models, images)
            save_checkpoint(
                directory, epochs_done, **models, optimizer=optimizer, scheduler=scheduler
            )
            progress.write(f"epoch {epochs_done}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(settings, models, images)


@torch.no_grad()
def evaluate(
    settings: Settings, models: Mapping[str, nn.Module], images: Split
) -> dict[str, float]:
    """Return the scores of each model over all held-out images, as `model_top1` and so on."""
    scores = {}
    for name, model in models.items():
        sums: dict[str, float] = defaultdict(float)
        model.eval()
        for batch in map(
            to_device,
            DataLoader(images.test, settings.batch_size, num_workers=settings.data.loader_workers),
        ):
            with autocast(settings.precision):
                means = score(model, batch)
            for key, value in means.items():
                sums[key] += value.item() * len(batch[0])  # the last batch is shorter
        model.train()
        scores |= {f"{name}_{key}": value / len(images.test) for key, value in sums.items()}
    return scores


def make_models(settings: Settings) -> dict[str, nn.Module]:
    """Make the model and, where settings ask for it, the average of its parameters."""
    model = VisionTransformer(settings.model)
    if settings.pretrained is not None:
        print(load_pretrained(model, settings.pretrained))
    models: dict[str, nn.Module] = {"model": model.to(device())}
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
        help="of the run: settings, checkpoint; a run there is continued",
    )
    flags_parser.add_argument(
        "--eval", action="store_true", help="evaluate the checkpoint in DIR, or the pretrained FILE"
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
