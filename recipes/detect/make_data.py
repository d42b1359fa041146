"""Make a detection data set in COCO format from scikit-learn's handwritten digits.

python recipes/detect/make_data.py runs/digits-coco

Digits are enlarged, colored, and drawn over one another on canvases of random shape; about one
canvas in ten is empty. Every fifth digit of each class is used only in val/. The same arguments
always make the same set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.detect.coco import encoded
from recipes.digits import read_digits

EMPTY_ONE_IN = 10
MOST_DIGITS = 6
CANVAS_SIDES = (80, 160)  # pixels
DIGIT_SIDES = (24, 48)
COLORS = 8  # drawn for each digit, which gets the one that differs most from all others
VISIBLE = 0.7  # minimum fraction of each digit that later ones do not cover
TRIES = 20  # to place a digit


@dataclass
class Placed:
    """A digit on a canvas: its class, the pixels that it covers, and its visible pixels."""

    label: int
    covered: NDArray[np.bool_]
    visible: NDArray[np.bool_]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="of the data set")
    parser.add_argument("--train", type=int, default=800, help="training images (default: 800)")
    parser.add_argument("--val", type=int, default=200, help="held-out images (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="for all random draws (default: 0)")
    options = parser.parse_args(arguments)
    if min(options.train, options.val) < 1 or options.seed < 0:
        parser.error("--train and --val must be at least 1, and --seed at least 0")
    parts = zip(("train", "val"), (options.train, options.val), read_digits(), strict=True)
    for number, (part, images, digits) in enumerate(parts):
        draw = np.random.default_rng([options.seed, number])
        write(options.directory, part, images, digits.images.numpy(), digits.labels.numpy(), draw)


def write(
    directory: Path,
    part: str,
    images: int,
    digits: NDArray[Any],
    labels: NDArray[Any],
    draw: np.random.Generator,
) -> None:
    """Write `images` canvases with digits [digits, 8, 8] in [0, 1], and their annotation file."""
    folder = directory / part
    folder.mkdir(parents=True, exist_ok=True)
    entries, annotations = [], []
    for number in range(1, images + 1):
        pixels, placed = canvas(digits, labels, draw)
        name, (height, width, _) = f"{number:06d}.png", pixels.shape
        Image.fromarray(pixels).save(folder / name)
        entries.append({"id": number, "file_name": name, "width": width, "height": height})
        for digit in placed:
            annotations.append(annotation(digit, number, len(annotations) + 1))
    categories = [{"id": label + 1, "name": str(label)} for label in range(10)]
    content = {"images": entries, "annotations": annotations, "categories": categories}
    (directory / f"{part}.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"{directory / part}.json: {images} images, {len(annotations)} digits")


def canvas(
    digits: NDArray[Any], labels: NDArray[Any], draw: np.random.Generator
) -> tuple[NDArray[np.uint8], list[Placed]]:
    """Draw digits on a color gradient, uint8 [height, width, 3]."""
    height, width = draw.integers(*CANVAS_SIDES, size=2, endpoint=True)
    corners = np.clip(draw.uniform(size=3) + draw.uniform(-0.15, 0.15, size=(2, 2, 3)), 0, 1)
    channels = [enlarged(corners[..., channel], (height, width)) for channel in range(3)]
    pixels = np.stack(channels, axis=2)
    placed: list[Placed] = []
    colors = [corners.mean((0, 1))]
    empty = draw.random() < 1 / EMPTY_ONE_IN
    for _ in range(0 if empty else draw.integers(1, MOST_DIGITS, endpoint=True)):
        chosen = draw.integers(len(digits))
        ink = place(digits[chosen], placed, (height, width), draw)
        if ink is None:
            continue
        covered = ink > 1 / 2
        for other in placed:
            other.visible &= ~covered
        placed.append(Placed(int(labels[chosen]), covered, covered.copy()))
        drawn = draw.uniform(size=(COLORS, 3))
        distances = [min(np.linalg.norm(color - other) for other in colors) for color in drawn]
        colors.append(drawn[np.argmax(distances)])
        pixels = pixels + ink[..., None] * (colors[-1] - pixels)
    return (pixels * 255).round().astype(np.uint8), placed


def place(
    digit: NDArray[Any], placed: Sequence[Placed], size: tuple[int, int], draw: np.random.Generator
) -> NDArray[Any] | None:
    """Return the ink per pixel of a canvas, in [0, 1]; None if it would hide other digits."""
    for _ in range(TRIES):
        side = int(draw.integers(*DIGIT_SIDES, endpoint=True))
        top, left = (int(draw.integers(0, room - side, endpoint=True)) for room in size)
        ink = np.zeros(size)
        ink[top : top + side, left : left + side] = enlarged(digit, (side, side))
        free = ink <= 1 / 2
        if all((other.visible & free).sum() >= VISIBLE * other.covered.sum() for other in placed):
            return ink
    return None


def enlarged(values: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize values in [0, 1] smoothly to a height and width."""
    image = Image.fromarray(values.astype(np.float32))
    return np.clip(np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC)), 0, 1)


def annotation(digit: Placed, image: int, number: int) -> dict[str, Any]:
    """Return the entry of a digit: the mask as run lengths, and the box of its visible pixels."""
    rows, columns = (np.flatnonzero(digit.visible.any(axis)) for axis in (1, 0))
    top, left, bottom, right = map(int, (rows[0], columns[0], rows[-1] + 1, columns[-1] + 1))
    return {
        "id": number,
        "image_id": image,
        "category_id": digit.label + 1,
        "bbox": [left, top, right - left, bottom - top],
        "area": int(digit.visible.sum()),
        "segmentation": encoded(digit.visible),
        "iscrowd": 0,
    }


if __name__ == "__main__":
    main()
