"""The script before samestep, beside the same on one lane."""

from __future__ import annotations

import json

import pytest

from recipes.detect import plain, train
from recipes.detect.config import Settings
from recipes.detect.data import open_images
from recipes.detect.picture import PREDICTIONS_FILE
from recipes.settings import SettingsError, read
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint
from tests.recipes.detect.small import SMALL
from tests.recipes.in_order import in_order, left_in_checkpoint

ON_ONE_LANE = [*SMALL, "lanes=1", "evaluate_every=6"]


def test_one_lane_leaves_the_bits_of_the_plain_script(digits, tmp_path):
    arguments = [*ON_ONE_LANE, f"data.path={digits}"]
    groups = open_images(read(Settings, arguments).data).train.groups()
    with in_order(plain, group_by=groups):
        scores = plain.main([*arguments, "--dir", str(tmp_path / "plain")])
    assert train.main([*arguments, "--dir", str(tmp_path / "samestep")]) == scores
    state = load(list_snapshots(tmp_path / "samestep")[-1]).state
    assert left_in_checkpoint(tmp_path / "plain") == fingerprint(
        {name: state[name] for name in ("model", "optimizer", "scheduler")}
    )
    predictions = [
        json.loads((tmp_path / run / PREDICTIONS_FILE).read_text()) for run in ("plain", "samestep")
    ]
    assert predictions[0] == predictions[1] != []


@pytest.mark.long
def test_it_trains_goes_on_and_evaluates(digits, tmp_path):
    arguments = [*ON_ONE_LANE, f"data.path={digits}", "--dir", str(tmp_path)]
    plain.main([*arguments, "optimizer.steps=1"])
    before = left_in_checkpoint(tmp_path)
    scores = plain.main([*arguments, "optimizer.steps=2"])
    after = left_in_checkpoint(tmp_path)
    assert all(
        after[name] != value
        for name, value in before.items()
        if name.startswith("/optimizer/state") and name.endswith("exp_avg")
    )
    assert plain.main(["--eval", "--dir", str(tmp_path)]) == scores


def test_evaluation_without_parameters_is_an_error(digits, tmp_path):
    plain.write_settings(tmp_path, read(Settings, [*ON_ONE_LANE, f"data.path={digits}"]))
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a checkpoint"):
        plain.main(["--eval", "--dir", str(tmp_path)])
