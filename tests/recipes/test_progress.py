from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipes.progress import Progress


def show(step, capsys, *, steps_per_epoch=None, is_main=True):
    """Return the output of one of 6 steps."""
    loop = SimpleNamespace(step=step, steps=6, steps_per_epoch=steps_per_epoch)
    run = SimpleNamespace(is_main=is_main, has_terminal=False)
    Progress(run, loop, "games").update({"loss": 0.5}, items=3)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps_per_epoch", "expected"),
    [(None, "step 6/6  loss 0.5000  "), (4, "epoch 1.5  step 6/6  loss 0.5000  ")],
)
def test_the_last_step_prints_a_line_with_the_epoch_if_there_are_epochs(
    steps_per_epoch, expected, capsys
):
    output = show(6, capsys, steps_per_epoch=steps_per_epoch)
    assert output.startswith(expected)
    assert output.endswith(" games/s\n")


def test_other_workers_and_the_steps_between_print_nothing(capsys):
    assert show(6, capsys, is_main=False) == show(2, capsys) == ""
