"""Every setting of the Atari recipe, with its default and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from recipes.settings import SettingsError, setting


@dataclass(frozen=True)
class GameSettings:
    """The game and what the network sees of it."""

    name: str = setting(
        "SpaceInvadersNoFrameskip-v4",
        "of gymnasium; without frame skip of its own, as GAMENoFrameskip-v4 are",
    )
    frame_size: int = setting(84, "height and width of a grey frame, in pixels")
    frame_stack: int = setting(4, "newest frames in an observation")
    frame_skip: int = setting(
        4,
        "frames for which an action is repeated; the last two are merged, pixel by pixel, by their maximum",
    )
    no_ops: int = setting(
        30, "a game starts after 1 to this many frames without an action, at random"
    )


@dataclass(frozen=True)
class ModelSettings:
    """The network: three convolutions, a layer, and a value and an advantage stream (Wang et al. 2016)."""

    channels: tuple[int, ...] = setting(
        (32, 64, 64), "of the convolutions 8x8/4, 4x4/2 and 3x3/1 (Mnih et al. 2015)"
    )
    features: int = setting(512, "of the layer after them, and of the hidden layer of each stream")
    dueling: bool = setting(
        True, "value and advantages apart (Wang et al. 2016); false: one stream"
    )


@dataclass(frozen=True)
class CollectSettings:
    """How games are played for training. An environment step is one action in one game."""

    environments: int = setting(8, "games that are played side by side, over all lanes")
    steps: int = setting(1, "actions in each game of a collection")
    updates: int = setting(4, "updates after a collection, before the next one")
    warmup_steps: int = setting(5000, "environment steps of random play before the first update")
    exploration_start: float = setting(1.0, "part of actions that are random, after warm-up")
    exploration_end: float = setting(0.05, "which it falls to, exponentially")
    exploration_decay: float = setting(
        1e6, "environment steps in which the rest of the way shrinks to 1/e"
    )


@dataclass(frozen=True)
class ReplaySettings:
    """What is remembered, and what is drawn from it."""

    size: int = setting(400_000, "newest environment steps that are kept, over all lanes")
    steps: int = setting(
        3, "rewards before the value of an observation stands for the rest (Sutton 1988)"
    )
    discount: float = setting(0.99, "of a reward that comes one environment step later")
    prioritised: bool = setting(
        False, "draw by the last error (Schaul et al. 2016); false: all alike"
    )
    priority_exponent: float = setting(0.6, "0: all alike; 1: in proportion to the error")
    priority_correction: float = setting(
        0.4, "of the weights that undo the preference; grows to 1 by the last update"
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are updated: Adam (Kingma and Ba 2015)."""

    learning_rate: float = setting(1e-4, "constant")
    epsilon: float = setting(1e-8, "of Adam")
    loss: Literal["huber", "squared"] = setting(
        "huber", "of an error; huber: squared up to 1 and linear beyond (Mnih et al. 2015)"
    )
    double: bool = setting(
        True,
        "the online network chooses the action that the target network values (van Hasselt et al. 2016)",
    )
    clip_norm: float | None = setting(10.0, "largest norm of the gradient")
    target_every: int = setting(
        500, "updates between copies of the online network to the target network"
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """How the network is scored: whole games, whose returns are the game's own points."""

    every: int = setting(
        4000, "updates between evaluations; the last update is always followed by one"
    )
    games: int = setting(8, "games of an evaluation; the same ones each time")
    block: int = setting(4, "games that a worker plays side by side; workers take whole blocks")
    exploration: float = setting(0.0, "part of actions that are random")


@dataclass(frozen=True)
class Settings:
    """Every setting of the recipe."""

    updates: int = setting(1_000_000, "steps of the optimizer")
    batch_size: int = setting(32, "samples of an update, over all lanes")
    lanes: int | None = setting(
        None, "each with its own games and replay; the most workers there can be; default: workers"
    )
    seed: int = setting(0, "everything random is a function of it")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "bfloat16: autocast in losses and evaluation"
    )
    game: GameSettings = field(default_factory=GameSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


def check(settings: Settings, lanes: int) -> None:
    """Raise `SettingsError` for counts below 1, and where lanes cannot have equal shares of the environments and samples."""
    shared = {
        "collect.environments": settings.collect.environments,
        "batch_size": settings.batch_size,
    }
    counts = {
        **shared,
        "game.frame_stack": settings.game.frame_stack,
        "collect.steps": settings.collect.steps,
        "collect.updates": settings.collect.updates,
        "replay.steps": settings.replay.steps,
        "optimizer.target_every": settings.optimizer.target_every,
        "evaluation.every": settings.evaluation.every,
        "evaluation.games": settings.evaluation.games,
    }
    for name, count in counts.items():
        if count < 1:
            raise SettingsError(f"{name}={count} was given; expected at least 1")
    for name, count in shared.items():
        if count % lanes:
            raise SettingsError(
                f"{name}={count} was given for {lanes} lanes; expected a multiple of {lanes}: each has an equal share"
            )
