from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import recipes.vit
import samestep as ss
from recipes.settings import read
from recipes.vit.config import Settings
from recipes.vit.data import ImageTensors, Split, open_images
from recipes.vit.mistakes import COLUMNS, LEAST_SIDE, MOST_CHECKED, ROWS, log_mistakes
from tests.jobs import events

PICTURED = COLUMNS * ROWS
SETTINGS = read(Settings, [str(Path(recipes.vit.__file__).with_name("digits.yaml"))])


class Always(nn.Module):
    """Takes every image for a 3."""

    def forward(self, images):
        return nn.functional.one_hot(torch.full((len(images),), 3), 10).float()


def drawn(directory, images):
    """Return the one image that is drawn of a model's mistakes."""
    with ss.init(dir=directory, lanes=1) as run:
        log_mistakes(run, SETTINGS, Always(), Split(images, images, 10))
    (event,) = events(directory, "image")
    return np.asarray(Image.open(directory / event["path"]))


def test_the_first_mistakes_are_drawn_as_the_images_are(tmp_path):
    images = open_images(SETTINGS.data, SETTINGS.model).test
    picture = drawn(tmp_path, images)
    wrong = [image for image, label in images if label != 3][:PICTURED]
    assert len(wrong) == PICTURED
    for number, image in enumerate(wrong):
        top, left = (number // 8) * (picture.shape[0] + 8) // 2, (number % 8) * (LEAST_SIDE + 8)
        pixels = (
            ((image[0] * SETTINGS.data.std[0] + SETTINGS.data.mean[0]) * 255).round().byte().numpy()
        )
        enlarged = np.kron(pixels, np.ones((LEAST_SIDE // 8, LEAST_SIDE // 8), np.uint8))
        assert np.array_equal(
            picture[top : top + LEAST_SIDE, left : left + LEAST_SIDE],
            np.stack([enlarged] * 3, axis=-1),
        )


@pytest.mark.parametrize("size", [1, MOST_CHECKED, MOST_CHECKED + 1, 3 * MOST_CHECKED + 1])
def test_those_checked_are_spread_over_all(size, tmp_path):
    asked = []

    class Images(ImageTensors):
        def __getitems__(self, indices):
            asked.extend(indices)
            return super().__getitems__(indices)

    drawn(tmp_path, Images(torch.zeros(size, 1, 8, 8), torch.zeros(size, dtype=torch.int64)))
    # three samples are loaded twice before all, and those that are drawn are asked for again
    checked = asked[6:-PICTURED] if size >= PICTURED else asked[:1]
    assert len(checked) <= MOST_CHECKED
    assert checked == list(range(0, size, -(-size // MOST_CHECKED)))


def test_without_mistakes_nothing_is_drawn(tmp_path):
    images = ImageTensors(torch.zeros(5, 1, 8, 8), torch.full((5,), 3))
    with ss.init(dir=tmp_path, lanes=1) as run:
        log_mistakes(run, SETTINGS, Always(), Split(images, images, 10))
    assert events(tmp_path, "image") == []
