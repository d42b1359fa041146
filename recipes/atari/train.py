"""Train or evaluate a deep Q-network on an Atari game.

samestep run -n 2 recipes/atari/train.py recipes/atari/up_n_down.yaml --dir runs/upndown
samestep run -n 2 recipes/atari/train.py --eval --dir runs/upndown
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.atari.config import Settings, check
from recipes.atari.game import Game
from recipes.atari.lane import Lane
from recipes.atari.losses import td_loss
from recipes.atari.model import QNetwork
from recipes.atari.play import play_games, scores_of, shown
from recipes.progress import Progress
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script, write_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch import nn


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores of the last evaluation."""
    flags, settings = read_arguments(arguments)
    with ss.init(
        dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision
    ) as run:
        check(settings, run.lanes)
        actions = Game(settings.game).actions
        networks = {
            name: run.replicate(QNetwork(settings.model, settings.game, actions))
            for name in ("online", "target")
        }
        if not flags.eval:
            return train(run, settings, networks)
        if run.step == 0:  # nothing was resumed: there is no snapshot
            raise SettingsError(
                "--eval found no snapshot; expected the --dir of a run that has made one"
            )
        run.track(**networks)  # and restore them
        scores = evaluate(run, settings, networks["online"])
        random_play = evaluate(run, settings, networks["online"], exploration=1.0)
        run.print(f"step {run.step}: {shown(scores)}\nrandom play: {shown(random_play)}")
        return scores


def train(run: ss.Run, settings: Settings, networks: dict[str, nn.Module]) -> dict[str, float]:
    """Train from where the run stands to the last update."""
    online, target = networks["online"], networks["target"]
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(
        online.parameters(), lr=settings.optimizer.learning_rate, eps=settings.optimizer.epsilon
    )
    run.track(**networks, optimizer=optimizer)  # and restore them where the run resumes
    write_settings(run, settings)
    loss_fn = partial(td_loss, settings=settings.optimizer)
    games = run.streams(
        lambda _: Lane(settings, online, run.lanes), steps=settings.updates, name="games"
    )
    progress = Progress(run, settings.updates, unit="environment steps")
    scores: dict[str, float] = {}

    for updates_done, batch in enumerate(games, run.step + 1):
        means = run.backward(loss_fn, networks, batch, update=online)
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(online, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if updates_done % settings.optimizer.target_every == 0:
            target.load_state_dict(online.state_dict())
        run.log(means)
        progress.update(
            means, settings.collect.environments * settings.collect.steps / settings.collect.updates
        )

        if updates_done % settings.evaluation.every == 0 or updates_done == settings.updates:
            scores = evaluate(run, settings, online)
            run.log(**scores)
            run.snapshot(score=scores["return"])
            progress.say(f"update {updates_done}: {shown(scores)}")
    progress.close()
    # a finished run that is started again makes no step
    return scores or evaluate(run, settings, online)


def evaluate(
    run: ss.Run, settings: Settings, online: nn.Module, exploration: float | None = None
) -> dict[str, float]:
    """Play the games of the evaluation, spread over the workers; return mean and standard deviation of their returns.

    Screens of the first game are drawn into the record.
    """
    games = settings.evaluation
    exploration = games.exploration if exploration is None else exploration
    seed = run.config.seed  # SAMESTEP_SEED wins over the one in settings
    play = partial(play_games, settings=settings.game, seed=seed, exploration=exploration)
    played = run.broadcast(run.evaluate(play, online, range(games.games), games.block, gather=True))
    run.log_image("random-play" if exploration == 1 else "game", played["film"][0])
    return scores_of(played)


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, "Train or evaluate a deep Q-network on an Atari game.")
    flags_parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="of the run: settings, record, snapshots; a run there is continued",
    )
    flags_parser.add_argument(
        "--eval",
        action="store_true",
        help="play with the newest snapshot in DIR, and at random beside it",
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval and flags.dir else []
    return flags, read(Settings, [*from_run, *flags.settings])


if __name__ == "__main__":
    run_script(main)
