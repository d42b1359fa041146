"""Train or evaluate a deep Q-network on an Atari game.

samestep run -n 2 recipes/atari/train.py recipes/atari/up_n_down.yaml --dir runs/upndown
samestep run -n 2 recipes/atari/train.py --eval --dir runs/upndown
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

import samestep as ss
from recipes.atari.config import Settings, check
from recipes.atari.lane import Lane
from recipes.atari.losses import td_loss
from recipes.atari.play import play_games, scores_of, shown
from recipes.atari.training import describe_rate, load_pretrained, make_networks, make_optimizer
from recipes.progress import Progress
from recipes.resume import settings_applied
from recipes.scores import write_scores
from recipes.settings import SettingsError, read_arguments, run_script, write_run_settings


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the scores of the last evaluation."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    with ss.init(
        dir=flags.dir,
        read_only=flags.eval,
        lanes=settings.lanes,
        seed=settings.seed,
        precision=settings.precision,
        settings=settings.recorded(),
    ) as run:
        check(settings, run.lanes)
        networks = make_networks(settings)
        if settings.pretrained is not None and run.step == 0:  # a resumed run has its own
            run.print(load_pretrained(networks, settings, evaluates=flags.eval))
        networks = {name: run.replicate(network) for name, network in networks.items()}
        if not flags.eval:
            return train(run, settings, networks)
        if run.step == 0 and flags.dir:  # no snapshot was found
            raise SettingsError("--eval needs the --dir of a run with a snapshot")
        run.track(**networks)  # restores them from the snapshot
        scores = evaluate(run, settings, networks["online"])
        random_play = evaluate(run, settings, networks["online"], exploration=1.0)
        run.print(f"step {run.step}: {shown(scores)}\nrandom play: {shown(random_play)}")
        write_scores(run, flags.out, scores, random_play=random_play)
        return scores


def train(run: ss.Run, settings: Settings, networks: dict[str, nn.Module]) -> dict[str, float]:
    """Train from the current step to the last update."""
    online, target = networks["online"], networks["target"]
    target.load_state_dict(online.state_dict())
    optimizer = make_optimizer(online, settings)
    with settings_applied(run, optimizer):  # not those of the snapshot
        run.track(**networks, optimizer=optimizer)  # restores them if resumed
    run.print(describe_rate(settings))
    write_run_settings(run, settings)
    loss_fn = partial(td_loss, settings=settings.optimizer)
    loop = run.streams(
        lambda _: Lane(settings, online, run.lanes), steps=settings.updates, name="games"
    )
    collect = settings.collect
    steps_per_update = collect.environments * collect.steps / collect.updates
    progress = Progress(run, loop, unit="environment steps")
    scores: dict[str, float] = {}

    for batch in loop:
        means = run.backward(loss_fn, networks, batch, update=online)
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(online, settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if loop.step % settings.optimizer.target_every == 0:
            target.load_state_dict(online.state_dict())
        run.log(means)
        progress.update(means, steps_per_update)

        if progress.is_due(settings.evaluation.every):
            scores = evaluate(run, settings, online)
            run.log(**scores)
            run.snapshot(score=scores["return"])
            progress.print(f"update {loop.step}: {shown(scores)}")
    return scores or evaluate(run, settings, online)  # a finished run has no steps left


def evaluate(
    run: ss.Run, settings: Settings, online: nn.Module, exploration: float | None = None
) -> dict[str, float]:
    """Play the games of the evaluation, distributed over the workers; return their scores.

    Screens of the first game are recorded as a picture.
    """
    games = settings.evaluation
    exploration = games.exploration if exploration is None else exploration
    seed = run.config.seed  # SAMESTEP_SEED overrides the seed in settings
    play = partial(play_games, settings=settings.game, seed=seed, exploration=exploration)
    played = run.broadcast(run.evaluate(play, online, range(games.games), games.block, gather=True))
    run.log_image("random-play" if exploration == 1 else "game", played["film"][0])
    return scores_of(played)


if __name__ == "__main__":
    run_script(main)
