from __future__ import annotations

import pytest
import torch

from recipes.settings import SettingsError
from recipes.stain.config import OptimizerSettings
from recipes.stain.training import end_epoch, end_evaluation, make_scheduler


def rates(epochs, l1=(), **settings):
    """Return each epoch's learning rate, from 1; `l1` are held-out distances after each."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer, OptimizerSettings(**settings), epochs)
    epoch_rates = []
    for epoch in range(epochs):
        epoch_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        end_epoch([scheduler])
        if l1 and l1[epoch] is not None:
            end_evaluation([scheduler], l1[epoch])
    return epoch_rates, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decay_epochs": 3}, [1, 1, 1, 0.75, 0.5, 0.25]),
        ({}, [1, 1, 1, 0.75, 0.5, 0.25]),
        ({"decay_epochs": 0}, [1, 1, 1, 1, 1, 1]),
        ({"policy": "step", "step_epochs": 2}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
        ({"policy": "cosine"}, [1, 0.933, 0.75, 0.5, 0.25, 0.067]),
    ],
)
def test_rates_by_epoch(settings, expected):
    epoch_rates, after = rates(6, **settings)
    assert epoch_rates == pytest.approx(expected, abs=1e-3)
    if settings.get("policy") != "step":
        assert after == pytest.approx(0, abs=1e-12)


def test_a_plateau_is_found_in_evaluations_and_between_them_nothing_counts():
    l1 = [1.0, None, 0.995, None, 0.995, 0.5, 0.5, 0.5]  # less than 1% better does not count
    epoch_rates, after = rates(8, l1, policy="plateau", patience=1)
    assert epoch_rates == pytest.approx([1, 1, 1, 1, 1, 0.2, 0.2, 0.2])
    assert after == pytest.approx(0.04)


@pytest.mark.parametrize("decay", [-1, 7])
def test_a_decay_longer_than_the_run_is_an_error(decay):
    with pytest.raises(
        SettingsError, match=rf"optimizer\.decay_epochs must be 0 to 6, got {decay}"
    ):
        rates(6, decay_epochs=decay)
