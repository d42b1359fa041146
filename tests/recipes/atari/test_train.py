"""Real runs of the recipe with real emulators, small enough for seconds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import recipes.atari
from recipes.atari import train as recipe
from recipes.atari.config import GameSettings, OptimizerSettings, Settings
from recipes.atari.lane import LaneBatch, exploration_after
from recipes.atari.model import QNetwork
from recipes.atari.play import FILMED, Film, play_games
from recipes.atari.replay import Samples
from recipes.atari.training import (
    describe_rate,
    load_pretrained,
    make_networks,
    make_optimizer,
)
from recipes.pretrained import PretrainedError
from recipes.scores import SCORES_FILE
from recipes.settings import SETTINGS_FILE, SettingsError, read
from samestep.cli import main as samestep
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import export, list_snapshots, load
from tests.faults import kill_at
from tests.jobs import events, fingerprint, logged
from tests.recipes.pictures import pictures
from tests.workers import WorkerFailedError, run_workers

RECIPE = Path(recipes.atari.__file__).parent
LANES, UPDATES = 4, 6
SMALL = [
    *(
        f"updates={UPDATES}",
        "batch_size=16",
        f"lanes={LANES}",
        "model.channels=[4,4,8]",
        "model.features=16",
    ),
    # so that games end within a few actions
    *("game.name=BreakoutNoFrameskip-v4", "game.frame_size=36", "game.frame_skip=40"),
    *(
        "collect.environments=4",
        "collect.steps=3",
        "collect.updates=2",
        "collect.warmup_steps=60",
        "collect.exploration_decay=50",
    ),
    *(
        "replay.size=88",
        "replay.prioritized=true",
        "optimizer.target_every=2",
        "optimizer.learning_rate=0.01",
    ),
    *(
        "evaluation.every=6",
        "evaluation.games=3",
        "evaluation.block=2",
        "evaluation.exploration=0.3",
    ),
]
PLAIN = [
    "replay.prioritized=false",
    "model.dueling=false",
    "optimizer.double=false",
    "optimizer.loss=squared",
    "optimizer.clip_norm=none",
]
VARIANTS = {"plain Q-learning": PLAIN, "bfloat16": ["precision=bfloat16"]}


def train(workers, directory, *changes):
    """Return the scores of a run and all that it left, by name.

    That is networks, optimizer, emulators, replays, and what it logged and drew.
    """
    scores = run_workers(recipe.main, workers, [*SMALL, "--dir", str(directory), *changes])
    assert all(others == scores[0] for others in scores)
    return {
        **scores[0],
        **fingerprint(state_left(directory)),
        **logged(directory),
        **pictures(directory),
    }


def state_left(directory):
    return load(list_snapshots(directory)[-1]).state


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "trained"
    return directory, train(1, directory)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_number_of_workers_changes_nothing(workers, trained, tmp_path):
    assert train(workers, tmp_path) == trained[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", ["plain Q-learning", pytest.param("bfloat16", marks=pytest.mark.long)]
)
def test_nor_does_it_with_other_settings(variant, tmp_path):
    changes = [*VARIANTS[variant], "updates=3", "evaluation.games=1"]
    assert train(3, tmp_path / "3", *changes) == train(1, tmp_path / "1", *changes)


@pytest.mark.long
def test_two_devices_of_one_worker_change_nothing(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_DEVICES", "cpu,cpu")
    assert train(1, tmp_path) == trained[1]


def test_lanes_play_games_of_their_own(trained):
    lanes = [lane["source"] for lane in state_left(trained[0])["streams"]["games"].values()]
    assert len(lanes) == LANES
    for lane, other_lane in itertools.combinations(lanes, 2):
        for name in ("frames", "actions", "priorities"):
            assert not torch.equal(lane["replay"][name], other_lane["replay"][name])
        assert not torch.equal(lane["games"][0]["emulator"], other_lane["games"][0]["emulator"])


@pytest.mark.long
def test_every_lane_fills_its_share_of_the_replay(trained):
    warmup, collected = 60 // LANES, 3 * UPDATES // 2
    lanes = [lane["source"] for lane in state_left(trained[0])["streams"]["games"].values()]
    for lane in lanes:
        replay = lane["replay"]
        assert replay["count"] == warmup + collected + 1 > replay["rows"] == 88 // LANES
        assert replay["ends"].any()
    assert any(lane["returns"] for lane in lanes)  # games ended, and others began
    last = [
        event["values"]
        for event in events(trained[0], "scalars")
        if "environment_steps" in event["values"]
    ][-1]
    assert last["environment_steps"] == LANES * (warmup + collected)
    assert last["exploration"] == pytest.approx(
        exploration_after(LANES * (warmup + collected), read(Settings, SMALL).collect)
    )


def killed_at(arguments, step, rank):
    """Train, and end the worker of `rank` by SIGKILL in the body of `step`."""
    hook = kill_at(step, rank)

    class Progress(recipe.Progress):
        def update(self, means, items):
            hook(self.run.step)
            super().update(means, items)

    recipe.Progress = Progress  # in this worker alone, which is a process of its own
    recipe.main(arguments)


def test_a_run_that_was_killed_goes_on_at_another_number_of_workers(trained, tmp_path):
    with pytest.raises(WorkerFailedError, match="worker 1 ended with exit code -9"):
        run_workers(
            killed_at,
            2,
            [*SMALL, "--dir", str(tmp_path)],
            4,
            1,
            timeout=300,
            environment={"SAMESTEP_SNAPSHOT_EVERY": "1"},
        )
    committed = [path for path in list_snapshots(tmp_path) if (path / NAME).exists()]
    assert 0 < load(committed[-1]).step < UPDATES

    assert train(4, tmp_path) == trained[1]


@pytest.mark.long
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_evaluation_as_a_command_gives_the_same_returns(workers, trained, capfd):
    directory, left = trained
    for scores in run_workers(recipe.main, workers, ["--eval", "--dir", str(directory)]):
        assert scores.keys() == {"return", "return_deviation", "actions"}
        assert scores.items() <= left.items()
    assert capfd.readouterr().out.count("random play: return") == 1
    written = json.loads((directory / SCORES_FILE).read_text())
    assert written["scores"] == scores
    assert written["random_play"].keys() == scores.keys()
    assert {event["name"] for event in events(directory, "image")} == {"game"}  # of the training


@pytest.mark.long
def test_a_game_of_an_evaluation_is_the_same_beside_any_others():
    network = QNetwork(read(Settings, SMALL).model, GameSettings(frame_size=36), 6)

    def play(*numbers, seed=0):
        played = play_games(
            network,
            torch.tensor(numbers),
            settings=GameSettings(frame_size=36),
            seed=seed,
            exploration=1.0,
        )
        return list(zip(played["return"].tolist(), played["actions"].tolist(), strict=True))

    together = play(3, 4, 5)
    assert len(set(together)) == 3
    assert play(5, 3) == [together[2], together[0]]
    assert play(4, seed=1) != [together[1]]


@pytest.mark.parametrize("actions", [1, 5, 8, 15, 16, 17, 100, 1000])
def test_a_film_shows_a_game_from_its_start_to_its_end(actions):
    film = Film()
    for number in range(actions):
        film.add(SimpleNamespace(screen=lambda number=number: np.full((2, 1, 3), number)))
    strip = film.strip()
    assert strip.shape == (2, FILMED, 3)
    assert strip[0, 0, 0] == 0
    assert np.abs(strip[0, :, 0] - np.linspace(0, actions - 1, FILMED)).max() <= max(
        1 / 2, actions / FILMED
    )


def test_a_film_shows_the_screens_of_the_game():
    settings = read(Settings, SMALL)
    (strip,) = play_games(
        nn.Module(), torch.tensor([0]), settings=settings.game, seed=0, exploration=1.0
    )["film"]
    assert strip.shape == (210, FILMED * 160, 3)
    assert strip.dtype == np.uint8
    assert len({screen.tobytes() for screen in np.split(strip, FILMED, axis=1)}) > 1


@pytest.mark.long
def test_samestep_verify_finds_every_step_the_same(capsys):
    assert (
        samestep(["verify", "-n", "2,1x2", "--steps", "2", str(RECIPE / "train.py"), *SMALL]) == 0
    )
    assert "the same at every step: n=2, n=1x2" in capsys.readouterr().out


# The loss


class Table(nn.Module):
    """Values of actions [observations, actions], looked up by an observation's first pixel."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observations):
        return self.values[observations[:, 0, 0, 0].long()]


