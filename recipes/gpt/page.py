"""Texts as a picture, which the page of a run shows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from recipes.pictures import FONT_SIZE, GAP

COLUMNS = 100  # characters
MOST_LINES = 24  # of a text


def picture(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return texts below each other, uint8 [height, width, 3]."""
    shown = "\n\n".join("\n".join(_lines(text)) for text in texts)
    box = ImageDraw.Draw(Image.new("RGB", (1, 1))).multiline_textbbox(
        (GAP, GAP), shown, font_size=FONT_SIZE
    )
    made = Image.new("RGB", (int(box[2]) + GAP, int(box[3]) + GAP), "white")
    ImageDraw.Draw(made).multiline_text((GAP, GAP), shown, fill="black", font_size=FONT_SIZE)
    return np.array(made)


def _lines(text: str) -> list[str]:
    wrapped = [
        part
        for line in text.expandtabs(4).splitlines()
        for part in textwrap.wrap(line, COLUMNS, replace_whitespace=False, drop_whitespace=False)
        or [""]
    ]
    # what the font cannot draw, such as control characters, is shown as a mark
    return [
        "".join(c if c.isprintable() else "\ufffd" for c in line) for line in wrapped[:MOST_LINES]
    ]
