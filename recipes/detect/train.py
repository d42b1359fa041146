"""Train or evaluate a detector with instance masks on a data set in COCO format.

python recipes/detect/make_data.py runs/digits-coco
samestep run -n 2 recipes/detect/train.py recipes/detect/digits.yaml --dir runs/detect
samestep run -n 2 recipes/detect/train.py --eval --dir runs/detect
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import samestep as ss
from recipes.detect.config import Settings
from recipes.detect.data import Split, boxes_in, collate, open_images, with_class_names
from recipes.detect.evaluate import average_precision, best_by, shown
from recipes.detect.losses import detection_loss
from recipes.detect.model import Detector
from recipes.detect.optimizer import describe, make_optimizer, make_schedule, make_scheduler
from recipes.detect.picture import draw_examples, write_predictions
from recipes.detect.predict import predict
from recipes.detect.pretrained import initialize
from recipes.file_check import FileCheck
from recipes.progress import Progress
from recipes.resume import settings_applied
from recipes.scores import write_scores
from recipes.settings import SettingsError, read_arguments, run_script, write_run_settings


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
        if flags.eval and flags.dir and run.step == 0:  # no snapshot was found
            raise SettingsError("--eval needs the --dir of a run with a snapshot")
        check = FileCheck(settings.data, flags.dir, run)
        masks = settings.model.masks
        images = open_images(settings.data, check, masks=masks, train=not flags.eval)
        run.print(images.describe())
        model = Detector(settings.model, classes=len(images.val.names))
        if run.step == 0:  # a resumed run has its own parameters
            run.print(initialize(model, settings, evaluates=flags.eval))
        model = run.replicate(model)
        if not flags.eval:
            return train(run, with_class_names(settings, images), model, images)
        run.track(model=model)  # restores it from a snapshot
        scores = evaluate(run, settings, model, images, flags.out)
        run.print(f"step {run.step}: {shown(scores)}")
        write_scores(run, flags.out, scores)
        return scores


def train(run: ss.Run, settings: Settings, model: Detector, images: Split) -> dict[str, float]:
    """Train from the current step to the last step of the schedule."""
    schedule = make_schedule(settings.optimizer, settings.batch_size)
    loop = run.batches(
        images.train,
        settings.batch_size,
        steps=schedule.steps,
        group_by=images.train.groups(),
        collate_fn=partial(collate, multiple=model.multiple),
        loader_workers=settings.data.loader_workers,
    )
    optimizer = make_optimizer(model, settings.optimizer, schedule)
    if settings.optimizer.shard:
        optimizer = run.shard(optimizer)
    scheduler = make_scheduler(optimizer, schedule)
    with settings_applied(run, optimizer, scheduler):  # not those of the snapshot
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)  # restores them if resumed
    run.print(describe(schedule, settings.optimizer, settings.batch_size))
    write_run_settings(run, settings)
    loss_fn = partial(detection_loss, settings=settings.loss)
    progress = Progress(run, loop)
    scores: dict[str, float] | None = None

    model.train()
    for batch in loop:
        # Sums over a lane's images are divided by the boxes of the global batch: a lane without
        # boxes still learns background.
        means = run.backward(loss_fn, model, batch, count=boxes_in, reduction="sum")
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(model, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.log(means, learning_rate=scheduler.get_last_lr()[0])
        progress.update(means, sum(batch.counts))
        scheduler.step()

        if progress.is_due(settings.evaluate_every):
            run.snapshot(now=True)  # before the evaluation, which may fail
            scores = evaluate(run, settings, model, images, run.dir)
            run.log(**scores)
            run.snapshot(score=best_by(scores))
            progress.print(f"step {loop.step}: {shown(scores)}")
    if scores is None:  # a finished run has no steps left
        scores = evaluate(run, settings, model, images, run.dir)
    return scores


def evaluate(
    run: ss.Run, settings: Settings, model: Detector, images: Split, directory: Path | None
) -> dict[str, float]:
    """Return the average precisions on all held-out images.

    Images are predicted one at a time, without padding. Rank 0 gets the predictions, scores them,
    writes them into the directory, and records a picture.
    """
    val = images.val
    predictions = run.evaluate(
        partial(predict, categories=list(val.names), settings=settings.predict),
        model,
        val,
        batch_size=1,
        gather=True,
        collate_fn=partial(collate, multiple=model.multiple),
        loader_workers=settings.data.loader_workers,
    )
    scores = None
    if run.is_main:
        scores = average_precision(val.truth, predictions)
        if directory is not None:
            write_predictions(directory, predictions)
            run.log_image("val", draw_examples(val, predictions))
    return run.broadcast(scores)


if __name__ == "__main__":
    run_script(main)
