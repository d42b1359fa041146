"""Train or evaluate a deep Q-network on one device: the script that train.py is based on.

python recipes/atari/plain.py recipes/atari/up_n_down.yaml --dir runs/plain
python recipes/atari/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from recipes.atari.config import Settings, check
from recipes.atari.lane import Lane
from recipes.atari.losses import td_loss
from recipes.atari.play import play_games, scores_of, shown
from recipes.atari.training import describe_rate, load_pretrained, make_networks, make_optimizer
from recipes.one_device import autocast, device, load_checkpoint, save_checkpoint, to_device
from recipes.settings import SettingsError, read_arguments, run_script, write_settings


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the scores of the last evaluation."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    torch.manual_seed(settings.seed)
    check(settings, lanes=1)
    networks = make_networks(settings)
    if settings.pretrained is not None:
        print(load_pretrained(networks, settings, evaluates=flags.eval and not flags.dir))
    networks = {name: network.to(device()) for name, network in networks.items()}
    if not flags.eval:
        return train(flags.dir, settings, networks)
    update = load_checkpoint(flags.dir, **networks)
    if update == 0 and flags.dir:  # no checkpoint was found
        raise SettingsError("--eval needs the --dir of a run with a checkpoint")
    scores = evaluate(settings, networks["online"])
    random_play = evaluate(settings, networks["online"], exploration=1.0)
    print(f"update {update}: {shown(scores)}\nrandom play: {shown(random_play)}")
    return scores


def train(
    directory: Path | None, settings: Settings, networks: dict[str, nn.Module]
) -> dict[str, float]:
    """Train from the update of the checkpoint to the last one; games and replay start again."""
    online, target = networks["online"], networks["target"]
    target.load_state_dict(online.state_dict())
    optimizer = make_optimizer(online, settings)
    done = load_checkpoint(directory, **networks, optimizer=optimizer)
    print(describe_rate(settings))
    write_settings(directory, settings)
    loss_fn = partial(td_loss, settings=settings.optimizer)
    games = Lane(settings, online, lanes=1)
    progress = tqdm(total=settings.updates, initial=done, unit="update", disable=None)
    scores: dict[str, float] = {}

    for update in range(done + 1, settings.updates + 1):
        batch = to_device(next(games))
        with autocast(settings.precision):
            loss, _ = loss_fn(networks, batch)
        loss.backward()
        if settings.optimizer.clip_norm is not None:
            clip_grad_norm_(online.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if update % settings.optimizer.target_every == 0:
            target.load_state_dict(online.state_dict())
        progress.set_postfix(loss=loss.item(), refresh=False)
        progress.update()

        if update % settings.evaluation.every == 0 or update == settings.updates:
            scores = evaluate(settings, online)
            save_checkpoint(directory, update, **networks, optimizer=optimizer)
            progress.write(f"update {update}: {shown(scores)}")
    progress.close()
    return scores or evaluate(settings, online)  # a finished run has no steps left


@torch.no_grad()
def evaluate(
    settings: Settings, online: nn.Module, exploration: float | None = None
) -> dict[str, float]:
    """Play the games of the evaluation; return their scores."""
    games = settings.evaluation
    exploration = games.exploration if exploration is None else exploration
    play = partial(play_games, settings=settings.game, seed=settings.seed, exploration=exploration)
    with autocast(settings.precision):
        played = [play(online, numbers) for numbers in torch.arange(games.games).split(games.block)]
    names = ("return", "actions")
    return scores_of({name: torch.cat([block[name] for block in played]) for name in names})


if __name__ == "__main__":
    run_script(main)
