from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from recipes.resume import settings_applied
from recipes.settings import SettingsError

SCHEDULES = {
    "linear": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 - epoch / 10),
    "step": lambda optimizer: StepLR(optimizer, 2, 0.1),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.2, patience=0),
    "none": None,
}


def made(schedule, *, lr=0.1, kind=torch.optim.Adam, **options):
    """Return an optimizer with two groups, and its schedule."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr * (1 + n)} for n in range(2)]
    optimizer = kind(groups, **options)
    scheduler = SCHEDULES[schedule]
    return (optimizer,) if scheduler is None else (optimizer, scheduler(optimizer))


def train(trained, epochs):
    """Return the learning rates of the epochs."""
    optimizer, *schedulers = trained
    rates = []
    for _ in range(epochs):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*[1.0] * isinstance(scheduler, ReduceLROnPlateau))
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def resumed(before, after):
    """Restore the state of objects in others; return what is printed."""
    printed = []
    run = SimpleNamespace(step=3, print=printed.append)
    states = deepcopy([each.state_dict() for each in before])
    with settings_applied(run, *after):
        for each, state in zip(after, states, strict=True):
            each.load_state_dict(state)
    return printed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_changed_learning_rate_goes_on_along_its_schedule(schedule):
    before, after, alone = made(schedule), made(schedule, lr=0.3), made(schedule, lr=0.3)
    for trained in (before, alone):
        with settings_applied(SimpleNamespace(), *trained):
            pass  # as at the first start
    train(before, 3)
    expected = train(alone, 8)[3:]

    said = "learning rate 0.1 -> 0.3, learning rate 0.2 -> 0.6"
    assert resumed(before, after) == [f"changed at step 3, and used from here on: {said}"]
    if after[1:]:
        assert after[1]._last_lr == [group["lr"] for group in after[0].param_groups]
    torch.testing.assert_close(torch.tensor(train(after, 5)), torch.tensor(expected))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_change_the_state_is_that_of_the_snapshot(schedule):
    before, after = made(schedule, betas=(0.5, 0.9)), made(schedule, betas=[0.5, 0.9])
    with settings_applied(SimpleNamespace(), *before):
        pass
    train(before, 3)
    assert resumed(before, after) == []
    assert train(after, 5) == train(before, 5)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"weight_decay": 0.5}, "weight decay 0 -> 0.5"),
        ({"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}, "betas (0.9, 0.99) -> (0.8, 0.99)"),
        ({"eps": 1e-8}, {"eps": 1e-4}, "eps 1e-08 -> 0.0001"),
    ],
)
def test_other_options_of_the_settings_are_used_as_well(before, after, said):
    trained = made("none", **after)
    assert resumed(made("none", **before), trained) == [
        f"changed at step 3, and used from here on: {said}"
    ]
    for name, value in after.items():
        assert [group[name] for group in trained[0].param_groups] == [value] * 2


def test_the_period_of_a_schedule_is_that_of_the_settings(monkeypatch):
    before = made("step")
    monkeypatch.setitem(SCHEDULES, "step", lambda optimizer: StepLR(optimizer, 5, 0.1))
    after = made("step")
    assert resumed(before, after) == ["changed at step 3, and used from here on: step_size 2 -> 5"]
    assert after[1].step_size == 5


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (made("none"), made("none", kind=torch.optim.SGD)),
        (made("none", kind=torch.optim.SGD), made("none")),
        (made("linear"), made("step")),
        (made("step"), made("cosine")),
        (made("cosine"), made("plateau")),
    ],
)
def test_another_kind_is_refused(before, after):
    with pytest.raises(SettingsError, match="the snapshot of step 3 has another kind"):
        resumed(before, after)
