"""The predictions on held-out images: as a file, and as a picture with boxes and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from faster_coco_eval.core import mask as rle
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw

from recipes.detect.data import CocoImages
from recipes.detect.predict import Predictions
from recipes.pictures import FONT_SIZE, grid

PREDICTIONS_FILE = "predictions.json"
EXAMPLES = 8
COLORS = tuple(
    np.array(ImageColor.getrgb(name))
    for name in ("tomato", "lime", "deepskyblue", "yellow", "magenta", "cyan", "orange", "pink")
)
LEAST_SCORE = 0.5
SIDE = 400  # pixels of the longer side; small images are enlarged by an integer factor
COLUMNS = 4


def write_predictions(directory: Path, predictions: Sequence[Predictions]) -> None:
    """Write the predictions of all images as a COCO result file."""
    content = json.dumps([prediction for of_image in predictions for prediction in of_image])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PREDICTIONS_FILE).write_text(content, encoding="utf-8")


def draw_examples(val: CocoImages, predictions: Sequence[Predictions]) -> NDArray[np.uint8]:
    """Draw the first images of a data set with their predictions."""
    images = [val.read(index) for index in range(min(EXAMPLES, len(val)))]
    return picture(images, predictions[: len(images)], val.names)


def picture(
    images: Sequence[Image.Image], predictions: Sequence[Predictions], names: Mapping[int, str]
) -> NDArray[np.uint8]:
    """Draw images side by side, uint8 [height, width, 3], with the predictions that score well.

    `names` has the names of the categories by id.
    """
    cards = [
        card(image, image_predictions, names)
        for image, image_predictions in zip(images, predictions, strict=True)
    ]
    return grid(cards, min(COLUMNS, len(cards)), -(-len(cards) // COLUMNS))


def card(image: Image.Image, predictions: Predictions, names: Mapping[int, str]) -> Image.Image:
    """Draw an image with tinted masks, boxes, and the predicted classes."""
    confident = [prediction for prediction in predictions if prediction["score"] >= LEAST_SCORE]
    pixels = np.array(image)
    for number, prediction in enumerate(confident):
        if "segmentation" not in prediction:
            continue
        inside = rle.decode(prediction["segmentation"]).astype(bool)
        pixels[inside] = (pixels[inside] + COLORS[number % len(COLORS)]) // 2
    scale = SIDE // max(image.size) or SIDE / max(image.size)
    size = round(image.width * scale), round(image.height * scale)
    made = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(made)
    for number, prediction in enumerate(confident):
        color = tuple(COLORS[number % len(COLORS)].tolist())
        left, top, width, height = (scale * side for side in prediction["bbox"])
        draw.rectangle((left, top, left + width, top + height), outline=color, width=2)
        text = f"{names[prediction['category_id']]} {prediction['score']:.2f}"
        corner = (left + 2, max(0, top - FONT_SIZE - 2))
        draw.rectangle(draw.textbbox(corner, text, font_size=FONT_SIZE), fill=color)
        draw.text(corner, text, fill="black", font_size=FONT_SIZE)
    return made
