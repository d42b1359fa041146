"""Train the networks of DeepLIIF: translate IHC tiles into other stains, and segment their cells.

samestep run -n 2 recipes/stain/train.py data.path=data/tissue --dir runs/tissue
samestep run -n 2 recipes/stain/train.py --continue --dir runs/tissue
"""

from __future__ import annotations

from collections.abc import Sequence

import samestep as ss
from recipes.file_check import FileCheck
from recipes.progress import Progress
from recipes.resume import settings_applied
from recipes.settings import SettingsError, run_script, write_run_settings
from recipes.stain.config import Settings, read_arguments
from recipes.stain.data import Split, open_strips
from recipes.stain.model import Networks
from recipes.stain.pretrained import load_pretrained
from recipes.stain.training import (
    Losses,
    describe_rates,
    end_epoch,
    end_evaluation,
    make_optimizers,
    make_schedulers,
    tracked,
)
from recipes.stain.validation import evaluate, log_sheets, shown


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train; return the scores on the held-out strips."""
    flags, settings = read_arguments(arguments)
    with ss.init(
        dir=flags.dir,
        lanes=settings.lanes,
        seed=settings.seed,
        precision=settings.precision,
        settings=settings.recorded(),
    ) as run:
        if flags.resume and run.step == 0:  # no snapshot was found
            raise SettingsError(f"--continue needs a snapshot, and {flags.dir} has none")
        strips = open_strips(settings, FileCheck(settings.data, flags.dir, run))
        networks = Networks(settings)
        if settings.pretrained is not None and run.step == 0:  # a resumed run has its own
            run.print(load_pretrained(networks, settings))
        networks = run.replicate(networks)
        return train(run, settings, networks, strips)


def train(run: ss.Run, settings: Settings, networks: Networks, strips: Split) -> dict[str, float]:
    """Train from the current step to the last epoch."""
    optimizers = make_optimizers(settings.optimizer, networks, settings.batch_size)
    if settings.optimizer.shard:
        optimizers = {name: run.shard(optimizer) for name, optimizer in optimizers.items()}
    schedulers = make_schedulers(settings, optimizers)
    with settings_applied(run, *optimizers.values(), *schedulers.values()):
        # restores them if resumed, but the settings are not those of the snapshot
        run.track(**tracked(networks, optimizers, schedulers))
    run.print(describe_rates(settings.optimizer, settings.batch_size))
    write_run_settings(run, settings)
    loop = run.batches(
        strips.train,
        settings.batch_size,
        epochs=settings.epochs,
        loader_workers=settings.data.loader_workers,
    )
    progress = Progress(run, loop, unit="strips")
    losses = Losses(settings)
    scores: dict[str, float] = {}

    networks.train()
    for batch in loop:
        judged = run.backward(
            losses.discriminators, networks, batch, update=networks.discriminators
        )
        optimizers["discriminators"].step()
        optimizers["discriminators"].zero_grad()

        # does not change the discriminators
        made = run.backward(losses.generators, networks, batch, update=networks.generators)
        optimizers["generators"].step()
        optimizers["generators"].zero_grad()

        rates = {
            f"{name}/learning_rate": optimizer.param_groups[0]["lr"]
            for name, optimizer in optimizers.items()
        }
        run.log(discriminators=judged, generators=made, **rates)
        progress.update(
            {"discriminators": judged["loss"], "generators": made["loss"]}, sum(batch.counts)
        )

        if loop.step % loop.steps_per_epoch == 0:
            end_epoch(schedulers.values())
        if progress.is_due(settings.evaluate_every * loop.steps_per_epoch):
            run.snapshot(now=True)  # before the evaluation, which may fail
            scores = evaluate(run, settings, networks.generators, strips.val)
            run.log(scores)
            log_sheets(run, settings, networks.generators, strips.val)
            end_evaluation(schedulers.values(), scores["l1"])
            run.snapshot(score=-scores["l1"])
            progress.print(f"epoch {loop.step // loop.steps_per_epoch}: {shown(scores)}")
    # a finished run has no steps left
    return scores or evaluate(run, settings, networks.generators, strips.val)


if __name__ == "__main__":
    run_script(main)
