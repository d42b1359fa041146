from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.vit.config import ModelSettings, OptimizerSettings
from recipes.vit.model import VisionTransformer
from recipes.vit.training import describe_rate, factor, make_optimizer, make_scheduler

MODEL = ModelSettings(width=8, depth=1, heads=2, image_size=4, patch_size=2, channels=1, classes=3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_alone_decay(name):
    model = VisionTransformer(MODEL)
    optimizer = make_optimizer(model, OptimizerSettings(name=name, weight_decay=0.3), batch_size=4)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays.keys() == set(names.values())
    weights = {
        "patch_embed.proj",
        "blocks.0.attn.qkv",
        "blocks.0.attn.proj",
        "blocks.0.mlp.fc1",
        "blocks.0.mlp.fc2",
        "head",
    }
    assert {name for name, decay in decays.items() if decay == 0.3} == {
        f"{name}.weight" for name in weights
    }
    assert {decays[name] for name in ("cls_token", "pos_embed", "norm.weight", "head.bias")} == {
        0.0
    }


@given(steps=st.integers(1, 300), part=st.floats(0, 1), final=st.floats(0, 1))
def test_the_learning_rate_grows_and_then_falls(steps, part, final):
    warmup_steps = round(part * steps)
    rates = [
        factor(step, steps=steps, warmup_steps=warmup_steps, final=final)
        for step in range(steps + 1)
    ]

    assert all(0 < rate <= 1 or rate == final for rate in rates)
    assert rates[:warmup_steps] == sorted(set(rates[:warmup_steps]))
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)
    assert rates[-1] == pytest.approx(final if warmup_steps < steps else 1)


def test_the_peak_grows_with_the_batch_and_both_numbers_are_described():
    settings = OptimizerSettings(
        learning_rate=5e-4, reference_batch_size=512, final_learning_rate=5e-5
    )
    optimizer = make_optimizer(VisionTransformer(MODEL), settings, batch_size=2048)
    scheduler = make_scheduler(optimizer, settings, steps=10, steps_per_epoch=0)

    assert scheduler.get_last_lr() == [2e-3, 2e-3]
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([2e-4, 2e-4])
    assert (
        describe_rate(settings, 2048)
        == "peak learning rate 0.002 at batch size 2048, scaled from 0.0005 at batch size 512"
    )
    assert (
        describe_rate(replace(settings, reference_batch_size=None), 2048)
        == "peak learning rate 0.0005, not scaled with the batch size"
    )


def test_sgd_has_the_momentum_given():
    optimizer = make_optimizer(
        VisionTransformer(MODEL), OptimizerSettings(name="sgd", momentum=0.7), batch_size=4
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.7}
