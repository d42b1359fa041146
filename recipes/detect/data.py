"""Images of a COCO data set with boxes, labels and masks, and lane batches of them.

Boxes are float32 [objects, 4]: left, top, right and bottom in pixels. Random draws use Python's
global generator, which samestep seeds for each lane batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from faster_coco_eval import COCO
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.detect.coco import AnnotationError, read_annotations
from recipes.detect.config import DataSettings, Settings
from recipes.detect.faults import leave_out_faults
from recipes.file_check import FileCheck, describe_counts
from recipes.image_files import Facts, listed_path, printable, read_image
from recipes.settings import SettingsError

Entry = dict[str, Any]  # of an image in an annotation file: id, file_name, width, height


class Sample(NamedTuple):
    """One image as the model gets it, and its entry in the annotation file."""

    image: Tensor  # float32 [3, height, width]
    boxes: Tensor  # float32 [objects, 4]
    labels: Tensor  # int64 [objects]
    masks: Tensor  # uint8 [objects, height, width]
    entry: Entry


class Batch(NamedTuple):
    """The samples of a lane; images are padded on the right and bottom to the largest one."""

    images: Tensor  # float32 [batch, 3, height, width]
    sizes: list[tuple[int, int]]  # height and width of each image without padding
    boxes: list[Tensor]
    labels: list[Tensor]
    masks: list[Tensor]  # uint8 [objects, height, width] with the batch's height and width
    entries: list[Entry]


class Split(NamedTuple):
    """The training images, None for an evaluation, and the held-out images."""

    train: CocoImages | None
    val: CocoImages

    def describe(self) -> str:
        """Describe the images and boxes of both parts, and the boxes that are left out.

        Raises `AnnotationError` if no box is left to learn.
        """
        train = self.train
        if train is not None and all(entry["left_out"] for entry in train.truth.anns.values()):
            raise AnnotationError(f"{train.file} has no box to learn\n{train.summary}")
        return "\n".join(images.summary for images in self if images is not None)


def open_images(
    settings: DataSettings,
    check: FileCheck | None = None,
    *,
    masks: bool = True,
    train: bool = True,
) -> Split:
    """Open a data set, without `train` the held-out images alone.

    `check` reports on image files, and leaves out those that are not used. Raises `SettingsError`,
    and `AnnotationError` for an invalid file.
    """
    parts = []
    for part in ("train", "val") if train else ("val",):
        file, folder = find_part(settings, part)
        parts.append(CocoImages(file, folder, settings, training=part == "train", masks=masks))
    first, last = parts[0], parts[-1]
    if first.names != last.names:
        raise AnnotationError(f"{last.file} must have the same categories as {first.file}")
    names = tuple(last.names.values())
    if settings.class_names not in (None, names):
        expected = f"the categories data.class_names={list(settings.class_names)}"
        raise AnnotationError(f"{last.file}: expected {expected}, got {list(names)}")
    named = {"train": first, "val": last} if train else {"val": last}
    leave_out(named, check or FileCheck(settings))
    return Split(first if train else None, last)


def find_part(settings: DataSettings, part: str) -> tuple[Path, Path]:
    """Return the annotation file and the folder of images of a part, `train` or `val`.

    In the folder `data.path`, they are `train.json` and `train/`, or COCO's own
    `annotations/instances_train2017.json` and `train2017/`, of any year. Raises `SettingsError`.
    """
    root, (file, folder) = settings.path, (settings.train_annotations, settings.train_images)
    if part == "val":
        file, folder = settings.val_annotations, settings.val_images
    if root is None and None in (file, folder):
        expected = "a folder with a data set in COCO format (make_data.py makes one)"
        raise SettingsError(f"data.path must be {expected}, got none")
    if file is None:
        files = _files_of_part(listed_path(Path(), root), part)
        if len(files) > 1:
            names = " and ".join(printable(name) for name in files)
            raise SettingsError(f"{names} exist; choose one with data.{part}_annotations")
        file = files[0] if files else root / f"{part}.json"
    if folder is None:
        name = file.stem.removeprefix("instances_")
        folders = [root / name, root / "images" / name, root / part]
        folder = next((path for path in folders if path.is_dir()), folders[0])
    file, folder = (listed_path(Path(), path) for path in (file, folder))
    for path, kind, exists in ((file, "file", file.is_file()), (folder, "folder", folder.is_dir())):
        if not exists:
            got = f"is no {kind}" if path.exists() else "does not exist"
            raise SettingsError(
                f"{path} {got}; expected {part}.json and {part}/, or COCO's "
                f"annotations/instances_{part}2017.json and {part}2017/ (make_data.py makes one)"
            )
    return file, folder


def _files_of_part(root: Path, part: str) -> list[Path]:
    """Return the annotation files of a part in a folder; several if it has those of more years."""
    if (file := root / f"{part}.json").exists():
        return [file]
    return sorted((root / "annotations").glob(f"instances_{part}*.json"))


def with_class_names(settings: Settings, images: Split) -> Settings:
    """Return settings with the names of the categories, which `--eval` compares."""
    names = tuple(images.val.names.values())
    return replace(settings, data=replace(settings.data, class_names=names))


def leave_out(parts: dict[str, CocoImages], check: FileCheck) -> None:
    """Check the image files of all parts, leave out unusable ones, and print what is left."""
    files = {part: images.paths for part, images in parts.items()}
    usable = check.usable(files, fault_of=lambda part, *image: parts[part].fault_of(*image))
    for part, images in parts.items():
        if not usable[part]:
            raise SettingsError(f"{part}: no images are left")
        images.keep(usable[part])
        check.say(f"{part}: {images.describe()}")


class CocoImages(Dataset[Sample]):
    """Images with their objects, in training without those that `faults` leaves out.

    `summary` counts all of them, and `describe` those that are learned or scored.

    `truth` is the indexed annotation file, and `names` has the names of the categories by id. A
    label is the position of a category in `names`. Without `masks`, samples have none.
    Raises `AnnotationError` for an image that cannot be read or has another size than its entry,
    and for an invalid mask.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        settings: DataSettings,
        *,
        training: bool,
        masks: bool = True,
    ) -> None:
        self.file, self.folder, self.settings, self.training = file, folder, settings, training
        self.masks = masks
        self.truth = read_annotations(file, masks=masks)
        self.summary = leave_out_faults(self.truth, file, training=training)
        self.entries: list[Entry] = self.truth.dataset["images"]
        self.names = {
            number: category["name"] for number, category in sorted(self.truth.cats.items())
        }
        self._labels = {number: label for label, number in enumerate(self.names)}
        self.paths = [listed_path(folder, entry["file_name"]) for entry in self.entries]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self.entries[index]
        image = self.read(index)
        boxes, labels, masks = self._objects(entry)
        original = entry["height"], entry["width"]
        height, width = new_size(*original, self._short_side(), self.settings.longest_side)
        if (height, width) != original:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            boxes = boxes * torch.tensor([width / original[1], height / original[0]] * 2)
            masks = F.interpolate(masks[:, None], size=(height, width), mode="nearest-exact")[:, 0]
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        mean, std = (
            torch.tensor(numbers)[:, None, None]
            for numbers in (self.settings.mean, self.settings.std)
        )
        pixels = (pixels - mean) / std
        if self.training and random.random() < self.settings.flip:
            pixels, masks = pixels.flip(2), masks.flip(2)
            left, top, right, bottom = boxes.unbind(1)
            boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
        return Sample(pixels, boxes, labels, masks, entry)

    def read(self, index: int) -> Image.Image:
        """Read an image file as RGB."""
        image = read_image(self.paths[index], "RGB", self.settings)
        if fault := self._wrong_size(index, image.width, image.height):
            raise AnnotationError(fault)
        return image

    def fault_of(self, index: int, facts: Facts) -> str | None:
        """Return what is wrong with a file that can be read, if anything."""
        fault = self._wrong_size(index, facts.width, facts.height)
        if fault and facts.turned and not self._wrong_size(index, facts.height, facts.width):
            hint = "annotations must be in the coordinates of the image as it is displayed"
            return f"{fault}, as its EXIF orientation turns it; {hint}"
        return fault

    def _wrong_size(self, index: int, width: int, height: int) -> str | None:
        entry = self.entries[index]
        if (width, height) == (entry["width"], entry["height"]):
            return None
        expected = f"{entry['width']} x {entry['height']} pixels as in {self.file}"
        return f"{printable(self.paths[index])}: expected {expected}, got {width} x {height}"

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only images with these indices, and their objects."""
        if len(indices) == len(self.entries):
            return
        self.paths = [self.paths[index] for index in indices]
        self.entries = [self.entries[index] for index in indices]
        ids, content = {entry["id"] for entry in self.entries}, self.truth.dataset
        objects = [entry for entry in content["annotations"] if entry["image_id"] in ids]
        self.truth = COCO({**content, "images": self.entries, "annotations": objects})

    def describe(self) -> str:
        """Return the number of images and of each category's objects, without crowds."""
        unused = "left_out" if self.training else "iscrowd"
        objects = [entry for entry in self.truth.dataset["annotations"] if not entry[unused]]
        counts = Counter(entry["category_id"] for entry in objects)
        objects = describe_counts({name: counts[number] for number, name in self.names.items()})
        return f"{len(self)} images, {counts.total()} objects: {objects}"

    def groups(self) -> list[bool]:
        """Return for each image whether it is wide; the images of a lane batch share this."""
        return [entry["width"] >= entry["height"] for entry in self.entries]

    def _short_side(self) -> int | None:
        sides = self.settings.short_sides
        return None if not sides else random.choice(sides) if self.training else sides[-1]

    def _objects(self, entry: Entry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the boxes, labels and masks of an image at its original size."""
        height, width = entry["height"], entry["width"]
        labels, corners, masks = [], [], [torch.zeros(0, height, width, dtype=torch.uint8)]
        for annotation in self.truth.imgToAnns.get(entry["id"], []):
            if annotation["left_out"]:
                continue
            left, top, box_width, box_height = annotation["bbox"]
            right, bottom = min(left + box_width, width), min(top + box_height, height)
            left, top = max(left, 0.0), max(top, 0.0)
            try:
                if self.masks:
                    masks.append(torch.from_numpy(self.truth.annToMask(annotation))[None])
            except ValueError as error:
                where = f"{self.file}: a mask of image {entry['id']}"
                raise AnnotationError(f"{where} cannot be decoded: {error}") from error
            labels.append(self._labels[annotation["category_id"]])
            corners.append((left, top, right, bottom))
        boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
        return boxes, torch.tensor(labels, dtype=torch.int64), torch.cat(masks)


def new_size(height: int, width: int, short_side: int | None, longest_side: int) -> tuple[int, int]:
    """Return the height and width with a shorter side of `short_side`, within `longest_side`."""
    if short_side is None:
        return height, width
    scale = min(short_side / min(height, width), longest_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def collate(samples: Sequence[Sample], *, multiple: int) -> Batch:
    """Pad images and masks to the largest height and width, rounded up to a multiple."""
    images, boxes, labels, masks, entries = map(list, zip(*samples, strict=True))
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    height, width = (-(-max(sides) // multiple) * multiple for sides in zip(*sizes, strict=True))
    padding = [(0, width - own_width, 0, height - own_height) for own_height, own_width in sizes]
    padded = [list(map(F.pad, tensors, padding)) for tensors in (images, masks)]
    return Batch(torch.stack(padded[0]), sizes, boxes, labels, padded[1], entries)


def boxes_in(batch: Batch) -> int:
    """Return the number of boxes of a lane batch."""
    return sum(map(len, batch.boxes))
