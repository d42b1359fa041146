from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from recipes.progress import Progress


def show(step, capsys, *, steps_per_epoch=None, is_main=True, terminal=False, progress=True):
    """Return the output of one of 6 steps."""
    loop = SimpleNamespace(step=step, steps=6, steps_per_epoch=steps_per_epoch)
    config = SimpleNamespace(progress=progress)
    run = SimpleNamespace(is_main=is_main, has_terminal=terminal, world_size=2, config=config)
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


@pytest.mark.parametrize(
    ("terminal", "progress", "is_own", "prints"),
    [
        (True, True, False, False),
        (True, False, False, True),
        (False, True, False, True),
        (True, True, True, True),  # of another launcher, for which the run shows nothing
    ],
)
def test_a_terminal_with_the_run_s_own_line_shows_no_other(
    terminal, progress, is_own, prints, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_own)
    assert bool(show(6, capsys, terminal=terminal, progress=progress)) is prints


def test_the_means_of_an_epoch_weigh_items_and_survive_a_resume(capsys):
    logged, tracked = [], {}
    run = SimpleNamespace(
        is_main=False,
        has_terminal=False,
        track=tracked.update,
        log=lambda **values: logged.append(values),
        print=print,
    )
    loop = SimpleNamespace(step=0, steps=6, steps_per_epoch=3)
    steps = [(1.0, 4), (2.0, 4), (6.0, 2), (3.0, 4), (5.0, 4), (9.0, 2)]
    progress = Progress(run, loop, epoch_means=True)
    for loop.step, (loss, items) in enumerate(steps, start=1):
        progress.update({"loss": loss}, items)
        state = tracked["epoch_means"].state_dict()
        progress = Progress(run, loop, epoch_means=True)  # as after a resume
        tracked["epoch_means"].load_state_dict(state)

    assert logged == [{"train": {"loss": 2.4}}, {"train": {"loss": 5.0}}]
    assert capsys.readouterr().out == (
        "epoch 1, training means: loss 2.4000\nepoch 2, training means: loss 5.0000\n"
    )


def test_what_is_done_every_few_steps_is_done_at_the_last_one_too():
    run = SimpleNamespace(is_main=True, has_terminal=False)
    loop = SimpleNamespace(step=0, steps=7, steps_per_epoch=None)
    progress, due = Progress(run, loop), []
    for loop.step in range(1, 8):
        due += [loop.step] * progress.is_due(3)
    assert due == [3, 6, 7]
