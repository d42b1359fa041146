from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipes.progress import Progress


@pytest.mark.parametrize(
    ("steps_per_epoch", "expected"),
    [(None, "step 6/6  loss 0.5000  "), (4, "epoch 1.5  step 6/6  loss 0.5000  ")],
)
def test_the_last_step_is_a_line_and_epochs_are_told_where_there_are_any(
    steps_per_epoch, expected, capsys
):
    progress = Progress(SimpleNamespace(step=5, is_main=True), 6, steps_per_epoch, unit="games")
    progress.update({"loss": 0.5}, items=3)
    told = capsys.readouterr().out
    assert told.startswith(expected)
    assert told.endswith(" games/s\n")


def test_other_workers_and_steps_between_tell_nothing(capsys):
    for step, is_main in ((5, False), (1, True)):
        Progress(SimpleNamespace(step=step, is_main=is_main), 6).update({"loss": 0.5}, items=3)
    assert capsys.readouterr().out == ""
