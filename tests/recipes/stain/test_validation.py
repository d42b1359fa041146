from __future__ import annotations

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import nn

import samestep as ss
from recipes.stain.config import Settings
from recipes.stain.validation import classes, evaluate, pixels, sheet
from tests.workers import run_workers

MODALITIES = ("a", "b")
NOISE = 0.4
COLOURS = {"black": 0, "red": 1, "green": 0, "blue": 2}  # their classes


class Noisy(nn.Module):
    """Makes the truth of the strip whose number is the IHC tile's first value, with fixed noise."""

    def __init__(self, strips, noise):
        super().__init__()
        self.strips, self.noise = strips, noise

    def forward(self, ihc):
        numbers = ihc[:, 0, 0, 0].round().int().tolist()
        return torch.stack([made_of(self.strips[number], number, self.noise) for number in numbers])


def made_of(strip, number, noise):
    return (
        strip[1:]
        + noise * torch.randn(strip[1:].shape, generator=torch.Generator().manual_seed(number))
    ).clamp(-1, 1)


def some_strips(count=5, size=24):
    generator = torch.Generator().manual_seed(0)
    strips = torch.rand(count, 4, 3, size, size, generator=generator) * 2 - 1
    strips[:, 3] = (strips[:, 3] > 0.5).float() * 2 - 1
    strips[:, 0, 0, 0, 0] = torch.arange(count)
    return strips


def scores_of(lanes, strips=None, noise=NOISE):
    strips = some_strips() if strips is None else strips
    with ss.init(lanes=lanes, seed=0) as run:
        generators = run.replicate(Noisy(strips, noise))
        return evaluate(
            run, Settings(modalities=MODALITIES, batch_size=8), generators, list(strips)
        )


def test_scores_are_those_of_scikit_image_over_all_strips():
    strips = some_strips()
    made = torch.stack([made_of(strip, number, NOISE) for number, strip in enumerate(strips)])
    # [strips, tiles, H, W, 3]
    translated, true = (
        (tiles.movedim(2, -1).numpy().astype(np.float64) + 1) / 2 for tiles in (made, strips[:, 1:])
    )

    scores = scores_of(lanes=1)

    for number, name in enumerate(MODALITIES):
        settings = {
            "data_range": 1.0,
            "channel_axis": -1,
            "gaussian_weights": True,
            "sigma": 1.5,
            "use_sample_covariance": False,
        }
        similar = [
            structural_similarity(true[i, number], translated[i, number], **settings)
            for i in range(len(strips))
        ]
        # they differ at the borders
        assert scores[f"{name}_ssim"] == pytest.approx(np.mean(similar), abs=0.02)
        assert scores[f"{name}_psnr"] == pytest.approx(
            peak_signal_noise_ratio(true[:, number], translated[:, number], data_range=1.0),
            rel=1e-5,
        )
    assert scores["l1"] == pytest.approx(
        nn.functional.smooth_l1_loss(made, strips[:, 1:]).item(), rel=1e-5
    )
    for number, name in enumerate(("positive", "negative"), start=1):
        truth, predicted = (classes((seg + 1) / 2) == number for seg in (strips[:, 3], made[:, 2]))
        assert scores[f"dice_{name}"] == pytest.approx(
            (2 * (truth & predicted).sum() / (truth.sum() + predicted.sum())).item()
        )
    assert scores["dice"] == pytest.approx((scores["dice_positive"] + scores["dice_negative"]) / 2)


def test_a_class_that_is_nowhere_has_no_dice_and_does_not_count():
    strips = some_strips(count=2)
    strips[:, 3] = -1
    strips[:, 3, 0, :4] = 1  # red
    scores = scores_of(1, strips, noise=0.1)
    assert np.isnan(scores["dice_negative"])
    assert scores["dice"] == scores["dice_positive"] > 0.9


def test_scores_have_the_same_bits_at_any_number_of_workers():
    for workers in (1, 2, 3):
        assert run_workers(scores_of, workers, 3) == [scores_of(3)] * workers


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_a_pixel_has_the_class_of_its_brightest_channel(colour, strength):
    seg = torch.full((1, 3, 2, 2), 0.3)
    if colour != "black":
        seg[:, ["red", "green", "blue"].index(colour)] = strength
    assert (classes(seg) == COLOURS[colour]).all()


def test_pixels_are_rounded_and_stay_in_range():
    tiles = torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5])[:, None, None, None].expand(5, 3, 1, 1)
    assert pixels(tiles).flatten(1)[:, 0].tolist() == [0, 0, 128, 255, 255]
    assert pixels(tiles).shape == (5, 1, 1, 3)


def test_a_sheet_has_two_rows():
    truth = np.stack([np.full((6, 6, 3), 10 * number, np.uint8) for number in range(4)])
    drawn = sheet(truth, truth[1:] + 1)
    assert drawn.shape == (20, 40, 3)
    assert drawn[5, 5::10, 0].tolist() == [0, 10, 20, 30]
    assert drawn[15, 5::10, 0].tolist() == [255, 11, 21, 31]
