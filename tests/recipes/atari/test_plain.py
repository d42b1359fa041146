"""The script before samestep, beside the same on one lane."""

from __future__ import annotations

import pytest

from recipes.atari import plain, train
from recipes.settings import SETTINGS_FILE, SettingsError
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint
from tests.recipes.in_order import keyed_lane, left_in_checkpoint

SMALL = [
    *("updates=4", "batch_size=8", "lanes=1", "model.channels=[4,4,8]", "model.features=16"),
    # so that games end within a few actions
    *("game.name=BreakoutNoFrameskip-v4", "game.frame_size=36", "game.frame_skip=40"),
    *(
        "collect.environments=2",
        "collect.steps=2",
        "collect.updates=2",
        "collect.warmup_steps=30",
        "collect.exploration_decay=50",
    ),
    *(
        "replay.size=44",
        "replay.prioritized=true",
        "optimizer.target_every=2",
        "optimizer.learning_rate=0.01",
    ),
    *(
        "evaluation.every=4",
        "evaluation.games=2",
        "evaluation.block=1",
        "evaluation.exploration=0.3",
    ),
]


def test_one_lane_leaves_the_bits_of_the_plain_script(tmp_path):
    with keyed_lane(plain):
        scores = plain.main([*SMALL, "--dir", str(tmp_path / "plain")])
    assert train.main([*SMALL, "--dir", str(tmp_path / "samestep")]) == scores
    state = load(list_snapshots(tmp_path / "samestep")[-1]).state
    for group in state["optimizer"]["param_groups"]:
        del group["initial_lr"]  # with which a resume finds that settings have another rate
    assert left_in_checkpoint(tmp_path / "plain") == fingerprint(
        {name: state[name] for name in ("online", "target", "optimizer")}
    )


@pytest.mark.long
def test_it_trains_goes_on_and_evaluates(tmp_path):
    directory = ["--dir", str(tmp_path)]
    plain.main([*SMALL, *directory, "updates=2", "evaluation.games=1"])
    before = left_in_checkpoint(tmp_path)
    scores = plain.main([*SMALL, *directory, "updates=3", "evaluation.games=1"])
    after = left_in_checkpoint(tmp_path)
    assert all(after[name] != value for name, value in before.items() if name.startswith("/online"))
    assert plain.main(["--eval", *directory]) == scores


def test_evaluation_without_parameters_is_an_error(tmp_path):
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a checkpoint"):
        plain.main([*SMALL, "--eval", "--dir", str(tmp_path)])
