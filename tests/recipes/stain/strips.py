"""Small strips of real tissue, and settings of networks that are small enough for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from skimage.data import immunohistochemistry

import recipes.stain
from recipes.stain.make_data import stains, write_strips

RECIPE = Path(recipes.stain.__file__).parent
SIZE = 16
SMALL = [
    *("epochs=2", "batch_size=7", "lanes=4", "evaluate_every=1", "shown=1"),
    *(
        "model.width=2",
        "model.blocks=1",
        "model.unet_depth=2",
        "model.discriminator_width=2",
        "model.discriminator_layers=1",
    ),
    *("model.dropout=0.5", "data.load_size=16", "data.crop_size=12"),
]


@cache
def tissue():
    """Return IHC, Hematoxylin, DAB and Seg of a part of the image, uint8 [48, 96, 3] each."""
    return [image[200:248, 180:276] for image in stains(immunohistochemistry())]


def make_strips(directory):
    """Write 12 strips to train on and 6 held-out ones; return the setting that names them."""
    write_strips(tissue(), directory, SIZE)
    return f"data.path={directory}"
