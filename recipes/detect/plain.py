"""Train or evaluate a detector with instance masks on one device: the basis of train.py.

python recipes/detect/make_data.py runs/digits-coco
python recipes/detect/plain.py recipes/detect/digits.yaml --dir runs/plain
python recipes/detect/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import torch
from PIL import Image
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from tqdm import tqdm

from recipes.detect.config import Settings
from recipes.detect.data import Split, boxes_in, collate, open_images, with_class_names
from recipes.detect.evaluate import average_precision, shown
from recipes.detect.losses import detection_loss
from recipes.detect.model import Detector
from recipes.detect.optimizer import describe, make_optimizer, make_schedule, make_scheduler
from recipes.detect.picture import draw_examples, write_predictions
from recipes.detect.predict import predict
from recipes.detect.pretrained import initialize
from recipes.file_check import FileCheck
from recipes.one_device import autocast, device, load_checkpoint, save_checkpoint, to_device
from recipes.settings import SettingsError, read_arguments, run_script, write_settings


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the scores on the held-out images."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    check = FileCheck(settings.data, flags.dir, say=print)
    masks = settings.model.masks
    images = open_images(settings.data, check, masks=masks, train=not flags.eval)
    print(images.describe())
    model = Detector(settings.model, classes=len(images.val.names))
    print(initialize(model, settings, evaluates=flags.eval and not flags.dir))
    model = model.to(device())
    if not flags.eval:
        return train(flags.dir, with_class_names(settings, images), model, images)
    step = load_checkpoint(flags.dir, model=model)
    if step == 0 and flags.dir:  # no checkpoint was found
        raise SettingsError("--eval needs the --dir of a run with a checkpoint")
    scores = evaluate(flags.out, settings, model, images)
    print(f"step {step}: {shown(scores)}")
    return scores


def train(
    directory: Path | None, settings: Settings, model: Detector, images: Split
) -> dict[str, float]:
    """Train from the step of the checkpoint to the last step of the schedule."""
    schedule = make_schedule(settings.optimizer, settings.batch_size)
    batches = DataLoader(
        images.train,
        settings.batch_size,
        shuffle=True,
        collate_fn=partial(collate, multiple=model.multiple),
        num_workers=settings.data.loader_workers,
    )
    optimizer = make_optimizer(model, settings.optimizer, schedule)
    scheduler = make_scheduler(optimizer, schedule)
    done = load_checkpoint(directory, model=model, optimizer=optimizer, scheduler=scheduler)
    print(describe(schedule, settings.optimizer, settings.batch_size))
    write_settings(directory, settings)
    loss_fn = partial(detection_loss, settings=settings.loss)
    progress = tqdm(total=schedule.steps, initial=done, unit="step", disable=None)
    scores: dict[str, float] | None = None

    model.train()
    endless = map(to_device, chain.from_iterable(repeat(batches)))
    for step, batch in zip(range(done + 1, schedule.steps + 1), endless, strict=False):
        # The sum over the images is divided by the boxes of the batch: an image without boxes
        # still learns background.
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

        if step % settings.evaluate_every == 0 or step == schedule.steps:
            scores = evaluate(directory, settings, model, images)
            save_checkpoint(directory, step, model=model, optimizer=optimizer, scheduler=scheduler)
            progress.write(f"step {step}: {shown(scores)}")
    progress.close()
    if scores is None:  # a finished run has no steps left
        scores = evaluate(directory, settings, model, images)
    return scores


@torch.no_grad()
def evaluate(
    directory: Path | None, settings: Settings, model: Detector, images: Split
) -> dict[str, float]:
    """Return the average precisions on all held-out images.

    Images are predicted one at a time, without padding. The predictions and a picture are written
    into the run's directory.
    """
    val, predictions = images.val, []
    predict_fn = partial(predict, categories=list(val.names), settings=settings.predict)
    model.eval()
    batches = DataLoader(
        val,
        collate_fn=partial(collate, multiple=model.multiple),
        num_workers=settings.data.loader_workers,
    )
    for batch in map(to_device, batches):
        with autocast(settings.precision):
            predictions += predict_fn(model, batch)
    model.train()
    if directory is not None:
        write_predictions(directory, predictions)
        Image.fromarray(draw_examples(val, predictions)).save(directory / "val.png")
    return average_precision(val.truth, predictions)


if __name__ == "__main__":
    run_script(main)
