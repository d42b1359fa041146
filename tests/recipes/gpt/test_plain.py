"""The script before samestep, beside the same on one lane."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

import samestep as ss
from recipes.gpt import plain, train, training
from recipes.gpt.data import weights_of
from recipes.settings import SETTINGS_FILE, SettingsError
from samestep.data.random_state import key, set_generators
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint
from tests.recipes.in_order import left_in_checkpoint


@contextmanager
def mixed():
    """Let `plain.batches` yield the rows of a run's mixture, under the numbers of its steps."""

    def batches(settings, text, _):
        loop = run.batches(
            {name: source.train for name, source in text.sources.items()},
            partial(training.batch_size_at, settings=settings),
            weights=weights_of(settings.data, text),
            steps=settings.steps,
        )
        for batch in loop:
            (rows,) = batch
            set_generators(key(run.config.seed, "lane", run.step, 0, 0))
            yield rows

    with ss.init(lanes=1) as run, patch.object(plain, "batches", batches):
        yield


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        pytest.param(
            "muon",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon"),
        ),
    ],
)
def test_one_lane_leaves_the_bits_of_the_plain_script(name, arguments, tmp_path):
    arguments = [*arguments, "lanes=1", f"optimizer.name={name}"]
    with mixed():
        scores = plain.main([*arguments, "--dir", str(tmp_path / "plain")])
    # a run adds up the means of blocks
    assert train.main([*arguments, "--dir", str(tmp_path / "run")]) == pytest.approx(
        scores, rel=1e-12
    )
    state = load(list_snapshots(tmp_path / "run")[-1]).state
    optimizers = {kind: state[kind] for kind in ("optimizer", "muon") if kind in state}
    for group in (group for each in optimizers.values() for group in each["param_groups"]):
        del group["initial_lr"]  # with which a resume finds that settings have another rate
    expected = fingerprint({"model": state["model"], **optimizers})
    assert left_in_checkpoint(tmp_path / "plain") == expected


def test_it_trains_goes_on_and_evaluates(arguments, tmp_path):
    directory = ["--dir", str(tmp_path)]
    first = plain.main([*arguments, *directory, "steps=2"])
    second = plain.main([*arguments, *directory, "steps=20"])
    assert second["all"] < first["all"]
    # nothing is left to do
    assert plain.main([*arguments, *directory, "steps=20"]) == second
    assert plain.main(["--eval", *directory]) == second


def test_evaluation_without_parameters_is_an_error(arguments, tmp_path):
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(SettingsError, match="--eval needs the --dir of a run with a checkpoint"):
        plain.main([*arguments, "--eval", "--dir", str(tmp_path)])
