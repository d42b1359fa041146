from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recipes.vit.config import ModelSettings
from recipes.vit.model import Attention, DropPath, VisionTransformer

SMALL = ModelSettings(
    size="tiny", width=16, depth=2, heads=4, image_size=8, patch_size=2, channels=1, classes=10
)

# The keys of timm 1.0's VisionTransformer with global_pool="token" and depth 2.
TIMM_BLOCK = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
TIMM_LAYERS = [
    "patch_embed.proj",
    *[f"blocks.{block}.{layer}" for block in range(2) for layer in TIMM_BLOCK],
    "norm",
    "head",
]
TIMM_KEYS = [
    "cls_token",
    "pos_embed",
    *[f"{layer}.{kind}" for layer in TIMM_LAYERS for kind in ("weight", "bias")],
]


def test_parameters_have_the_names_of_timm():
    assert list(VisionTransformer(SMALL).state_dict()) == TIMM_KEYS
    without_bias = VisionTransformer(replace(SMALL, qkv_bias=False)).state_dict()
    assert set(TIMM_KEYS) - set(without_bias) == {
        "blocks.0.attn.qkv.bias",
        "blocks.1.attn.qkv.bias",
    }


@pytest.mark.parametrize(
    ("size", "parameters"),
    # As published: 5.7, 22, 86 and 304 million (Touvron et al. 2021, Dosovitskiy et al. 2021), and
    # to the last one as in timm.
    [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)],
)
def test_sizes_are_those_of_the_papers(size, parameters):
    with torch.device("meta"):
        model = VisionTransformer(ModelSettings(size=size))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_number_overrides_that_of_the_size():
    with torch.device("meta"):
        model = VisionTransformer(ModelSettings(size="small", depth=3))
    assert (len(model.blocks), model.blocks[0].attn.heads, model.head.in_features) == (3, 6, 384)


@pytest.mark.parametrize(
    ("channels", "image_size", "patch_size"), [(1, 8, 2), (3, 32, 8), (3, 16, 16)]
)
def test_logits_come_from_images_of_any_size(channels, image_size, patch_size):
    model = VisionTransformer(
        replace(SMALL, channels=channels, image_size=image_size, patch_size=patch_size)
    )
    assert model(torch.randn(5, channels, image_size, image_size)).shape == (5, 10)
    assert model.pos_embed.shape == (1, 1 + (image_size // patch_size) ** 2, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"patch_size": 3}, r"model\.patch_size \(3\)"), ({"heads": 5}, r"model\.heads \(5\)")],
)
def test_numbers_that_do_not_fit_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        VisionTransformer(replace(SMALL, **change))


def test_attention_is_the_softmax_of_scaled_products():
    torch.manual_seed(0)
    attention = Attention(16, 4, SMALL).double()
    tokens = torch.randn(3, 7, 16, dtype=torch.float64)

    heads = []
    query, key, value = attention.qkv(tokens).chunk(3, dim=-1)
    for part in torch.arange(16).chunk(4):  # a head has four consecutive features
        weights = torch.softmax(query[..., part] @ key[..., part].transpose(1, 2) / 4**0.5, dim=-1)
        heads.append(weights @ value[..., part])

    torch.testing.assert_close(attention(tokens), attention.proj(torch.cat(heads, dim=-1)))


def test_dropping_happens_in_training_alone_and_keeps_the_mean():
    branch, drop_path = torch.ones(20_000, 1, 2), DropPath(0.25)
    torch.manual_seed(0)

    dropped = drop_path.train()(branch)

    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(dropped[:, 0, 0], dropped[:, 0, 1])  # a sample's branch goes whole
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert drop_path.eval()(branch) is branch


def test_every_parameter_gets_a_gradient_once_the_output_depends_on_all():
    model = VisionTransformer(
        replace(SMALL, dropout=0.1, attention_dropout=0.1, drop_path=0.1)
    ).train()
    torch.manual_seed(1)
    model(torch.randn(16, 1, 8, 8)).square().sum().backward()
    assert [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    ] == []
