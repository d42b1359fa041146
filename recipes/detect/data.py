"""Images of a COCO data set with boxes, labels and masks, and lane batches of them.

Boxes are float32 [objects, 4]: left, top, right and bottom in pixels. Random draws come from
Python's global generator, which samestep keys for each lane batch.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.detect.coco import AnnotationError, Annotations, decoded, read_annotations
from recipes.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from recipes.detect.coco import ImageEntry
    from recipes.detect.config import DataSettings


class Sample(NamedTuple):
    """One image as the model sees it, and what it is called in its annotation file."""

    image: Tensor  # float32 [3, height, width]
    boxes: Tensor  # float32 [objects, 4]
    labels: Tensor  # int64 [objects]
    masks: Tensor  # uint8 [objects, height, width]
    entry: ImageEntry


class Batch(NamedTuple):
    """The samples of a lane; images are padded at the right and below to the largest of them."""

    images: Tensor  # float32 [batch, 3, height, width]
    sizes: list[tuple[int, int]]  # height and width of each image without padding
    boxes: list[Tensor]
    labels: list[Tensor]
    masks: list[Tensor]  # uint8 [objects, height, width] with the batch's height and width
    entries: list[ImageEntry]


class Split(NamedTuple):
    """The images to train on, and those held out."""

    train: CocoImages
    val: CocoImages


def open_images(settings: DataSettings) -> Split:
    """Open the data set that settings name. Raises `SettingsError`, and `AnnotationError` for what is wrong in a file."""
    given = {
        "train": (settings.train_annotations, settings.train_images),
        "val": (settings.val_annotations, settings.val_images),
    }
    parts = {}
    for part, (own_file, own_folder) in given.items():
        if settings.path is None and None in {own_file, own_folder}:
            raise SettingsError(
                f"data.path is missing; expected a folder with {part}.json and {part}/: make_data.py makes one of digits"
            )
        file, folder = (
            own_file or settings.path / f"{part}.json",
            own_folder or settings.path / part,
        )
        if not file.is_file() or not folder.is_dir():
            missing = folder if file.is_file() else file
            raise SettingsError(
                f"{missing} does not exist; expected a data set in COCO format: make_data.py makes one of digits"
            )
        parts[part] = CocoImages(file, folder, settings, training=part == "train")
    split = Split(**parts)
    if split.train.annotations.categories != split.val.annotations.categories:
        raise AnnotationError(
            f"{split.val.file} has other categories than {split.train.file}; expected the same ids and names"
        )
    return split


class CocoImages(Dataset[Sample]):
    """Images with their objects; crowds and boxes without area are no objects to learn.

    Raises `AnnotationError` that names an image that cannot be read, is of another size than its
    entry says, or whose masks are broken.
    """

    def __init__(self, file: Path, folder: Path, settings: DataSettings, *, training: bool) -> None:
        self.file, self.folder, self.settings, self.training = file, folder, settings, training
        self.annotations: Annotations = read_annotations(file)

    def __len__(self) -> int:
        return len(self.annotations.images)

    def __getitem__(self, index: int) -> Sample:
        entry = self.annotations.images[index]
        image = self.read(index)
        boxes, labels, masks = self._objects(entry)
        height, width = new_size(entry, self._short_side(), self.settings.longest_side)
        if (height, width) != (entry.height, entry.width):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            boxes = boxes * torch.tensor([width / entry.width, height / entry.height] * 2)
            masks = F.interpolate(masks[:, None], size=(height, width), mode="nearest-exact")[:, 0]
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        mean, std = (
            torch.tensor(numbers)[:, None, None]
            for numbers in (self.settings.mean, self.settings.std)
        )
        pixels = (pixels - mean) / std
        if self.training and random.random() < self.settings.flip:
            pixels, masks = pixels.flip(2), masks.flip(2)
            boxes = torch.stack(
                [width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1
            )
        return Sample(pixels, boxes, labels, masks, entry)

    def read(self, index: int) -> Image.Image:
        """Return an image as its file has it, in red, green and blue."""
        entry = self.annotations.images[index]
        path = self.folder / entry.file_name
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise AnnotationError(f"{path} cannot be read as an image: {error}") from error
        if image.size != (entry.width, entry.height):
            given, expected = (
                f"{width} x {height}" for width, height in (image.size, (entry.width, entry.height))
            )
            raise AnnotationError(f"{path} has {given} pixels, but {self.file} says {expected}")
        return image

    def groups(self) -> list[bool]:
        """Return for each image whether it is at least as wide as high: images of a lane batch share that."""
        return [entry.width >= entry.height for entry in self.annotations.images]

    def _short_side(self) -> int | None:
        sides = self.settings.short_sides
        return None if not sides else random.choice(sides) if self.training else sides[-1]

    def _objects(self, entry: ImageEntry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the boxes, labels and masks of an image at its own size."""
        kept, corners = [], []
        for instance in entry.instances:
            left, top, width, height = instance.box
            right, bottom = min(left + width, entry.width), min(top + height, entry.height)
            left, top = max(left, 0.0), max(top, 0.0)
            if left < right and top < bottom and not instance.crowd:
                kept.append(instance)
                corners.append((left, top, right, bottom))
        try:
            masks = [torch.from_numpy(decoded(instance)) for instance in kept]
        except ValueError as error:
            raise AnnotationError(
                f"{self.file}: a mask of image {entry.number} cannot be decoded: {error}"
            ) from error
        return (
            torch.tensor(corners, dtype=torch.float32).reshape(-1, 4),
            torch.tensor([instance.label for instance in kept], dtype=torch.int64),
            torch.stack(masks)
            if masks
            else torch.zeros(0, entry.height, entry.width, dtype=torch.uint8),
        )


def new_size(entry: ImageEntry, short_side: int | None, longest_side: int) -> tuple[int, int]:
    """Return the height and width of an image whose shorter side gets `short_side` pixels, if the longer one's limit allows."""
    if short_side is None:
        return entry.height, entry.width
    scale = min(
        short_side / min(entry.height, entry.width), longest_side / max(entry.height, entry.width)
    )
    return max(1, round(entry.height * scale)), max(1, round(entry.width * scale))


def collate(samples: Sequence[Sample], *, multiple: int) -> Batch:
    """Pad images and masks to the largest height and width, rounded up to a multiple of `multiple` pixels."""
    sizes = [(sample.image.shape[1], sample.image.shape[2]) for sample in samples]
    height, width = (-(-max(sides) // multiple) * multiple for sides in zip(*sizes, strict=True))
    padding = [(0, width - own_width, 0, height - own_height) for own_height, own_width in sizes]
    return Batch(
        torch.stack(
            [F.pad(sample.image, pad) for sample, pad in zip(samples, padding, strict=True)]
        ),
        sizes,
        [sample.boxes for sample in samples],
        [sample.labels for sample in samples],
        [F.pad(sample.masks, pad) for sample, pad in zip(samples, padding, strict=True)],
        [sample.entry for sample in samples],
    )


def boxes_in(batch: Batch) -> int:
    """Return the number of boxes of a lane batch."""
    return sum(map(len, batch.boxes))
