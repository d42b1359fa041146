"""Train or evaluate a deep Q-network on an Atari game, on one device: the script that train.py came from.

python recipes/atari/plain.py recipes/atari/up_n_down.yaml --dir runs/plain
python recipes/atari/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.atari.config import Settings, check
from recipes.atari.game import Game
from recipes.atari.lane import Lane
from recipes.atari.losses import td_loss
from recipes.atari.model import QNetwork
from recipes.atari.play import play_games, scores_of, shown
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

    from torch import nn


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores of the last evaluation."""
    flags, settings = read_arguments(arguments)
    torch.manual_seed(settings.seed)
    check(settings, lanes=1)
    actions = Game(settings.game).actions
    networks = {
        name: QNetwork(settings.model, settings.game, actions).to(device())
        for name in ("online", "target")
    }
    if not flags.eval:
        return train(flags.dir, settings, networks)
    updates_done = load_checkpoint(flags.dir, **networks)
    if updates_done == 0:
        raise SettingsError(
            "--eval found no checkpoint; expected the --dir of a run that has made one"
        )
    scores = evaluate(settings, networks["online"])
    random_play = evaluate(settings, networks["online"], exploration=1.0)
    print(f"update {updates_done}: {shown(scores)}\nrandom play: {shown(random_play)}")
    return scores


def train(
    directory: Path | None, settings: Settings, networks: dict[str, nn.Module]
) -> dict[str, float]:
    """Train from the update of the checkpoint to the last update; games and replay begin anew there."""
    online, target = networks["online"], networks["target"]
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(
        online.parameters(), lr=settings.optimizer.learning_rate, eps=settings.optimizer.epsilon
    )
    begun_at = load_checkpoint(directory, **networks, optimizer=optimizer)
    write_settings(directory, settings)
    loss_fn = partial(td_loss, settings=settings.optimizer)
    progress = tqdm(total=settings.updates, initial=begun_at, unit="update", disable=None)
    scores: dict[str, float] = {}

    games = Lane(settings, online, lanes=1)
    for updates_done in range(begun_at + 1, settings.updates + 1):
        batch = to_device(next(games))
        with autocast(settings.precision):
            loss, _ = loss_fn(networks, batch)
        loss.backward()
        if settings.optimizer.clip_norm is not None:
            clip_grad_norm_(online.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if updates_done % settings.optimizer.target_every == 0:
            target.load_state_dict(online.state_dict())
        progress.set_postfix(loss=loss.item(), refresh=False)
        progress.update()

        if updates_done % settings.evaluation.every == 0 or updates_done == settings.updates:
            scores = evaluate(settings, online)
            save_checkpoint(directory, updates_done, **networks, optimizer=optimizer)
            progress.write(f"update {updates_done}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(settings, online)


@torch.no_grad()
def evaluate(
    settings: Settings, online: nn.Module, exploration: float | None = None
) -> dict[str, float]:
    """Play the games of the evaluation, some side by side; return mean and standard deviation of their returns."""
    games = settings.evaluation
    exploration = games.exploration if exploration is None else exploration
    play = partial(play_games, settings=settings.game, seed=settings.seed, exploration=exploration)
    with autocast(settings.precision):
        played = [play(online, numbers) for numbers in torch.arange(games.games).split(games.block)]
    return scores_of(
        {name: torch.cat([some[name] for some in played]) for name in ("return", "actions")}
    )


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, "Train or evaluate a deep Q-network on an Atari game.")
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, checkpoint; a run there is continued",
    )
    flags_parser.add_argument(
        "--eval",
        action="store_true",
        help="play with the checkpoint in DIR, and at random beside it",
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval and flags.dir else []
    return flags, read(Settings, [*from_run, *flags.settings])


if __name__ == "__main__":
    run_script(main)
