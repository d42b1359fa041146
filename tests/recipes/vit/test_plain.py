"""The script before samestep, beside the same on one lane."""

from __future__ import annotations

from pathlib import Path

import pytest

import recipes.vit
from recipes.settings import SETTINGS_FILE, SettingsError
from recipes.vit import plain, train
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint
from tests.recipes.in_order import in_order, left_in_checkpoint

SMALL = [
    str(Path(recipes.vit.__file__).with_name("digits.yaml")),
    *("epochs=2", "batch_size=400", "lanes=1", "evaluate_every=1", "mixup=0.2", "ema_decay=0.5"),
    *(
        "model.depth=1",
        "model.width=16",
        "model.dropout=0.1",
        "model.attention_dropout=0.1",
        "model.drop_path=0.1",
    ),
    *("optimizer.learning_rate=0.01", "optimizer.warmup_epochs=0.5"),
]


def test_one_lane_leaves_the_bits_of_the_plain_script(tmp_path):
    with in_order(plain):
        scores = plain.main([*SMALL, "--dir", str(tmp_path / "plain")])
    # one sums exactly
    assert train.main([*SMALL, "--dir", str(tmp_path / "samestep")]) == pytest.approx(
        scores, rel=1e-12
    )
    state = load(list_snapshots(tmp_path / "samestep")[-1]).state
    tracked = {name: state[name] for name in ("model", "ema", "optimizer", "scheduler")}
    assert left_in_checkpoint(tmp_path / "plain") == fingerprint(tracked)


def test_it_trains_goes_on_and_evaluates(tmp_path):
    directory = ["--dir", str(tmp_path)]
    first = plain.main([*SMALL, *directory, "epochs=1", "mixup=0"])
    second = plain.main([*SMALL, *directory, "epochs=4", "mixup=0"])
    assert second["model_loss"] < first["model_loss"]
    # nothing is left to do
    assert (
        plain.main(["--eval", *directory]) == plain.main([*SMALL, *directory, "epochs=4"]) == second
    )


def test_evaluation_without_parameters_is_an_error(tmp_path):
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a checkpoint"):
        plain.main([*SMALL, "--eval", "--dir", str(tmp_path)])
