"""Strips of tiles in DeepLIIF's layout: PNG files in `train/` and `val/`, equal squares side by side.

A strip holds IHC, the modalities in their order, and Seg. Random draws come from Python's global
generator, which samestep keys for each lane batch.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from recipes.stain.config import DataSettings, Settings

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class StripError(SettingsError):
    """Strips cannot be found or read, or have another layout than the settings say."""


class Split(NamedTuple):
    """The strips to train on, and those held out."""

    train: Strips
    val: Strips


def open_strips(settings: Settings) -> Split:
    """Open both parts of `data.path`, and look at the size of every strip. Raises `StripError`."""
    root = settings.data.path
    if root is None:
        raise StripError(
            "data.path was not given; expected a folder with train/*.png and val/*.png: make_data.py makes one"
        )
    return Split(
        Strips(root / "train", settings.modalities, settings.data, augment=True),
        Strips(root / "val", settings.modalities, settings.data, augment=False),
    )


class Strips(Dataset[Tensor]):
    """The strips of a folder by name, each float32 [tiles, 3, size, size] in [-1, 1], decoded when it is asked for.

    Raises `StripError` that names the file: for a wrong width or a file of another kind at once,
    for a torn one when it is read.
    """

    def __init__(
        self, folder: Path, modalities: Sequence[str], settings: DataSettings, *, augment: bool
    ) -> None:
        self.paths = sorted(folder.glob("*.png"))
        if not self.paths:
            raise StripError(f"{folder} has no strips; expected {folder}/*.png")
        self.tiles = ("IHC", *modalities, "Seg")
        self.settings = settings
        self.augment = augment
        for path in self.paths:
            self._check(path)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        # [tiles, size, size, 3]
        strip = np.stack([np.asarray(tile) for tile in self._tiles(self.paths[index])])
        if self.augment:
            strip = self._augmented(strip)
        return (
            torch.from_numpy(np.ascontiguousarray(strip))
            .permute(0, 3, 1, 2)
            .div(127.5)
            .sub(1)
            .contiguous()
        )

    def _check(self, path: Path) -> None:
        try:
            with Image.open(path) as file:
                width, height = file.size
        except UNREADABLE as error:
            raise StripError(f"{path} cannot be read as an image: {error}") from error
        if width != len(self.tiles) * height:
            raise StripError(
                f"{path} is {width} x {height} pixels; expected a width of {len(self.tiles)} times the height, for the tiles "
                f"{', '.join(self.tiles)}: set modalities to what lies between IHC and Seg"
            )

    def _tiles(self, path: Path) -> list[Image.Image]:
        try:
            with Image.open(path) as file:
                strip = file.convert("RGB")
        except UNREADABLE as error:
            raise StripError(f"{path} cannot be read as an image: {error}") from error
        side, size = strip.height, self.settings.load_size
        tiles = [
            strip.crop((number * side, 0, (number + 1) * side, side))
            for number in range(len(self.tiles))
        ]
        return [tile.resize((size, size), Image.Resampling.BICUBIC) for tile in tiles]

    def _augmented(self, strip: np.ndarray) -> np.ndarray:
        """Crop and flip all tiles of a strip alike."""
        size, room = self.settings.crop_size, self.settings.load_size - self.settings.crop_size
        top, left = random.randint(0, room), random.randint(0, room)
        strip = strip[:, top : top + size, left : left + size]
        if self.settings.flip:
            strip = strip[:, :: random.choice((1, -1)), :: random.choice((1, -1))]
        return strip
