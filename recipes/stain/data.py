"""Strips of tiles in DeepLIIF's layout: PNG files in `train/` and `val/`, squares side by side.

A strip has IHC, the modalities in their order, and Seg. Random draws use Python's global generator,
which samestep seeds for each lane batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.settings import SettingsError
from recipes.stain.config import DataSettings, Settings

EXAMINED = 64  # strips of a part that are examined for placeholders
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class StripError(SettingsError):
    """Strips are missing, cannot be read, or have another layout than the settings."""


class Split(NamedTuple):
    """The training and the held-out strips."""

    train: Strips
    val: Strips


def open_strips(settings: Settings) -> Split:
    """Open both parts of `data.path` and check the size of every strip. Raises `StripError`."""
    root = _root(settings.data)
    tiles = ("IHC", *settings.modalities, "Seg")
    split = Split(
        Strips(root / "train", tiles, settings.data, augment=True),
        Strips(root / "val", tiles, settings.data, augment=False),
    )
    for strips in split:
        refuse_placeholders(strips)
    return split


def refuse_placeholders(strips: Strips) -> None:
    """Raise `StripError` if strips repeat the IHC tile in place of the truth.

    DeepLIIF prepares tiles for testing in this way. Up to `EXAMINED` strips are looked at.
    """
    examined = copy(strips)
    examined.augment = False
    numbers = range(0, len(strips), -(-len(strips) // EXAMINED))
    copies = []
    for number in numbers:
        with suppress(StripError):  # an unreadable strip is another matter
            strip = examined[number]
            copies += [number] * bool((strip[1:] == strip[0]).all())
    if copies:
        raise StripError(
            f"{strips.paths[copies[0]]}: all tiles are copies of its IHC tile, in {len(copies)} of "
            f"{len(numbers)} strips; expected the truth, without which test.py makes images alone"
        )


def open_held_out(settings: Settings) -> Strips:
    """Open `val/` of `data.path` alone: strips, or single IHC tiles if the first file is square.

    Raises `StripError`.
    """
    folder = _root(settings.data) / "val"
    first = min(folder.glob("*.png"), default=None)
    square = first is not None and len(set(_size(first))) == 1
    tiles = ("IHC",) if square else ("IHC", *settings.modalities, "Seg")
    return Strips(folder, tiles, settings.data, augment=False)


def _root(settings: DataSettings) -> Path:
    if settings.path is None:
        expected = "a folder with train/*.png and val/*.png (make_data.py makes one)"
        raise StripError(f"data.path must be {expected}, got none")
    return settings.path


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as file:
            return file.size
    except UNREADABLE as error:
        raise StripError(f"{path} cannot be read as an image: {error}") from error


class Strips(Dataset[Tensor]):
    """The strips of a folder by name, each float32 [tiles, 3, size, size] in [-1, 1].

    They are decoded on access. Raises `StripError` for a file that cannot be read or has a wrong
    width: immediately if the file's header shows it, else on access.
    """

    def __init__(
        self, folder: Path, tiles: Sequence[str], settings: DataSettings, *, augment: bool
    ) -> None:
        self.paths = sorted(folder.glob("*.png"))
        if not self.paths:
            raise StripError(f"{folder} has no strips: expected {folder}/*.png")
        self.tiles = tiles
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
        pixels = torch.from_numpy(np.ascontiguousarray(strip)).permute(0, 3, 1, 2)
        return pixels.div(127.5).sub(1).contiguous()

    @property
    def has_truth(self) -> bool:
        """Whether the strips have more than the IHC tile."""
        return len(self.tiles) > 1

    def _check(self, path: Path) -> None:
        width, height = _size(path)
        if width != len(self.tiles) * height:
            if not self.has_truth:
                raise StripError(
                    f"{path}: expected a square IHC tile, like the first file of the folder, "
                    f"got {width} x {height} pixels"
                )
            tiles = f"the {len(self.tiles)} square tiles {', '.join(self.tiles)}"
            raise StripError(
                f"{path}: expected {tiles}, got {width} x {height} pixels; "
                "set modalities to the tiles between IHC and Seg"
            )

    def _tiles(self, path: Path) -> list[Image.Image]:
        try:
            with Image.open(path) as file:
                strip = file.convert("RGB")
        except UNREADABLE as error:
            raise StripError(f"{path} cannot be read as an image: {error}") from error
        side, size = strip.height, self.settings.load_size
        return [
            strip.crop((left, 0, left + side, side)).resize((size, size), Image.Resampling.BICUBIC)
            for left in range(0, len(self.tiles) * side, side)
        ]

    def _augmented(self, strip: np.ndarray) -> np.ndarray:
        """Crop and flip all tiles of a strip in the same way."""
        size, room = self.settings.crop_size, self.settings.load_size - self.settings.crop_size
        top, left = random.randint(0, room), random.randint(0, room)
        strip = strip[:, top : top + size, left : left + size]
        if self.settings.flip:
            strip = strip[:, :: random.choice((1, -1)), :: random.choice((1, -1))]
        return strip
