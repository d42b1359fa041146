"""Train the networks of DeepLIIF: translate IHC tiles into other stains, and segment their cells.

samestep run -n 2 recipes/stain/train.py data.path=data/tissue --dir runs/tissue
samestep run -n 2 recipes/stain/train.py --continue --dir runs/tissue
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Adam

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.progress import Progress
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script, write_settings
from recipes.stain.config import Settings
from recipes.stain.data import open_strips
from recipes.stain.losses import Losses
from recipes.stain.model import Networks
from recipes.stain.schedule import end_epoch, make_scheduler
from recipes.stain.validation import evaluate, log_sheets, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    import torch

    from recipes.stain.data import Split

HERE = Path(__file__).resolve().parent
SIZES = ("tissue", "full")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train as `arguments` (default: the process's) say; return the scores on the held-out strips."""
    flags, settings = read_arguments(arguments)
    with ss.init(
        dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision
    ) as run:
        if flags.go_on and run.step == 0:  # nothing was resumed
            raise SettingsError(
                f"--continue was given, and {flags.dir} has no snapshot; leave it out to start a run there"
            )
        strips = open_strips(settings)
        networks = run.replicate(Networks(settings))
        return train(run, settings, networks, strips)


def train(run: ss.Run, settings: Settings, networks: Networks, strips: Split) -> dict[str, float]:
    """Train from where the run stands to the last epoch."""
    optimizers = make_optimizers(run, settings, networks)
    schedulers = {
        name: make_scheduler(optimizer, settings.optimizer, settings.epochs)
        for name, optimizer in optimizers.items()
    }
    # and restore them where the run resumes
    run.track(generators=networks.generators, discriminators=networks.discriminators)
    run.track(**{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()})
    run.track(**{f"{name}_scheduler": scheduler for name, scheduler in schedulers.items()})
    write_settings(run, settings)
    steps_per_epoch = math.ceil(len(strips.train) / settings.batch_size)
    steps, evaluate_every = (
        settings.epochs * steps_per_epoch,
        settings.evaluate_every * steps_per_epoch,
    )
    batches = run.batches(
        strips.train,
        settings.batch_size,
        epochs=settings.epochs,
        loader_workers=settings.data.loader_workers,
    )
    progress = Progress(run, steps, steps_per_epoch, unit="strips")
    losses = Losses(settings)
    scores: dict[str, float] = {}

    networks.train()
    for steps_done, batch in enumerate(batches, run.step + 1):
        judged = run.backward(
            losses.discriminators, networks, batch, update=networks.discriminators
        )
        optimizers["discriminators"].step()
        optimizers["discriminators"].zero_grad()

        # discriminators stay as they are
        made = run.backward(losses.generators, networks, batch, update=networks.generators)
        optimizers["generators"].step()
        optimizers["generators"].zero_grad()

        run.log(discriminators=judged, generators=made, **learning_rates(optimizers))
        progress.update(
            {"discriminators": judged["loss"], "generators": made["loss"]}, sum(batch.counts)
        )

        evaluated = steps_done % evaluate_every == 0 or steps_done == steps
        if evaluated:
            scores = evaluate(run, settings, networks.generators, strips.val)
            run.log(scores)
            log_sheets(run, settings, networks.generators, strips.val)
            # at the end of the step, so with the schedulers as the next one finds them
            run.snapshot(score=-scores["l1"])
            progress.say(f"epoch {steps_done // steps_per_epoch}: {shown(scores)}")
        if steps_done % steps_per_epoch == 0:
            for scheduler in schedulers.values():
                end_epoch(scheduler, scores["l1"] if evaluated else None)
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(run, settings, networks.generators, strips.val)


def make_optimizers(
    run: ss.Run, settings: Settings, networks: Networks
) -> dict[str, torch.optim.Optimizer]:
    """Make Adam for all generators, and for all discriminators."""
    betas, rates = settings.optimizer.betas, settings.optimizer
    optimizers = {
        "generators": Adam(
            networks.generators.parameters(), lr=rates.generator_learning_rate, betas=betas
        ),
        "discriminators": Adam(
            networks.discriminators.parameters(), lr=rates.discriminator_learning_rate, betas=betas
        ),
    }
    return {
        name: run.shard(optimizer) if rates.shard else optimizer
        for name, optimizer in optimizers.items()
    }


def learning_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rates of a step, by name."""
    return {
        f"{name}/learning_rate": optimizer.param_groups[0]["lr"]
        for name, optimizer in optimizers.items()
    }


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, __doc__)
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, record, snapshots; a run there is continued",
    )
    flags_parser.add_argument(
        "--continue",
        action="store_true",
        dest="go_on",
        help="with the settings in DIR; an error where there is no run",
    )
    flags_parser.add_argument(
        "--size",
        choices=SIZES,
        default=SIZES[0],
        help="the file to start from: tissue.yaml, or full.yaml with DeepLIIF's sizes",
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    base = HERE / f"{flags.size}.yaml"
    if flags.go_on:
        base = (flags.dir or Path()) / SETTINGS_FILE
        if not base.exists():
            flags_parser.error(
                f"--continue found no {base}; expected the --dir of a run, or leave it out to start one"
            )
    return flags, read(Settings, [str(base), *flags.settings])


if __name__ == "__main__":
    run_script(main)
