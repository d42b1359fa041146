from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from recipes.settings import SettingsError, read
from recipes.stain.config import DataSettings, LossSettings, ModelSettings, Settings
from recipes.stain.model import (
    Discriminators,
    Generators,
    Networks,
    PatchGAN,
    ResNet,
    UNet,
    seg_weights,
)
from recipes.stain.training import Losses
from tests.recipes.stain.strips import RECIPE

MODEL = ModelSettings(
    width=2, blocks=1, unet_depth=3, discriminator_width=2, discriminator_layers=2, dropout=0.0
)
SETTINGS = Settings(
    modalities=("a", "b"), model=MODEL, data=DataSettings(load_size=16, crop_size=16)
)


def strips(count=2, modalities=2, size=16):
    return torch.rand(count, modalities + 2, 3, size, size) * 2 - 1


@pytest.mark.long
def test_the_full_size_is_that_of_deepliif():
    """18 networks: a ResNet-9 of 64 features has 11.4 million parameters (Zhu et al. 2017).

    A U-Net for 512 pixels has 67 million.
    """
    with torch.device("meta"):
        networks = Networks(read(Settings, [str(RECIPE / "full.yaml")]))
    made, judged = networks.generators, networks.discriminators
    every = [*made.translation, *made.segmentation, *judged.translation, *judged.segmentation]
    assert [
        len(part)
        for part in (made.translation, made.segmentation, judged.translation, judged.segmentation)
    ] == [4, 5, 4, 5]
    assert len(every) == 18
    millions = [
        sum(parameter.numel() for parameter in network.parameters()) / 1e6 for network in every
    ]
    assert millions == pytest.approx([11.4] * 4 + [67.0] * 5 + [7.0] * 9, rel=0.01)
    assert made.weights == judged.weights == (0.25, 0.15, 0.25, 0.1, 0.25)
    assert (
        sum(isinstance(module, nn.Dropout) and module.p == 0.5 for module in made.modules())
        == 4 * 9 + 5 * 4
    )


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.long] * (file.stem == "full"))
        for file in sorted(RECIPE.glob("*.yaml"))
    ],
)
def test_every_settings_file_fits_its_own_sizes(file):
    settings = read(Settings, [str(file)])
    with torch.device("meta"):
        networks = Networks(settings)
        ihc = torch.empty(1, 3, settings.data.crop_size, settings.data.crop_size)
        assert networks.generators(ihc).shape == (1, len(settings.modalities) + 1, *ihc.shape[1:])
    Losses(settings)
    assert settings.batch_size % settings.lanes == 0


@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_generators_make_a_tile_for_each_modality_and_seg(norm, depth):
    settings = replace(SETTINGS, model=replace(MODEL, norm=norm, unet_depth=depth))
    made = Generators(settings)(strips()[:, 0])
    assert made.shape == (2, 3, 3, 16, 16)
    assert made.abs().max() < 1


def test_seg_is_the_weighted_sum_of_what_is_segmented_from_the_input_and_each_translation():
    generators = Generators(
        replace(SETTINGS, model=replace(MODEL, seg_weights=(0.5, 0.25, 2.0)))
    ).eval()
    ihc = strips()[:, 0]
    made = generators(ihc)
    seen = [ihc, generators.translation[0](ihc), generators.translation[1](ihc)]
    torch.testing.assert_close(made[:, 0], seen[1])
    torch.testing.assert_close(made[:, 1], seen[2])
    segs = [network(tile) for network, tile in zip(generators.segmentation, seen, strict=True)]
    torch.testing.assert_close(made[:, 2], 0.5 * segs[0] + 0.25 * segs[1] + 2 * segs[2])


def test_discriminators_see_modalities_beside_ihc_and_seg_beside_every_real_tile():
    discriminators = Discriminators(SETTINGS).eval()
    real, judged = strips(), strips()[:, 1:]
    maps = discriminators(real, judged)
    for number in range(2):
        expected = discriminators.translation[number](
            torch.cat([real[:, 0], judged[:, number]], dim=1)
        )
        torch.testing.assert_close(maps[number], expected)
    segs = [
        network(torch.cat([real[:, number], judged[:, 2]], dim=1))
        for number, network in enumerate(discriminators.segmentation)
    ]
    torch.testing.assert_close(maps[2], sum(segs) / 3)


