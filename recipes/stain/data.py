"""Strips of tiles in DeepLIIF's layout: images in `train/` and `val/`, squares side by side.

A strip has IHC, the modalities in their order, and Seg. Random draws use Python's global generator,
which samestep seeds for each lane batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.file_check import FileCheck
from recipes.image_files import (
    Facts,
    ImageError,
    Listing,
    data_folder,
    describe_ignored,
    find_images,
    inspect,
    printable,
    read_image,
)
from recipes.stain.config import DataSettings, Settings

LAYOUT = "a folder with strips in train/ and val/ (make_data.py makes one)"
EXAMINED = 64  # strips of a part that are examined for placeholders
StripError = ImageError


class Split(NamedTuple):
    """The training and the held-out strips."""

    train: Strips
    val: Strips


def open_strips(settings: Settings, check: FileCheck | None = None) -> Split:
    """Open both parts of `data.path`. Raises `ImageError` for a strip that cannot be used."""
    data, root = settings.data, data_folder(settings.data.path, LAYOUT)
    if data.crop_size > data.load_size:
        expected = f"at most data.load_size={data.load_size}"
        raise StripError(f"data.crop_size must be {expected}, got {data.crop_size}")
    tiles = ("IHC", *settings.modalities, "Seg")
    listings = {part: _find_strips(root / part) for part in ("train", "val")}
    paths = _usable(listings, tiles, data, check or FileCheck(data))
    split = Split(
        Strips(paths["train"], tiles, data, augment=True),
        Strips(paths["val"], tiles, data, augment=False),
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


def open_held_out(settings: Settings, check: FileCheck | None = None) -> Strips:
    """Open `val/` of `data.path` alone: strips, or single IHC tiles if the first file is square.

    Raises `ImageError` for a file that cannot be used.
    """
    data = settings.data
    listing = _find_strips(data_folder(data.path, LAYOUT) / "val")
    first = inspect(listing.files[0], data, full=False)
    square = first.width == first.height > 0
    tiles = ("IHC",) if square else ("IHC", *settings.modalities, "Seg")
    paths = _usable({"val": listing}, tiles, data, check or FileCheck(data))
    return Strips(paths["val"], tiles, data, augment=False)


def _find_strips(folder: Path) -> Listing:
    listing = find_images(folder)
    if not listing.files:
        got = describe_ignored(listing.ignored)
        raise StripError(f"{folder} has no strips: expected {folder}/*.png (or .jpg, .tif, …){got}")
    (stem, count), *_ = Counter(path.stem for path in listing.files).most_common(1)
    if count > 1:
        raise StripError(
            f"{folder} has {count} files {printable(stem)}.*: expected different names"
        )
    listing.ignored["folder"] += len(listing.folders)
    return listing


def _usable(
    listings: Mapping[str, Listing], tiles: Sequence[str], data: DataSettings, check: FileCheck
) -> dict[str, list[Path]]:
    """Return the strips of each part without files that are left out, and print their number."""
    files = {part: listing.files for part, listing in listings.items()}

    def fault_of(part: str, index: int, facts: Facts) -> str | None:
        return _wrong_width(files[part][index], tiles, facts)

    least_side = "data.load_size", data.load_size
    kept = check.usable(files, fault_of=fault_of, least_side=least_side)
    for part, listing in listings.items():
        if not kept[part]:
            raise StripError(f"{part}: no strips are left")
        count = f"{len(kept[part])} strips of {len(tiles)} tiles"
        check.say(f"{part}: {count}{describe_ignored(listing.ignored)}")
    return {part: [paths[index] for index in kept[part]] for part, paths in files.items()}


def _wrong_width(path: Path, tiles: Sequence[str], facts: Facts) -> str | None:
    if facts.width == len(tiles) * facts.height:
        return None
    got = f"got {facts.width} x {facts.height} pixels"
    if len(tiles) == 1:
        expected = "a square IHC tile, like the first file of the folder"
        return f"{printable(path)}: expected {expected}, {got}"
    expected = f"the {len(tiles)} square tiles {', '.join(tiles)}"
    hint = "set modalities to the tiles between IHC and Seg"
    return f"{printable(path)}: expected {expected}, {got}; {hint}"


class Strips(Dataset[Tensor]):
    """Strips, each float32 [tiles, 3, size, size] in [-1, 1].

    They are decoded on access. Raises `ImageError` for a file that cannot be read.
    """

    def __init__(
        self, paths: Sequence[Path], tiles: Sequence[str], settings: DataSettings, *, augment: bool
    ) -> None:
        self.paths = paths
        self.tiles = tiles
        self.settings = settings
        self.augment = augment

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

    def _tiles(self, path: Path) -> list[Image.Image]:
        strip = read_image(path, "RGB", self.settings)
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
