"""Labeled images: a folder in ImageNet's layout, scikit-learn's digits, or Fashion-MNIST.

A sample is an image, float32 [channels, size, size], and a class index. Random draws use the global
generators of Python and torch, which samestep seeds for each lane batch.
"""

from __future__ import annotations

import gzip
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recipes.digits import read_digits
from recipes.file_check import FileCheck, describe_counts
from recipes.image_files import (
    ImageError,
    composed,
    data_folder,
    describe_ignored,
    find_images,
    listed_path,
    read_image,
    read_text,
)
from recipes.vit.classes import Classes, find_classes
from recipes.vit.config import DataSettings, ModelSettings
from recipes.vit.randaugment import randaugment

MODES = {1: "L", 3: "RGB"}
# PATH CLASS, also with tabs or commas, after which the name of a class may have spaces
LINES = tuple(
    re.compile(rf"\s*(.+?){separated}\s*")
    for separated in (r"[\s,;]+(\d+)", r"\t\s*(.+?)", r"[,;]\s*(.+?)", r"[\s,;]+(\S+)")
)

Items = list[tuple[Path, int]]  # image files with class indices


class Split(NamedTuple):
    """The training and the held-out images, and the classes, which may have names."""

    train: Dataset[tuple[Tensor, int]]
    test: Dataset[tuple[Tensor, int]]
    classes: int
    class_names: tuple[str, ...] | None = None


def open_images(
    data: DataSettings, model: ModelSettings, check: FileCheck | None = None, *, train: bool = True
) -> Split:
    """Open the data set `data.source`; without `train`, a folder needs no training images.

    `check` reports on image files. Raises `ImageError` for files that cannot be used, and for a
    data set that does not fit the model.
    """
    if model.channels not in MODES:
        raise ImageError(f"model.channels must be 1 (gray) or 3 (color), got {model.channels}")
    if not len(data.mean) == len(data.std) == model.channels:
        expected = f"a number per channel ({model.channels})"
        raise ImageError(
            f"data.mean and data.std must have {expected}, got {data.mean}, {data.std}"
        )
    open_source = {
        "digits": _digits,
        "fashion-mnist": _fashion_mnist,
        "folder": partial(_folder, train=train, check=check or FileCheck(data)),
    }
    split = open_source[data.source](data, model)
    if split.classes != model.classes:
        expected = f"{split.classes} for {data.source}"
        raise ImageError(f"model.classes must be {expected}, got {model.classes}")
    return split


