"""Make strips in DeepLIIF's layout from the immunohistochemistry image of scikit-image.

python recipes/stain/make_data.py data/tissue --size 128

The image, colon in 512 by 512 pixels, is cut into squares that do not overlap. Squares that touch
the bottom quarter go to `val/`, all others to `train/`. Each strip has IHC, Hematoxylin, DAB, Seg:

- Hematoxylin and DAB are the stains, separated by color deconvolution (Ruifrok and Johnston 2001),
  each in its color on white.
- Seg has the nuclei, where Hematoxylin is strong (Otsu's threshold): red in tissue with strong DAB,
  blue elsewhere, with green borders. It is computed and not drawn by a pathologist: finding it
  shows that a network learns, but nothing about tissue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.color import hed2rgb, rgb2hed
from skimage.data import immunohistochemistry
from skimage.filters import gaussian, threshold_otsu
from skimage.segmentation import find_boundaries

NUCLEUS_SIGMA = 1.5  # pixels; a nucleus is about 10 wide
TISSUE_SIGMA = 6.0  # pixels; DAB stains the surroundings of a nucleus
HELD_OUT = 1 / 4  # of the image's height


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the strips."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directory = "for train/*.png and val/*.png; must not have strips yet"
    parser.add_argument("directory", type=Path, metavar="DIR", help=directory)
    size = "height and width of a tile, in pixels (default: 128)"
    parser.add_argument("--size", type=int, default=128, help=size)
    options = parser.parse_args(arguments)
    image = immunohistochemistry()  # uint8 [512, 512, 3]
    largest = int(len(image) * HELD_OUT)
    if not 1 <= options.size <= largest:
        parser.error(f"--size must be 1 to {largest}, got {options.size}")
    if any(options.directory.glob("*/*.png")):
        parser.error(f"{options.directory} has strips already; expected a new folder")
    counts = write_strips(stains(image), options.directory, options.size)
    strips = f"{counts['train']} strips in train/, {counts['val']} in val/"
    print(f"{options.directory}: {strips}; modalities='[hematoxylin, dab]'")


def stains(image: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return IHC, Hematoxylin, DAB and Seg of an image, all uint8 [height, width, 3]."""
    amounts = rgb2hed(image)  # [height, width, 3]: hematoxylin, eosin, DAB
    hematoxylin, dab = (draw_stain(amounts, stain) for stain in (0, 2))
    return [image, hematoxylin, dab, segmented(amounts[..., 0], amounts[..., 2])]


def draw_stain(amounts: NDArray[np.float64], stain: int) -> NDArray[np.uint8]:
    """Draw one stain of [height, width, 3] on white."""
    alone = np.zeros_like(amounts)
    alone[..., stain] = amounts[..., stain]
    return np.round(hed2rgb(alone) * 255).astype(np.uint8)


def segmented(hematoxylin: NDArray[np.float64], dab: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Draw nuclei [height, width, 3] in DeepLIIF's colors: red with strong DAB, else blue."""
    smooth, about = gaussian(hematoxylin, NUCLEUS_SIGMA), gaussian(dab, TISSUE_SIGMA)
    nuclei, positive = smooth > threshold_otsu(smooth), about > threshold_otsu(about)
    border = find_boundaries(nuclei, mode="inner")
    seg = np.zeros((*nuclei.shape, 3), np.uint8)
    for color, pixels in enumerate(
        (nuclei & positive & ~border, border, nuclei & ~positive & ~border)
    ):
        seg[pixels, color] = 255
    return seg


def write_strips(images: Sequence[NDArray[np.uint8]], directory: Path, size: int) -> dict[str, int]:
    """Cut images of one shape into strips; return the number of strips in each part."""
    height, width = images[0].shape[:2]
    counts = {"train": 0, "val": 0}
    for part in counts:
        (directory / part).mkdir(parents=True, exist_ok=True)
    for top in range(0, height - size + 1, size):
        part = "val" if top + size > height * (1 - HELD_OUT) else "train"
        for left in range(0, width - size + 1, size):
            tiles = [image[top : top + size, left : left + size] for image in images]
            strip = Image.fromarray(np.concatenate(tiles, axis=1))
            strip.save(directory / part / f"row{top:03}-column{left:03}.png")
            counts[part] += 1
    return counts


if __name__ == "__main__":
    main()