@pytest.mark.parametrize(("double", "next_value"), [(True, 10.0), (False, 20.0)])
@pytest.mark.parametrize("loss", ["huber", "squared"])
def test_the_loss_is_that_of_the_temporal_differences(double, next_value, loss):
    networks = {
        "online": Table([[1.0, 0.0], [0.0, 5.0]]),
        "target": Table([[0.0, 0.0], [20.0, 10.0]]),
    }
    seen, after = (
        torch.zeros(2, 1, 1, 1, dtype=torch.uint8),
        torch.ones(2, 1, 1, 1, dtype=torch.uint8),
    )
    told = []
    gains, discounts, weights = (
        torch.tensor([2.0, 0.5]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([1.0, 3.0]),
    )
    samples = Samples(seen, torch.tensor([0, 1]), gains, after, discounts, weights, told.append)

    batch = LaneBatch(samples, environment_steps=7, exploration=0.1, recent_return=None)
    got, metrics = recipe.td_loss(
        networks, batch, settings=OptimizerSettings(double=double, loss=loss)
    )
    got.backward()

    errors = torch.tensor([2 + 0.5 * next_value - 1.0, 0.5])
    losses = errors**2 if loss == "squared" else torch.tensor([errors[0] - 0.5, 0.125])
    assert torch.equal(told[0], errors)
    assert got.item() == pytest.approx((losses * weights).mean().item())
    assert metrics["value"].item() == 1.0
    assert "training_return" not in metrics
    slopes = 2 * errors if loss == "squared" else torch.tensor([1.0, 0.5])
    assert torch.equal(
        networks["online"].values.grad, torch.stack([-slopes * weights / 2, torch.zeros(2)])
    )
    assert networks["target"].values.grad is None


def test_advantages_have_no_mean():
    network = QNetwork(read(Settings, SMALL).model, GameSettings(frame_size=36), 5)
    observations = torch.randint(256, (3, 4, 36, 36), dtype=torch.uint8)
    torch.testing.assert_close(
        network(observations).mean(1, keepdim=True),
        network.value(network.encoder(observations / 255)),
    )


def test_exploration_falls_by_the_steps_of_all_lanes():
    settings = read(
        Settings,
        [
            "collect.exploration_decay=100",
            "collect.exploration_start=0.9",
            "collect.exploration_end=0.1",
        ],
    ).collect
    assert exploration_after(0, settings) == pytest.approx(0.9)
    assert exploration_after(100, settings) == pytest.approx(0.1 + 0.8 / torch.e)
    assert exploration_after(10_000, settings) == pytest.approx(0.1)


# Settings


@pytest.mark.parametrize("file", sorted(RECIPE.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_settings_file_can_be_read(file):
    settings = read(Settings, [str(file)])
    recipe.check(settings, settings.lanes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch_size=6"], "batch_size must be a multiple of the 4 lanes, got 6"),
        (
            ["collect.environments=3"],
            r"collect\.environments must be a multiple of the 4 lanes, got 3",
        ),
        (["evaluation.every=0"], r"evaluation\.every must be at least 1, got 0"),
        (["game.frame_skip=0"], r"game\.frame_skip must be at least 1, got 0"),
        (["model.channels=[4,4]"], r"model\.channels must be 3 numbers, .*, got \[4, 4\]"),
        (["game.frame_size=35"], r"game\.frame_size must be at least 36, got 35"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(SettingsError, match=message):
        recipe.main([*SMALL, *arguments])


def test_evaluation_without_a_snapshot_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe.main([*SMALL, "--eval"])
    assert "--eval needs --dir" in capsys.readouterr().err
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a snapshot"):
        recipe.main([*SMALL, "--eval", "--dir", str(tmp_path)])


@pytest.mark.long
def test_a_run_starts_with_the_network_of_another(trained, tmp_path, capfd):
    export(list_snapshots(trained[0])[-1], tmp_path / "a.safetensors", "online")
    arguments = [*SMALL, f"pretrained={tmp_path / 'a.safetensors'}"]
    settings = read(Settings, [*arguments, "optimizer.reference_batch_size=4"])
    networks = make_networks(settings)
    assert load_pretrained(networks, settings, evaluates=True) == f"loaded {settings.pretrained}"
    online, target = (fingerprint(networks[name].state_dict()) for name in ("online", "target"))
    assert online == target == fingerprint(state_left(trained[0])["online"])
    assert make_optimizer(networks["online"], settings).param_groups[0]["lr"] == 0.04
    scaled = "learning rate 0.04 at batch size 16, scaled from 0.01 at batch size 4"
    assert describe_rate(settings) == scaled

    shortest = ["evaluation.games=1", "game.frame_skip=400", "--out", str(tmp_path)]
    scores = recipe.main([*arguments, *shortest, "--eval"])
    assert f"loaded {settings.pretrained}\n" in capfd.readouterr().out
    assert json.loads((tmp_path / SCORES_FILE).read_text())["scores"] == scores
    with pytest.raises(PretrainedError, match=r"advantages\.2 has 6 actions, the file has 4"):
        recipe.main([*arguments, "game.name=PongNoFrameskip-v4", "--eval"])
