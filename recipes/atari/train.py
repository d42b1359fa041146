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
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds only its neighbours by itself

import samestep as ss
from recipes.atari.config import Settings, check
from recipes.atari.game import Game
from recipes.atari.lane import Lane
from recipes.atari.model import QNetwork
from recipes.atari.play import play_games
from recipes.progress import Progress
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script, write_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch import Tensor, nn

    from recipes.atari.config import OptimizerSettings
    from recipes.atari.lane import LaneBatch


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate as `arguments` (default: the process's) say; return the scores of the last evaluation."""
    flags, settings = read_arguments(arguments)
    with ss.init(dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision) as run:
        check(settings, run.lanes)
        actions = Game(settings.game).actions
        networks = {name: run.replicate(QNetwork(settings.model, settings.game, actions)) for name in ("online", "target")}
        if not flags.eval:
            return train(run, settings, networks)
        if run.step == 0:
            raise SettingsError("--eval found no snapshot; expected the --dir of a run that has made one")
        run.track(**networks)
        scores = evaluate(run, settings, networks["online"])
        random_play = evaluate(run, settings, networks["online"], exploration=1.0)
        run.print(f"step {run.step}: {shown(scores)}\nrandom play: {shown(random_play)}")
        return scores


def train(run: ss.Run, settings: Settings, networks: dict[str, nn.Module]) -> dict[str, float]:
    """Train from where the run stands to the last update."""
    online, target = networks["online"], networks["target"]
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=settings.optimizer.learning_rate, eps=settings.optimizer.epsilon)
    run.track(**networks, optimizer=optimizer)
    write_settings(run, settings)
    loss_fn = partial(td_loss, settings=settings.optimizer)
    progress = Progress(run, settings.updates, settings.evaluation.every, unit="environment steps")
    scores: dict[str, float] = {}

    for batch in run.streams(lambda _: Lane(settings, online, run.lanes), name="games"):
        if run.step >= settings.updates:
            break
        means = run.backward(loss_fn, networks, batch, update=online)
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(online, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        done = run.step + 1
        if done % settings.optimizer.target_every == 0:
            target.load_state_dict(online.state_dict())
        run.log(means)
        progress.update(means, settings.collect.environments * settings.collect.steps / settings.collect.updates)

        if done % settings.evaluation.every == 0 or done == settings.updates:
            scores = evaluate(run, settings, online)
            run.log(**scores)
            run.snapshot(score=scores["return"])
            progress.say(f"update {done}: {shown(scores)}")
    progress.close()
    return scores or evaluate(run, settings, online)


def td_loss(networks: dict[str, nn.Module], batch: LaneBatch, *, settings: OptimizerSettings) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Return the loss of a lane's temporal differences (Mnih et al. 2015), by double Q-learning (van Hasselt et al. 2016)."""
    samples = batch.samples
    values = networks["online"](samples.observations)  # [batch, actions]
    value = values.gather(1, samples.actions[:, None])[:, 0]  # [batch]
    with torch.no_grad():
        next_values = networks["target"](samples.next_observations)
        choosing = networks["online"](samples.next_observations) if settings.double else next_values
        next_value = next_values.gather(1, choosing.argmax(1, keepdim=True))[:, 0]
        goal = samples.returns + samples.discounts * next_value
    samples.tell_errors((goal - value).abs())
    losses = (F.huber_loss if settings.loss == "huber" else F.mse_loss)(value, goal, reduction="none")
    metrics = {
        "value": values.max(1).values.mean(),
        "exploration": batch.exploration,
        "environment_steps": batch.environment_steps,
    }
    if batch.recent_return is not None:  # a lane that has not finished a game has no part in the mean
        metrics["training_return"] = batch.recent_return
    return (samples.weights * losses).mean(), metrics


def evaluate(run: ss.Run, settings: Settings, online: nn.Module, exploration: float | None = None) -> dict[str, float]:
    """Play the games of the evaluation, spread over the workers; return mean and standard deviation of their returns."""
    games = settings.evaluation
    play = partial(
        play_games, settings=settings.game, seed=run.config.seed, exploration=games.exploration if exploration is None else exploration
    )
    played = run.broadcast(run.evaluate(play, online, range(games.games), games.block, gather=True))
    returns = played["return"]
    return {
        "return": returns.mean().item(),
        "return_deviation": returns.std(correction=0).item(),
        "actions": played["actions"].double().mean().item(),
    }


def shown(scores: dict[str, float]) -> str:
    """Return scores as a person reads them."""
    return f"return {scores['return']:.1f} ± {scores['return_deviation']:.1f}, {scores['actions']:.0f} actions a game"


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings that were given."""
    flags_parser = parser(Settings, "Train or evaluate a deep Q-network on an Atari game.")
    flags_parser.add_argument("--dir", type=Path, metavar="DIR", help="of the run: settings, record, snapshots; a run there is continued")
    flags_parser.add_argument("--eval", action="store_true", help="play with the newest snapshot in DIR, and at random beside it")
    flags = flags_parser.parse_intermixed_args(arguments)
    from_run = [str(flags.dir / SETTINGS_FILE)] if flags.eval and flags.dir else []
    return flags, read(Settings, [*from_run, *flags.settings])


if __name__ == "__main__":
    run_script(main)
