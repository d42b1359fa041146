"""RandAugment (Cubuk et al. 2020, https://arxiv.org/abs/1909.13719)."""

from __future__ import annotations

import random
from collections.abc import Callable

from PIL import Image, ImageEnhance, ImageOps

STRONGEST = 10.0
DEGREES = 30.0
SHEAR = 0.3
SHIFT = 0.45  # as a fraction of a side
Operation = Callable[[Image.Image, float], Image.Image]


def randaugment(image: Image.Image, *, operations: int, magnitude: float) -> Image.Image:
    """Apply `operations` random operations, each of strength `magnitude` from 0 to 10.

    Draws use Python's global generator.
    """
    part = magnitude / STRONGEST
    for operation in random.choices(OPERATIONS, k=operations):
        image = operation(image, part)
    return image


def _signed(value: float) -> float:
    return random.choice((-1, 1)) * value


def _affine(
    image: Image.Image, *, across: float = 0, down: float = 0, right: float = 0, below: float = 0
) -> Image.Image:
    """Shear along x (`across`) or y (`down`), or shift by fractions of the sides."""
    matrix = (1, across, right * image.width, down, 1, below * image.height)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, part: kind(image).enhance(1 + _signed(0.9 * part))


OPERATIONS: tuple[Operation, ...] = (
    lambda image, _: image,
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
    lambda image, part: image.rotate(_signed(DEGREES * part), Image.Resampling.BILINEAR),
    lambda image, part: ImageOps.solarize(image, round(256 * (1 - part))),
    lambda image, part: ImageOps.posterize(image, 8 - round(4 * part)),
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    lambda image, part: _affine(image, across=_signed(SHEAR * part)),
    lambda image, part: _affine(image, down=_signed(SHEAR * part)),
    lambda image, part: _affine(image, right=_signed(SHIFT * part)),
    lambda image, part: _affine(image, below=_signed(SHIFT * part)),
)