@pytest.mark.parametrize(("layers", "pixels"), [(1, 16), (2, 34), (3, 70)])
def test_a_logit_judges_a_patch_of_known_size(layers, pixels):
    """70 pixels with three layers (Isola et al. 2017)."""
    network = PatchGAN(replace(MODEL, discriminator_layers=layers)).eval()
    tiles = torch.rand(1, 6, 128, 128, requires_grad=True)
    logits = network(tiles)
    logits[0, 0, logits.shape[2] // 2, logits.shape[3] // 2].backward()
    assert ((tiles.grad != 0).any(1).sum((1, 2)) > 0).all()
    assert (tiles.grad != 0).any(1).any(1).sum() == pixels


@pytest.mark.long
def test_weights_start_as_in_pix2pix():
    torch.manual_seed(0)
    for network in (
        ResNet(replace(MODEL, width=16)),
        UNet(replace(MODEL, width=16)),
        Networks(replace(SETTINGS, model=replace(MODEL, width=16))),
    ):
        network.apply(lambda module: None)
    networks = Networks(replace(SETTINGS, model=replace(MODEL, width=16)))
    weights = torch.cat(
        [
            module.weight.flatten()
            for module in networks.modules()
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
        ]
    )
    assert (weights.mean().item(), weights.std().item()) == pytest.approx((0, 0.02), abs=1e-3)
    scales = torch.cat(
        [module.weight for module in networks.modules() if isinstance(module, nn.BatchNorm2d)]
    )
    assert (scales.mean().item(), scales.std().item()) == pytest.approx((1, 0.02), abs=1e-2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"data": DataSettings(load_size=16, crop_size=12)},
            r"data\.crop_size must be a multiple of 8 .*, got 12",
        ),
        (
            {"data": DataSettings(load_size=8, crop_size=8)},
            r"data\.load_size must be at least 12 .*, got 8",
        ),
        (
            {"data": DataSettings(load_size=16, crop_size=24)},
            r"data\.crop_size must be at most data\.load_size \(16\), got 24",
        ),
        (
            {"model": replace(MODEL, seg_weights=(1.0, 0.0))},
            r"model\.seg_weights must be 3 numbers, .*, got \[1\.0, 0\.0\]",
        ),
    ],
)
def test_sizes_and_weights_that_do_not_fit_are_named(changed, message):
    with pytest.raises(SettingsError, match=message):
        Networks(replace(SETTINGS, **changed))


def test_weights_are_equal_unless_given_or_those_of_four_modalities():
    assert seg_weights(SETTINGS) == (1 / 3, 1 / 3, 1 / 3)
    assert seg_weights(replace(SETTINGS, modalities=("a", "b", "c", "d"))) == (
        0.25,
        0.15,
        0.25,
        0.1,
        0.25,
    )
    with pytest.raises(
        SettingsError, match=r"loss\.generator_weights must be 3 numbers, .*, got \[1\.0\]"
    ):
        Losses(replace(SETTINGS, loss=LossSettings(generator_weights=(1.0,))))


# Losses


class Constants(nn.Module):
    """Networks that make and judge by fixed numbers."""

    def __init__(self, made, logits):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(float(made)))
        self.logits = nn.Parameter(torch.tensor(logits))

    def generators(self, ihc):
        return self.level.expand(len(ihc), 3, *ihc.shape[1:])

    def discriminators(self, real, judged):
        return [logit.expand(len(real), 1, 2, 2) for logit in self.logits]


def test_losses_are_those_of_the_paper():
    """Binary cross entropy of logits for modalities, least squares for Seg, 100 times smooth L1.

    Real is 1 and made is 0.
    """
    settings = replace(
        SETTINGS,
        loss=LossSettings(generator_weights=(0.5, 0.3, 0.2), discriminator_weights=(0.1, 0.2, 0.7)),
    )
    networks, tiles = Constants(0.5, [2.0, -1.0, 0.25]), torch.zeros(2, 4, 3, 16, 16)

    def entropy(logit, *, real):
        return nn.functional.softplus(torch.tensor(-logit if real else logit)).item()

    total, parts = Losses(settings).discriminators(networks, tiles)
    fake, real = (
        [entropy(2.0, real=False), entropy(-1.0, real=False), 0.25**2],
        [entropy(2.0, real=True), entropy(-1.0, real=True), 0.75**2],
    )
    assert [parts[f"{name}_fake"].item() for name in ("a", "b", "seg")] == pytest.approx(fake)
    assert [parts[f"{name}_real"].item() for name in ("a", "b", "seg")] == pytest.approx(real)
    assert total.item() == pytest.approx(
        sum(w * (f + r) / 2 for w, f, r in zip((0.1, 0.2, 0.7), fake, real, strict=True))
    )

    total, parts = Losses(settings).generators(networks, tiles)
    assert [parts[f"{name}_gan"].item() for name in ("a", "b", "seg")] == pytest.approx(real)
    assert [parts[f"{name}_l1"].item() for name in ("a", "b", "seg")] == pytest.approx(
        [0.5**2 / 2] * 3
    )
    assert total.item() == pytest.approx(
        sum(w * (g + 12.5) for w, g in zip((0.5, 0.3, 0.2), real, strict=True))
    )


def test_discriminators_are_not_trained_through_generators():
    networks = Constants(0.5, [2.0, -1.0, 0.25])
    total, _ = Losses(SETTINGS).discriminators(networks, torch.zeros(2, 4, 3, 16, 16))
    total.backward()
    assert networks.level.grad is None
    assert networks.logits.grad is not None
