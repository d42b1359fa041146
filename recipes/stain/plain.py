"""Train the networks of DeepLIIF on one device: the script that train.py is based on.

python recipes/stain/plain.py data.path=data/tissue --dir runs/plain
python recipes/stain/plain.py --continue --dir runs/plain
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from recipes.file_check import FileCheck
from recipes.one_device import autocast, device, load_checkpoint, save_checkpoint, to_device
from recipes.settings import SettingsError, run_script, write_settings
from recipes.stain.config import Settings, read_arguments
from recipes.stain.data import Split, Strips, open_strips
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
from recipes.stain.validation import Scores, dice_scores, shown


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train; return the scores on the held-out strips."""
    flags, settings = read_arguments(arguments)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    strips = open_strips(settings, FileCheck(settings.data, flags.dir, say=print))
    networks = Networks(settings)
    if settings.pretrained is not None:
        print(load_pretrained(networks, settings))
    networks = networks.to(device())
    return train(flags, settings, networks, strips)


def train(
    flags: argparse.Namespace, settings: Settings, networks: Networks, strips: Split
) -> dict[str, float]:
    """Train from the epoch of the checkpoint to the last epoch."""
    optimizers = make_optimizers(settings.optimizer, networks, settings.batch_size)
    schedulers = make_schedulers(settings, optimizers)
    objects = tracked(networks, optimizers, schedulers)
    first = 1 + load_checkpoint(flags.dir, **objects)
    if flags.resume and first == 1:
        raise SettingsError(f"--continue needs a checkpoint, and {flags.dir} has none")
    print(describe_rates(settings.optimizer, settings.batch_size))
    write_settings(flags.dir, settings)
    batches = DataLoader(
        strips.train, settings.batch_size, shuffle=True, num_workers=settings.data.loader_workers
    )
    steps_per_epoch = -(-len(strips.train) // settings.batch_size)
    steps, done = (epochs * steps_per_epoch for epochs in (settings.epochs, first - 1))
    progress = tqdm(total=steps, initial=done, unit="step", disable=None)
    losses = Losses(settings)
    scores: dict[str, float] = {}

    networks.train()
    for epoch in range(first, settings.epochs + 1):
        for batch in map(to_device, batches):
            with autocast(settings.precision):
                judged, _ = losses.discriminators(networks, batch)
            judged.backward(inputs=list(networks.discriminators.parameters()))
            optimizers["discriminators"].step()
            optimizers["discriminators"].zero_grad()

            with autocast(settings.precision):
                made, _ = losses.generators(networks, batch)
            # does not change the discriminators
            made.backward(inputs=list(networks.generators.parameters()))
            optimizers["generators"].step()
            optimizers["generators"].zero_grad()
            shown_losses = {"discriminators": judged.item(), "generators": made.item()}
            progress.set_postfix(shown_losses, refresh=False)
            progress.update()

        end_epoch(schedulers.values())
        if epoch % settings.evaluate_every == 0 or epoch == settings.epochs:
            scores = evaluate(settings, networks.generators, strips.val)
            end_evaluation(schedulers.values(), scores["l1"])
            save_checkpoint(flags.dir, epoch, **objects)
            progress.write(f"epoch {epoch}: {shown(scores)}")
    progress.close()
    # a finished run has no steps left
    return scores or evaluate(settings, networks.generators, strips.val)


@torch.no_grad()
def evaluate(settings: Settings, generators: nn.Module, strips: Strips) -> dict[str, float]:
    """Return the scores over all strips, by name."""
    score, l1 = Scores(settings.modalities), 0.0
    generators.eval()
    batches = DataLoader(strips, settings.batch_size, num_workers=settings.data.loader_workers)
    for batch in map(to_device, batches):
        with autocast(settings.precision):
            l1 += score(generators, batch)["l1"].item() * len(batch)  # the last one may be shorter
    generators.train()
    computed = {name: metric.compute().cpu() for name, metric in score.metrics.items()}
    by_class = dice_scores(computed.pop("dice"))
    values = {name: value.item() for name, value in computed.items()}
    return {"l1": l1 / len(strips), **values, **by_class}


if __name__ == "__main__":
    run_script(main)
