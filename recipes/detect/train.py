"""Train or evaluate a detector with instance masks on a data set in COCO format.

python recipes/detect/make_data.py runs/digits-coco
samestep run -n 2 recipes/detect/train.py recipes/detect/digits.yaml --dir runs/detect
samestep run -n 2 recipes/detect/train.py --eval --dir runs/detect
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.detect.config import Settings
from recipes.detect.data import boxes_in, collate, open_images
from recipes.detect.evaluate import average_precision, shown
from recipes.detect.losses import detection_loss
from recipes.detect.model import Detector
from recipes.detect.optimizer import describe, make_optimizer, make_schedule, make_scheduler
from recipes.detect.picture import picture
from recipes.detect.predict import predict
from recipes.progress import Progress
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script, write_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from recipes.detect.data import Split

PREDICTIONS_FILE = "predictions.json"
PICTURED = 8


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores on the held-out images."""
    flags, settings = read_arguments(arguments)
    with ss.init(
        dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision
    ) as run:
        images = open_images(settings.data)
        model = run.replicate(
            Detector(settings.model, classes=len(images.train.annotations.categories))
        )
        if not flags.eval:
            return train(run, settings, model, images)
        if run.step == 0:  # nothing was resumed: there is no snapshot
            raise SettingsError(
                "--eval found no snapshot; expected the --dir of a run that has one"
            )
        run.track(model=model)  # and restore it
        scores = evaluate(run, settings, model, images)
        run.print(f"step {run.step}: {shown(scores)}")
        return scores


def train(run: ss.Run, settings: Settings, model: Detector, images: Split) -> dict[str, float]:
    """Train from where the run stands to the last step of the schedule."""
    schedule = make_schedule(settings.optimizer, settings.batch_size)
    optimizer = make_optimizer(model, settings.optimizer, schedule)
    if settings.optimizer.shard:
        optimizer = run.shard(optimizer)
    scheduler = make_scheduler(optimizer, schedule)
    # and restore them where the run resumes
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    run.print(describe(schedule, settings.optimizer, settings.batch_size))
    write_settings(run, settings)
    loss_fn = partial(detection_loss, settings=settings.loss)
    batches = run.batches(
        images.train,
        settings.batch_size,
        steps=schedule.steps,
        group_by=images.train.groups(),
        collate_fn=partial(collate, multiple=model.multiple),
        loader_workers=settings.data.loader_workers,
    )
    progress = Progress(run, schedule.steps)
    scores: dict[str, float] = {}

    model.train()
    for steps_done, batch in enumerate(batches, run.step + 1):
        # Sums over a lane's images, divided by the boxes of the global batch: a lane without a box
        # still learns background.
        means = run.backward(loss_fn, model, batch, count=boxes_in, reduction="sum")
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(model, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.log(means, learning_rate=scheduler.get_last_lr()[0])
        progress.update(means, sum(batch.counts))
        scheduler.step()

        if steps_done % settings.evaluate_every == 0 or steps_done == schedule.steps:
            scores = evaluate(run, settings, model, images)
            run.log(**scores)
            run.snapshot(score=scores["mask_ap"])
            progress.say(f"step {steps_done}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(run, settings, model, images)


def evaluate(run: ss.Run, settings: Settings, model: Detector, images: Split) -> dict[str, float]:
    """Predict on all held-out images, one at a time so that none is padded for another; return the average precisions.

    Rank 0 gets the predictions in data set order; it scores them, and writes them and a picture
    into the run's directory.
    """
    val = images.val
    predictions = run.evaluate(
        partial(predict, categories=val.annotations.categories, settings=settings.predict),
        model,
        val,
        batch_size=1,
        gather=True,
        collate_fn=partial(collate, multiple=model.multiple),
        loader_workers=settings.data.loader_workers,
    )
    scores = None
    if run.is_main:
        scores = average_precision(val.annotations, predictions)
        if run.dir is not None:
            content = json.dumps(
                [prediction for of_image in predictions for prediction in of_image]
            )
            (run.dir / PREDICTIONS_FILE).write_text(content, encoding="utf-8")
            some = range(min(PICTURED, len(val)))
            run.log_image(
                "val",
                picture(
                    [val.read(index) for index in some],
                    predictions[: len(some)],
                    dict(val.annotations.categories),
                ),
            )
    return run.broadcast(scores)


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(
        Settings, "Train or evaluate a detector with instance masks on a data set in COCO format."
    )
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, record, snapshots; a run there is continued",
    )
    flags_parser.add_argument(
        "--eval", action="store_true", help="evaluate the newest snapshot in DIR"
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    if flags.eval and not flags.dir:
        flags_parser.error("--eval needs --dir, the directory of a run")
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval else []
    return flags, read(Settings, [*from_run, *flags.settings])


if __name__ == "__main__":
    run_script(main)
