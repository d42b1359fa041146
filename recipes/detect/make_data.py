"""Make a detection data set in COCO format from scikit-learn's 1,797 handwritten digits, real scans of 8x8 pixels.

python recipes/detect/make_data.py runs/digits-coco

Digits are scaled up, coloured, and laid over one another on canvases of changing shape; about one
canvas in ten stays empty. Every fifth digit of each class is used for val/ only. The same arguments
always make the same set.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.detect.coco import encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HELD_OUT_ONE_IN = 5
EMPTY_ONE_IN = 10
MOST_DIGITS = 6
CANVAS_SIDES = (80, 160)  # pixels
DIGIT_SIDES = (24, 48)
# drawn for each digit, of which it gets the one most unlike the canvas and the digits there
COLOURS = 8
VISIBLE = 0.7  # least part of each digit that no later one covers
TRIES = 20  # to place a digit


@dataclass
class Placed:
    """A digit on a canvas: its class, the pixels that it covers, and those that are still to be seen."""

    label: int
    whole: NDArray[np.bool_]
    seen: NDArray[np.bool_]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the set that `arguments` (default: the process's) say."""
    described = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="gets train.json, val.json, train/*.png and val/*.png",
    )
    described.add_argument(
        "--train", type=int, default=800, help="images to train on (default: 800)"
    )
    described.add_argument("--val", type=int, default=200, help="images held out (default: 200)")
    described.add_argument("--seed", type=int, default=0, help="of all random draws (default: 0)")
    given = described.parse_args(arguments)
    if min(given.train, given.val) < 1 or given.seed < 0:
        described.error("--train and --val must be at least 1, and --seed at least 0")
    digits = load_digits()
    held_out = held_out_fifth(digits.target)
    for number, (part, images, chosen) in enumerate(
        (("train", given.train, ~held_out), ("val", given.val, held_out))
    ):
        draw = np.random.default_rng([given.seed, number])
        write(
            given.directory, part, images, digits.images[chosen] / 16, digits.target[chosen], draw
        )


def held_out_fifth(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark every fifth sample of each class, counted in data set order."""
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held_out[np.flatnonzero(labels == label)[HELD_OUT_ONE_IN - 1 :: HELD_OUT_ONE_IN]] = True
    return held_out


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
        name = f"{number:06d}.png"
        Image.fromarray(pixels).save(folder / name)
        entries.append(
            {"id": number, "file_name": name, "width": pixels.shape[1], "height": pixels.shape[0]}
        )
        annotations += [
            annotation(digit, number, len(annotations) + count)
            for count, digit in enumerate(placed, start=1)
        ]
    categories = [{"id": label + 1, "name": str(label)} for label in range(10)]
    content = {"images": entries, "annotations": annotations, "categories": categories}
    (directory / f"{part}.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"{directory / part}.json: {images} images, {len(annotations)} digits")


def canvas(
    digits: NDArray[Any], labels: NDArray[Any], draw: np.random.Generator
) -> tuple[NDArray[np.uint8], list[Placed]]:
    """Draw a canvas, uint8 [height, width, 3], with some digits on a background that changes colour from corner to corner."""
    height, width = draw.integers(*CANVAS_SIDES, size=2, endpoint=True)
    corners = np.clip(draw.uniform(size=3) + draw.uniform(-0.15, 0.15, size=(2, 2, 3)), 0, 1)
    pixels = np.stack(
        [enlarged(corners[..., channel], (height, width)) for channel in range(3)], axis=2
    )
    placed: list[Placed] = []
    colours = [corners.mean((0, 1))]
    for _ in range(
        0 if draw.random() < 1 / EMPTY_ONE_IN else draw.integers(1, MOST_DIGITS, endpoint=True)
    ):
        chosen = draw.integers(len(digits))
        ink = place(digits[chosen], placed, (height, width), draw)
        if ink is None:
            continue
        whole = ink > 1 / 2
        for other in placed:
            other.seen &= ~whole
        placed.append(Placed(int(labels[chosen]), whole, whole.copy()))
        drawn = draw.uniform(size=(COLOURS, 3))
        colours.append(
            max(drawn, key=lambda colour: min(np.linalg.norm(colour - other) for other in colours))
        )
        pixels = pixels + ink[..., None] * (colours[-1] - pixels)
    return (pixels * 255).round().astype(np.uint8), placed


def place(
    digit: NDArray[Any], placed: Sequence[Placed], size: tuple[int, int], draw: np.random.Generator
) -> NDArray[Any] | None:
    """Return how much ink of a digit each pixel of a canvas gets, in [0, 1]; None where it would hide too much of another."""
    for _ in range(TRIES):
        side = int(draw.integers(*DIGIT_SIDES, endpoint=True))
        top, left = (int(draw.integers(0, room - side, endpoint=True)) for room in size)
        ink = np.zeros(size)
        ink[top : top + side, left : left + side] = enlarged(digit, (side, side))
        if all(
            (other.seen & (ink <= 1 / 2)).sum() >= VISIBLE * other.whole.sum() for other in placed
        ):
            return ink
    return None


def enlarged(values: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize values in [0, 1] to height and width, smoothly."""
    image = Image.fromarray(values.astype(np.float32))
    return np.clip(np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC)), 0, 1)


def annotation(digit: Placed, image: int, number: int) -> dict[str, Any]:
    """Return the entry of a digit: its mask as run lengths, and the box around what is to be seen of it."""
    rows, columns = (np.flatnonzero(digit.seen.any(axis)) for axis in (1, 0))
    top, left, bottom, right = (
        int(side) for side in (rows[0], columns[0], rows[-1] + 1, columns[-1] + 1)
    )
    return {
        "id": number,
        "image_id": image,
        "category_id": digit.label + 1,
        "bbox": [left, top, right - left, bottom - top],
        "area": int(digit.seen.sum()),
        "segmentation": encoded(digit.seen),
        "iscrowd": 0,
    }


if __name__ == "__main__":
    main()
