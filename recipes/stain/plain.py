"""Train the networks of DeepLIIF on one device: the script that train.py came from.

python recipes/stain/plain.py data.path=data/tissue --dir runs/plain
python recipes/stain/plain.py --continue --dir runs/plain
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim import Adam
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
from recipes.stain.config import Settings
from recipes.stain.data import open_strips
from recipes.stain.losses import Losses
from recipes.stain.model import Networks
from recipes.stain.schedule import end_epoch, make_scheduler
from recipes.stain.validation import Scores, dice_scores, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch import nn

    from recipes.stain.data import Split, Strips

HERE = Path(__file__).resolve().parent
SIZES = ("tissue", "full")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train as `arguments` (default: the process's) say; return the scores on the held-out strips."""
    flags, settings = read_arguments(arguments)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    strips = open_strips(settings)
    networks = Networks(settings).to(device())
    return train(flags, settings, networks, strips)


def train(
    flags: argparse.Namespace, settings: Settings, networks: Networks, strips: Split
) -> dict[str, float]:
    """Train from the epoch of the checkpoint to the last epoch."""
    optimizers = make_optimizers(settings, networks)
    schedulers = {
        name: make_scheduler(optimizer, settings.optimizer, settings.epochs)
        for name, optimizer in optimizers.items()
    }
    kept = {"generators": networks.generators, "discriminators": networks.discriminators}
    kept |= {f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}
    kept |= {f"{name}_scheduler": scheduler for name, scheduler in schedulers.items()}
    begun_at = load_checkpoint(flags.dir, **kept)
    if flags.go_on and begun_at == 0:
        raise SettingsError(
            f"--continue was given, and {flags.dir} has no checkpoint; leave it out to start a run there"
        )
    write_settings(flags.dir, settings)
    steps_per_epoch = math.ceil(len(strips.train) / settings.batch_size)
    batches = DataLoader(
        strips.train, settings.batch_size, shuffle=True, num_workers=settings.data.loader_workers
    )
    progress = tqdm(
        total=settings.epochs * steps_per_epoch,
        initial=begun_at * steps_per_epoch,
        unit="step",
        disable=None,
    )
    losses = Losses(settings)
    scores: dict[str, float] = {}

    networks.train()
    for epochs_done in range(begun_at + 1, settings.epochs + 1):
        for batch in map(to_device, batches):
            with autocast(settings.precision):
                judged, _ = losses.discriminators(networks, batch)
            judged.backward(inputs=list(networks.discriminators.parameters()))
            optimizers["discriminators"].step()
            optimizers["discriminators"].zero_grad()

            with autocast(settings.precision):
                made, _ = losses.generators(networks, batch)
            # discriminators stay as they are
            made.backward(inputs=list(networks.generators.parameters()))
            optimizers["generators"].step()
            optimizers["generators"].zero_grad()
            progress.set_postfix(
                discriminators=judged.item(), generators=made.item(), refresh=False
            )
            progress.update()

        evaluated = epochs_done % settings.evaluate_every == 0 or epochs_done == settings.epochs
        if evaluated:
            scores = evaluate(settings, networks.generators, strips.val)
            progress.write(f"epoch {epochs_done}: {shown(scores)}")
        for scheduler in schedulers.values():
            end_epoch(scheduler, scores["l1"] if evaluated else None)
        if evaluated:
            save_checkpoint(flags.dir, epochs_done, **kept)
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(settings, networks.generators, strips.val)


@torch.no_grad()
def evaluate(settings: Settings, generators: nn.Module, strips: Strips) -> dict[str, float]:
    """Return the scores over all strips, by name."""
    score, l1 = Scores(settings.modalities), 0.0
    generators.eval()
    for batch in map(
        to_device, DataLoader(strips, settings.batch_size, num_workers=settings.data.loader_workers)
    ):
        with autocast(settings.precision):
            l1 += score(generators, batch)["l1"].item() * len(batch)  # the last batch is shorter
    generators.train()
    found = {name: metric.compute().cpu() for name, metric in score.metrics.items()}
    by_class = dice_scores(found.pop("dice"))
    return {
        "l1": l1 / len(strips),
        **{name: value.item() for name, value in found.items()},
        **by_class,
    }


def make_optimizers(settings: Settings, networks: Networks) -> dict[str, torch.optim.Optimizer]:
    """Make Adam for all generators, and for all discriminators."""
    betas, rates = settings.optimizer.betas, settings.optimizer
    return {
        "generators": Adam(
            networks.generators.parameters(), lr=rates.generator_learning_rate, betas=betas
        ),
        "discriminators": Adam(
            networks.discriminators.parameters(), lr=rates.discriminator_learning_rate, betas=betas
        ),
    }


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, __doc__)
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, checkpoint; a run there is continued",
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
