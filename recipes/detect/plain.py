"""Train or evaluate a detector with instance masks on one device: the script that train.py came from.

python recipes/detect/make_data.py runs/digits-coco
python recipes/detect/plain.py recipes/detect/digits.yaml --dir runs/plain
python recipes/detect/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from tqdm import tqdm

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.detect.config import Settings
from recipes.detect.data import boxes_in, collate, open_images
from recipes.detect.evaluate import average_precision, shown
from recipes.detect.losses import detection_loss
from recipes.detect.model import Detector
from recipes.detect.optimizer import describe, make_optimizer, make_schedule, make_scheduler
from recipes.detect.picture import picture
from recipes.detect.predict import predict
from recipes.one_device import (
    autocast,
    device,
    load_checkpoint,
    save_checkpoint,
    to_device,
    write_settings,
)
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from recipes.detect.data import Split

PREDICTIONS_FILE = "predictions.json"
PICTURED = 8


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores on the held-out images."""
    flags, settings = read_arguments(arguments)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    images = open_images(settings.data)
    model = Detector(settings.model, classes=len(images.train.annotations.categories)).to(device())
    if not flags.eval:
        return train(flags.dir, settings, model, images)
    steps_done = load_checkpoint(flags.dir, model=model)
    if steps_done == 0:
        raise SettingsError("--eval found no checkpoint; expected the --dir of a run that has one")
    scores = evaluate(flags.dir, settings, model, images)
    print(f"step {steps_done}: {shown(scores)}")
    return scores


def train(
    directory: Path | None, settings: Settings, model: Detector, images: Split
) -> dict[str, float]:
    """Train from the step of the checkpoint to the last step of the schedule."""
    schedule = make_schedule(settings.optimizer, settings.batch_size)
    optimizer = make_optimizer(model, settings.optimizer, schedule)
    scheduler = make_scheduler(optimizer, schedule)
    begun_at = load_checkpoint(directory, model=model, optimizer=optimizer, scheduler=scheduler)
    print(describe(schedule, settings.optimizer, settings.batch_size))
    write_settings(directory, settings)
    loss_fn = partial(detection_loss, settings=settings.loss)
    batches = DataLoader(
        images.train,
        settings.batch_size,
        shuffle=True,
        collate_fn=partial(collate, multiple=model.multiple),
        num_workers=settings.data.loader_workers,
    )
    progress = tqdm(total=schedule.steps, initial=begun_at, unit="step", disable=None)
    scores: dict[str, float] = {}

    model.train()
    endless = map(to_device, chain.from_iterable(repeat(batches)))
    for steps_done, batch in zip(range(begun_at + 1, schedule.steps + 1), endless, strict=False):
        # Sums over the images, divided by the boxes of the batch: an image without a box still
        # teaches background.
        with autocast(settings.precision):
            total, _ = loss_fn(model, batch)
        loss = total / max(1, boxes_in(batch))
        loss.backward()
        if settings.optimizer.clip_norm is not None:
            clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=loss.item(), refresh=False)
        progress.update()
        scheduler.step()

        if steps_done % settings.evaluate_every == 0 or steps_done == schedule.steps:
            scores = evaluate(directory, settings, model, images)
            save_checkpoint(
                directory, steps_done, model=model, optimizer=optimizer, scheduler=scheduler
            )
            progress.write(f"step {steps_done}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(directory, settings, model, images)


@torch.no_grad()
def evaluate(
    directory: Path | None, settings: Settings, model: Detector, images: Split
) -> dict[str, float]:
    """Predict on all held-out images, one at a time so that none is padded for another; return the average precisions.

    The predictions and a picture are written into the run's directory.
    """
    val, predictions = images.val, []
    model.eval()
    batches = DataLoader(
        val,
        collate_fn=partial(collate, multiple=model.multiple),
        num_workers=settings.data.loader_workers,
    )
    for batch in map(to_device, batches):
        with autocast(settings.precision):
            predictions += predict(
                model, batch, categories=val.annotations.categories, settings=settings.predict
            )
    model.train()
    scores = average_precision(val.annotations, predictions)
    if directory is not None:
        content = json.dumps([prediction for of_image in predictions for prediction in of_image])
        (directory / PREDICTIONS_FILE).write_text(content, encoding="utf-8")
        some = range(min(PICTURED, len(val)))
        pixels = picture(
            [val.read(index) for index in some],
            predictions[: len(some)],
            dict(val.annotations.categories),
        )
        Image.fromarray(pixels).save(directory / "val.png")
    return scores


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(
        Settings, "Train or evaluate a detector with instance masks on a data set in COCO format."
    )
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, checkpoint; a run there is continued",
    )
    flags_parser.add_argument("--eval", action="store_true", help="evaluate the checkpoint in DIR")
    flags = flags_parser.parse_intermixed_args(arguments)
    if flags.eval and not flags.dir:
        flags_parser.error("--eval needs --dir, the directory of a run")
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval else []
    return flags, read(Settings, [*from_run, *flags.settings])


if __name__ == "__main__":
    run_script(main)
