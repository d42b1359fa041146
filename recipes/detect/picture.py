"""A picture of images with the boxes and masks that were predicted in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from faster_coco_eval.core import mask as rle
from PIL import Image, ImageColor, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recipes.detect.predict import Predictions

COLOURS = tuple(
    np.array(ImageColor.getrgb(name))
    for name in ("tomato", "lime", "deepskyblue", "yellow", "magenta", "cyan", "orange", "pink")
)
LEAST_SCORE = 0.5
# pixels that the longer side of an image gets in the picture; small images are enlarged by whole
# numbers
SIDE = 400
IN_A_ROW = 4
GAP = 8  # pixels
FONT_SIZE = 14  # pixels


def picture(
    images: Sequence[Image.Image], predictions: Sequence[Predictions], names: dict[int, str]
) -> NDArray[np.uint8]:
    """Return some images beside each other, uint8 [height, width, 3], with what was predicted in each with a fair score."""
    cards = [card(image, some, names) for image, some in zip(images, predictions, strict=True)]
    cell_width, cell_height = (
        max(sides) + GAP for sides in zip(*(one.size for one in cards), strict=True)
    )
    rows = -(-len(cards) // IN_A_ROW)
    whole = Image.new(
        "RGB", (min(IN_A_ROW, len(cards)) * cell_width - GAP, rows * cell_height - GAP), "white"
    )
    for number, one in enumerate(cards):
        whole.paste(one, (number % IN_A_ROW * cell_width, number // IN_A_ROW * cell_height))
    return np.array(whole)


def card(
    image: Image.Image, predictions: Sequence[dict[str, Any]], names: dict[int, str]
) -> Image.Image:
    """Return an image with tinted masks, boxes, and what each is taken for."""
    shown = [prediction for prediction in predictions if prediction["score"] >= LEAST_SCORE]
    pixels = np.array(image)
    for number, prediction in enumerate(shown):
        inside = rle.decode(prediction["segmentation"]).astype(bool)
        pixels[inside] = (pixels[inside] + COLOURS[number % len(COLOURS)]) // 2
    scale = SIDE // max(image.size) or SIDE / max(image.size)
    made = Image.fromarray(pixels)
    made = made.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.NEAREST
    )
    draw = ImageDraw.Draw(made)
    for number, prediction in enumerate(shown):
        colour = tuple(COLOURS[number % len(COLOURS)].tolist())
        left, top, width, height = (scale * side for side in prediction["bbox"])
        draw.rectangle((left, top, left + width, top + height), outline=colour, width=2)
        text = f"{names[prediction['category_id']]} {prediction['score']:.2f}"
        corner = (left + 2, max(0, top - FONT_SIZE - 2))
        draw.rectangle(draw.textbbox(corner, text, font_size=FONT_SIZE), fill=colour)
        draw.text(corner, text, fill="black", font_size=FONT_SIZE)
    return made
