"""Make a set of strips in DeepLIIF's layout from real tissue: the immunohistochemistry image that comes with scikit-image.

python recipes/stain/make_data.py data/tissue --size 128

The image, colon in 512 by 512 pixels, is cut into squares that do not overlap. Those that touch the
lowest quarter are for `val/`, all others for `train/`. Each strip holds IHC, Hematoxylin, DAB and
Seg:

- Hematoxylin and DAB are the stains, taken apart by colour deconvolution (Ruifrok and Johnston
  2001), each in its own colour on white.
- Seg is where Hematoxylin is strong (Otsu's threshold): nuclei, red in tissue that is strong in
  DAB, blue elsewhere, with green borders.
  It was computed, not drawn by a pathologist: a network that finds it shows that it learns, and
  nothing about tissue.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from skimage.color import hed2rgb, rgb2hed
from skimage.data import immunohistochemistry
from skimage.filters import gaussian, threshold_otsu
from skimage.segmentation import find_boundaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NUCLEUS_SIGMA = 1.5  # pixels: less than a nucleus, which is about 10 wide
TISSUE_SIGMA = 6.0  # pixels: around a nucleus, since DAB stains what lies about it
HELD_OUT = 1 / 4  # of the image's height


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the strips to where `arguments` (default: the process's) say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="becomes DIR/train/*.png and DIR/val/*.png; must not have strips yet",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=128,
        metavar="PIXELS",
        help="height and width of a tile (default: 128)",
    )
    given = parser.parse_args(arguments)
    image = immunohistochemistry()  # uint8 [512, 512, 3]
    if not 1 <= given.size <= int(len(image) * HELD_OUT):
        parser.error(f"--size {given.size} was given; expected 1 to {int(len(image) * HELD_OUT)}")
    if any(given.directory.glob("*/*.png")):
        parser.error(
            f"{given.directory} has strips already; expected a new folder, or none of them"
        )
    counts = write_strips(stains(image), given.directory, given.size)
    print(
        f"{given.directory}: {counts['train']} strips in train/, {counts['val']} in val/; modalities='[hematoxylin, dab]'"
    )


def stains(image: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return IHC, Hematoxylin, DAB and Seg of an image uint8 [height, width, 3], each of the same shape."""
    amounts = rgb2hed(image)  # [height, width, 3]: hematoxylin, eosin, DAB
    return [
        image,
        *(in_own_colour(amounts, stain) for stain in (0, 2)),
        segmented(amounts[..., 0], amounts[..., 2]),
    ]


def in_own_colour(amounts: NDArray[np.float64], stain: int) -> NDArray[np.uint8]:
    """Draw one stain of [height, width, 3] alone."""
    alone = np.zeros_like(amounts)
    alone[..., stain] = amounts[..., stain]
    return np.round(hed2rgb(alone) * 255).astype(np.uint8)


def segmented(hematoxylin: NDArray[np.float64], dab: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Draw nuclei [height, width, 3] in DeepLIIF's colours: red where DAB is strong about them, blue elsewhere, green borders."""
    smooth, about = gaussian(hematoxylin, NUCLEUS_SIGMA), gaussian(dab, TISSUE_SIGMA)
    nuclei, positive = smooth > threshold_otsu(smooth), about > threshold_otsu(about)
    border = find_boundaries(nuclei, mode="inner")
    seg = np.zeros((*nuclei.shape, 3), np.uint8)
    for colour, where in enumerate(
        (nuclei & positive & ~border, border, nuclei & ~positive & ~border)
    ):
        seg[where, colour] = 255
    return seg


def write_strips(images: Sequence[NDArray[np.uint8]], directory: Path, size: int) -> dict[str, int]:
    """Cut images of one shape into strips; return how many there are in each part."""
    height, width = images[0].shape[:2]
    counts = {"train": 0, "val": 0}
    for part in counts:
        (directory / part).mkdir(parents=True, exist_ok=True)
    for top in range(0, height - size + 1, size):
        part = "val" if top + size > height * (1 - HELD_OUT) else "train"
        for left in range(0, width - size + 1, size):
            strip = np.concatenate(
                [image[top : top + size, left : left + size] for image in images], axis=1
            )
            Image.fromarray(strip).save(directory / part / f"row{top:03}-column{left:03}.png")
            counts[part] += 1
    return counts


if __name__ == "__main__":
    main()
