"""The script before samestep, beside the same on one lane."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.settings import SettingsError, read
from recipes.stain import plain, train
from recipes.stain.config import Settings
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint
from tests.recipes.in_order import in_order, left_in_checkpoint
from tests.recipes.stain.strips import SMALL, make_strips


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_strips(tmp_path_factory.mktemp("strips"))


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_one_lane_leaves_the_bits_of_the_plain_script(precision, data, tmp_path):
    """Without dropout: here each of the two losses of a step draws separate random numbers."""
    arguments = [*SMALL, data, "lanes=1", "model.dropout=0", f"precision={precision}"]
    with in_order(plain):
        scores = plain.main([*arguments, "--dir", str(tmp_path / "plain")])
    # one sums exactly
    assert train.main([*arguments, "--dir", str(tmp_path / "samestep")]) == pytest.approx(
        scores, rel=1e-6
    )
    left = left_in_checkpoint(tmp_path / "plain")
    state = load(list_snapshots(tmp_path / "samestep")[-1]).state
    assert left == fingerprint(
        {
            name: value
            for name, value in state.items()
            if name.startswith(("generators", "discriminators"))
        }
    )


@pytest.mark.long
def test_it_trains_goes_on_and_continues_with_its_own_settings(data, tmp_path):
    directory = ["--dir", str(tmp_path)]
    first = plain.main(
        [*SMALL, data, *directory, "epochs=1", "optimizer.generator_learning_rate=0.01"]
    )
    second = plain.main(["--continue", *directory, "epochs=8", "evaluate_every=8"])
    assert second["l1"] < first["l1"]
    assert plain.main(["--continue", *directory, "epochs=8"]) == second  # nothing is left to do


def test_there_must_be_a_run_to_continue(data, tmp_path):
    plain.write_settings(
        tmp_path, read(Settings, [str(Path(plain.__file__).with_name("tissue.yaml")), *SMALL, data])
    )
    with pytest.raises(SettingsError, match=r"--continue needs a checkpoint, and .* has none"):
        plain.main(["--continue", "--dir", str(tmp_path)])
