"""The settings of the Atari recipe, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.settings import RunSettings, SettingsError, setting


@dataclass(frozen=True)
class GameSettings:
    """The game and its observations."""

    name: str = setting("SpaceInvadersNoFrameskip-v4", "a game without its own frame skip")
    frame_size: int = setting(84, "height and width of a gray frame, in pixels", least=1)
    frame_stack: int = setting(4, "newest frames in an observation", least=1)
    frame_skip: int = setting(
        4, "frames per action; the last two are merged by their maximum", least=1
    )
    no_ops: int = setting(30, "maximum number of random no-op frames at the start of a game")


@dataclass(frozen=True)
class ModelSettings:
    """The network: three convolutions, a layer, and streams for value and advantages."""

    channels: tuple[int, ...] = setting(
        (32, 64, 64), "channels of the convolutions 8x8/4, 4x4/2 and 3x3/1"
    )
    features: int = setting(
        512, "features of the layer after the convolutions and of each stream's hidden layer"
    )
    dueling: bool = setting(True, "two streams (Wang et al. 2016); false: one stream")
    hidden_relu: bool = setting(
        True, "a rectifier after the layer that follows the convolutions; false: none, as DI-engine"
    )


@dataclass(frozen=True)
class CollectSettings:
    """The games played for training. An environment step is one action in one game."""

    environments: int = setting(8, "games played in parallel, over all lanes", least=1)
    steps: int = setting(1, "actions in each game of a collection", least=1)
    updates: int = setting(4, "updates between two collections", least=1)
    warmup_steps: int = setting(5000, "environment steps of random play before the first update")
    exploration_start: float = setting(1.0, "fraction of random actions after warmup")
    exploration_end: float = setting(0.05, "fraction of random actions that the decay approaches")
    exploration_decay: float = setting(1e6, "environment steps of a decay by 1/e")


@dataclass(frozen=True)
class ReplaySettings:
    """The replay memory and how samples are drawn from it."""

    size: int = setting(400_000, "newest environment steps in memory, over all lanes")
    steps: int = setting(
        3, "rewards before the value of an observation is used (Sutton 1988)", least=1
    )
    discount: float = setting(0.99, "discount factor per environment step")
    prioritized: bool = setting(False, "draw by last error (Schaul et al. 2016); false: uniformly")
    priority_exponent: float = setting(0.6, "0: uniform; 1: proportional to the error")
    priority_correction: float = setting(0.4, "exponent of the weights; grows to 1 by the end")


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, Adam (Kingma and Ba 2015), and the loss."""

    learning_rate: float = setting(1e-4, "learning rate (constant)", above=0)
    reference_batch_size: int | None = setting(
        None, "scale the rate by batch_size / this; none: do not", least=1
    )
    epsilon: float = setting(1e-8, "epsilon of Adam")
    loss: Literal["huber", "squared"] = setting("huber", "huber: squared up to 1, linear beyond")
    double: bool = setting(
        True, "the online network chooses the target's action (van Hasselt 2016)"
    )
    clip_norm: float | None = setting(10.0, "maximum norm of the gradient")
    target_every: int = setting(500, "updates between copies to the target network", least=1)


@dataclass(frozen=True)
class EvaluationSettings:
    """The evaluation: complete games, scored in the game's own points."""

    every: int = setting(
        4000, "updates between evaluations; the last update is evaluated as well", least=1
    )
    games: int = setting(8, "games of an evaluation, always the same", least=1)
    block: int = setting(4, "games that a worker plays in parallel", least=1)
    exploration: float = setting(0.0, "fraction of random actions")


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of the recipe."""

    updates: int = setting(1_000_000, "steps of the optimizer")
    batch_size: int = setting(32, "samples per update, over all lanes", least=1)
    pretrained: Path | None = setting(
        None, "initial network: a file of an export (online), or DI-engine's ckpt_best.pth.tar"
    )
    game: GameSettings = field(default_factory=GameSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


def check(settings: Settings, lanes: int) -> None:
    """Raise `SettingsError` if lanes cannot have equal shares."""
    shared = {
        "collect.environments": settings.collect.environments,
        "batch_size": settings.batch_size,
    }
    for name, count in shared.items():
        if count % lanes:
            raise SettingsError(f"{name} must be a multiple of the {lanes} lanes, got {count}")
