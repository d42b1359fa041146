"""Events and images that tests add to a run, and a check of the images shown."""

from __future__ import annotations

import time

from PIL import Image

from tests.watch.writing import scalars, write


def append(run, *events):
    write(run, *events, start=time.time(), seconds=0.0)


def losses(*steps):
    return [
        {
            **scalars(step, loss=2.0 / (step + 1)),
            "low": {"loss": 1.9 / (step + 1)},
            "high": {"loss": 2.1 / (step + 1)},
        }
        for step in steps
    ]


def paint(run, step, color, size=(8, 8)):
    """Write an image of one color, and return its event."""
    path = f"images/cells-{step:08d}.png"
    (run / "images").mkdir(exist_ok=True)
    Image.new("RGB", size, color).save(run / path)
    return {
        "event": "image",
        "name": "cells",
        "step": step,
        "path": path,
        "width": size[0],
        "height": size[1],
    }


def shown_color(page, step):
    """Return the color of a step's image on the page."""
    return page.until(
        "const image = document.querySelector('figure img');"
        "if (!image?.complete || !image.naturalWidth) return null;"
        "if (image.alt !== `cells at step ${arguments[0]}`) return null;"
        "const canvas = new OffscreenCanvas(1, 1).getContext('2d');"
        "canvas.drawImage(image, 0, 0, 1, 1);"
        "return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)",
        step,
    )