# A folder of image files


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files with class indices, decoded on access.

    Raises `ImageError` for an unreadable file.
    """

    def __init__(
        self,
        items: Sequence[tuple[Path, int]],
        transform: Callable[[Image.Image], Tensor],
        mode: str,
        settings: DataSettings,
    ) -> None:
        self.items = items
        self.transform = transform
        self.mode = mode
        self.settings = settings

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.items[index]
        return self.transform(read_image(path, self.mode, self.settings)), label


def _folder(data: DataSettings, model: ModelSettings, *, train: bool, check: FileCheck) -> Split:
    expected = (
        "a folder with train/CLASS/* and val/CLASS/*, or with train_list.txt and val_list.txt"
    )
    root, parts = data_folder(data.path, expected), ("train", "val") if train else ("val",)
    ignored = {part: Counter[str]() for part in parts}
    if (root / "val_list.txt").exists():
        indices = [str(index) for index in range(model.classes)]
        classes = find_classes(data.class_names, indices)
        items = {part: _listed_items(root, classes, part) for part in parts}
        names = classes.used(()) if data.class_names else None
    else:
        folders = _class_names(root / "train")
        if not (data.class_names or folders or train):
            folders = _held_out_names(root / "val", model.classes)
        classes = find_classes(data.class_names, folders or _class_names(root / "val"))
        items = {part: _folder_items(root / part, classes, ignored[part]) for part in parts}
        names = classes.used([*_class_names(root / "val"), *folders])
    items = _usable(items, classes.shown(names), ignored, model, check)
    tensor = partial(image_tensor, mean=data.mean, std=data.std)
    crop = augmented = partial(center_crop, size=model.image_size, part=data.center_crop)
    if data.augment:
        augmented = partial(augment, settings=data, size=model.image_size)
    files = partial(ImageFiles, mode=MODES[model.channels], settings=data)
    return Split(
        files(items.get("train", []), lambda image: tensor(augmented(image))),
        files(items["val"], lambda image: tensor(crop(image))),
        len(classes.names),
        names,
    )


def _usable(
    items: dict[str, Items],
    names: Sequence[str],
    ignored: dict[str, Counter[str]],
    model: ModelSettings,
    check: FileCheck,
) -> dict[str, Items]:
    """Return the items of each part without files that are left out, and print their numbers."""
    files = {part: [path for path, _ in labeled] for part, labeled in items.items()}
    kept = check.usable(files, least_side=("model.image_size", model.image_size))
    usable = {part: [items[part][index] for index in kept[part]] for part in items}
    for part, labeled in usable.items():
        before, counts = (Counter(label for _, label in pairs) for pairs in (items[part], labeled))
        if gone := [names[label] for label in before if label not in counts]:
            raise ImageError(f"{part}: no images are left of {', '.join(gone[:8])}")
        classes = describe_counts({name: counts[label] for label, name in enumerate(names)})
        check.say(f"{part}: {len(labeled)} images: {classes}{describe_ignored(ignored[part])}")
    return usable


def _held_out_names(folder: Path, classes: int) -> tuple[str, ...]:
    """Return the names of all classes of a model, if there are held-out images of each."""
    names = _class_names(folder)
    if names and len(names) != classes:
        raise ImageError(
            f"{folder} has {len(names)} classes and the model {classes}, so names are needed: "
            "pass the settings.yaml of the run that trained the model, or data.class_names"
        )
    return names


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(find_images(folder).folders))


def _folder_items(folder: Path, classes: Classes, ignored: Counter[str]) -> Items:
    """Return the images `folder/CLASS/*`, and count what is ignored."""
    part = find_images(folder)
    labels = {name: classes.label(name) for name in part.folders}
    if unknown := sorted(name for name, label in labels.items() if label is None):
        raise ImageError(
            f"{folder} has folders of none of the {len(classes.names)} classes, which are those of "
            f"training images or of data.class_names: {', '.join(unknown[:8])}"
        )
    ignored.update(part.ignored)
    ignored["outside a class"] += len(part.files)
    items: Items = []
    for name, label in sorted(labels.items(), key=itemgetter(1)):
        images = find_images(part.folders[name])
        if not images.files:
            got = describe_ignored(images.ignored).removeprefix("; ") or "an empty folder"
            if images.folders:
                got = f"folders such as {min(images.folders)}, whose images belong one level higher"
            expected = f"{part.folders[name]}/*.jpg (or another type of image)"
            raise ImageError(f"class {name} has no images: expected {expected}, got {got}")
        ignored.update(images.ignored)
        ignored["folder in a class"] += len(images.folders)
        items += [(path, label) for path in images.files]
    if not items:
        raise ImageError(f"{folder} has no images: expected {folder}/CLASS/*.jpg (or .png, …)")
    return items


def _listed_items(root: Path, classes: Classes, part: str) -> Items:
    """Return the images of PaddleViT's list `root/part_list.txt`: PATH CLASS per line.

    CLASS is an index or a name.
    """
    file, items = root / f"{part}_list.txt", []
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        found = (_item(form.fullmatch(line), classes) for form in LINES)
        item = next(filter(None, found), None)
        if item is None:
            last = len(classes.names) - 1
            expected = f"PATH CLASS with a class from 0 to {last}, or a name of data.class_names"
            raise ImageError(f"{file}, line {number}: expected {expected}, got {line[:80]!r}")
        items.append((listed_path(root, item[0]), item[1]))
    if not items:
        raise ImageError(f"{file} is empty: expected a line PATH CLASS per image")
    return items


def _item(match: re.Match[str] | None, classes: Classes) -> tuple[str, int] | None:
    """Return the path and the class of a line; None if it has no class."""
    if match is None:
        return None
    path, name = (text.strip('"') for text in match.groups())
    if name.isascii() and name.isdigit():  # an index, also if it is the name of a class
        return (path, int(name)) if int(name) < len(classes.names) else None
    label = classes.label(composed(name))
    return None if label is None else (path, label)


def augment(image: Image.Image, settings: DataSettings, size: int) -> Image.Image:
    """Crop and flip randomly, then apply RandAugment if it is on."""
    image = random_crop_and_flip(image, size, settings.crop_least)
    if settings.randaugment == 0:
        return image
    return randaugment(image, operations=2, magnitude=settings.randaugment)


def random_crop_and_flip(image: Image.Image, size: int, least: float) -> Image.Image:
    """Resize a random crop of at least `least` of the area to `size`, and flip half of the images.

    Szegedy et al. 2015.
    """
    width, height = image.size
    for _ in range(10):
        area = random.uniform(least, 1) * width * height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if crop_width <= width and crop_height <= height:
            break
    else:
        crop_width = crop_height = min(width, height)
    left, top = random.uniform(0, width - crop_width), random.uniform(0, height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    image = image.resize((size, size), Image.Resampling.BICUBIC, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 1 / 2 else image


def center_crop(image: Image.Image, size: int, part: float) -> Image.Image:
    """Resize the centered square with `part` of the shorter side to `size`."""
    width, height = image.size
    half = min(width, height) * part / 2
    box = (width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half)
    return image.resize((size, size), Image.Resampling.BICUBIC, box)


def image_tensor(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return normalized pixels, float32 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1)
    return normalized(pixels.permute(2, 0, 1) / 255, mean, std).contiguous()


def normalized(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize each channel of [..., channels, height, width]."""
    return (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


# Images in memory


class ImageTensors(Dataset[tuple[Tensor, int]]):
    """Images [samples, channels, size, size] in memory; `transform` changes a batch of them."""

    def __init__(
        self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return the samples of a batch; called by torch's loader."""
        images = self.images[indices]
        if self.transform is not None:
            images = self.transform(images)
        return list(zip(images, self.labels[indices].tolist(), strict=True))


def jitter(
    images: Tensor, *, pixels: float, degrees: float, scale: float, flip: bool = False
) -> Tensor:
    """Shift, rotate and scale a random half of images [batch, channels, size, size].

    The arguments are the largest changes. With `flip`, a random half of all images is mirrored.
    """
    batch, _, size, _ = images.shape
    # Resampling blurs small images. The other half stays sharp, like the images in evaluation.
    chosen = torch.rand(batch, 1) < 1 / 2
    shift, turn, zoom = ((torch.rand(3, batch, 2) * 2 - 1) * chosen).unbind()  # in [-1, 1)
    angle = turn[:, 0] * math.radians(degrees)
    factor = 1 + zoom[:, 0] * scale
    mirror = torch.where(torch.rand(batch) < 1 / 2, -1.0, 1.0) if flip else torch.ones(batch)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    linear = torch.stack([cos * mirror, -sin, sin * mirror, cos], dim=1).view(batch, 2, 2)
    # affine_grid's coordinates are -1 to 1 over an image, so a pixel is 2 / size.
    affine = torch.cat([linear, shift[:, :, None] * (2 * pixels / size)], dim=2)  # [batch, 2, 3]
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _digits(data: DataSettings, model: ModelSettings) -> Split:
    train, test = ((digits.images[:, None], digits.labels) for digits in read_digits())
    transform = partial(jitter, pixels=1, degrees=10, scale=0.1)
    return _in_memory(train, test, data, model, transform)


def _fashion_mnist(data: DataSettings, model: ModelSettings) -> Split:
    root = data_folder(data.path, "the folder of Fashion-MNIST's four .gz files")
    train, test = (
        (
            read_idx(root / f"{part}-images-idx3-ubyte.gz")[:, None] / 255,
            read_idx(root / f"{part}-labels-idx1-ubyte.gz").long(),
        )
        for part in ("train", "t10k")
    )
    transform = partial(jitter, pixels=2, degrees=5, scale=0.1, flip=True)
    return _in_memory(train, test, data, model, transform)


def _in_memory(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    data: DataSettings,
    model: ModelSettings,
    transform: Callable[[Tensor], Tensor],
) -> Split:
    _, channels, size, _ = train[0].shape
    if (model.channels, model.image_size) != (channels, size):
        expected = f"model.channels={channels} and model.image_size={size}"
        got = f"{model.channels} and {model.image_size}"
        raise ImageError(f"{data.source} needs {expected}, got {got}")
    train_images, test_images = (
        normalized(images, data.mean, data.std) for images, _ in (train, test)
    )
    augmented = ImageTensors(train_images, train[1], transform if data.augment else None)
    return Split(augmented, ImageTensors(test_images, test[1]), len(train[1].unique()))


def read_idx(path: Path) -> Tensor:
    """Read a gzipped IDX file of unsigned bytes (http://yann.lecun.com/exdb/mnist)."""
    try:
        content = gzip.decompress(path.read_bytes())
        zeros, kind, dimensions = int.from_bytes(content[:2], "big"), content[2], content[3]
        shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)
        pixels = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError) as error:
        raise ImageError(f"{path} cannot be read as a gzipped IDX file: {error}") from error
    if (zeros, kind) != (0, 8):
        raise ImageError(f"{path}: expected IDX type 8 (unsigned bytes), got {kind}")
    return torch.from_numpy(pixels.copy())
