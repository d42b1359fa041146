from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.detect.config import OptimizerSettings
from recipes.detect.optimizer import describe, make_optimizer, make_schedule, make_scheduler

REFERENCE = OptimizerSettings()


@given(halvings=st.integers(-3, 3))
def test_half_the_batch_is_half_the_rate_and_twice_the_steps(halvings):
    scale = 2.0**halvings
    schedule = make_schedule(REFERENCE, batch_size=int(16 / scale))
    assert schedule.learning_rate * scale == pytest.approx(REFERENCE.learning_rate)
    assert (schedule.steps, schedule.warmup_steps) == (round(90_000 * scale), round(500 * scale))
    assert schedule.decay_steps == tuple(round(step * scale) for step in REFERENCE.decay_steps)
    assert schedule.learning_rate * schedule.steps == pytest.approx(
        REFERENCE.learning_rate * REFERENCE.steps
    )


def test_the_rate_grows_from_a_third_and_falls_by_ten():
    schedule = make_schedule(
        OptimizerSettings(learning_rate=3.0, steps=12, warmup_steps=4, decay_steps=(8, 10)), 16
    )
    optimizer = make_optimizer(torch.nn.Linear(2, 2), REFERENCE, schedule)
    scheduler = make_scheduler(optimizer, schedule)
    rates = []
    for _ in range(12):
        rates += scheduler.get_last_lr()[:1]
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1, 1.5, 2, 2.5, 3, 3, 3, 3, 0.3, 0.3, 0.03, 0.03])


def test_the_scaling_is_said():
    settings = OptimizerSettings(learning_rate=0.02, steps=100, decay_steps=(60, 80))
    assert describe(make_schedule(settings, 8), settings, 8) == (
        "peak learning rate 0.01, 200 steps, decays at 120, 160, at batch size 8,\n"
        "scaled from 0.02 and 100 steps at batch size 16"
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_only_weights_decay(name):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.GroupNorm(1, 2))
    settings = OptimizerSettings(name=name, weight_decay=0.5)
    decayed, rest = make_optimizer(model, settings, make_schedule(settings, 16)).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert [parameter is model[0].weight for parameter in decayed["params"]] == [True]
    assert len(rest["params"]) == 3
