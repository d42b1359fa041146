"""Pictures made of several images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GAP = 8  # pixels
FONT_SIZE = 14  # pixels


def grid(images: Sequence[Image.Image], columns: int, rows: int) -> NDArray[np.uint8]:
    """Return images in rows on white, uint8 [height, width, 3], in cells of the largest size."""
    width, height = (
        max(sides) + GAP for sides in zip(*(image.size for image in images), strict=True)
    )
    sheet = Image.new("RGB", (columns * width - GAP, rows * height - GAP), "white")
    for number, image in enumerate(images):
        sheet.paste(image, (number % columns * width, number // columns * height))
    return np.array(sheet)
