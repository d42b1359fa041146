"""Pictures of held-out images that a model takes for something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Subset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    import samestep as ss
    from recipes.vit.config import Settings
    from recipes.vit.data import Split

LOOKED_AT = 512  # held-out images at most, evenly apart
PICTURED = 16
IN_A_ROW = 8
LEAST_SIDE = 112  # pixels of an image in the picture; small images are enlarged by whole numbers
GAP = 8  # pixels
FONT_SIZE = 14  # pixels


def log_mistakes(run: ss.Run, settings: Settings, model: nn.Module, images: Split) -> None:
    """Draw some mistakes among the held-out images into the record, if there are any."""
    some = Subset(images.test, range(0, len(images.test), -(-len(images.test) // LOOKED_AT)))
    pairs = run.evaluate(
        labels_and_guesses,
        model,
        some,
        settings.batch_size,
        gather=True,
        loader_workers=settings.data.loader_workers,
    )
    if pairs is None:  # gathered on the main worker
        return
    wrong = [
        (index, label, guess)
        for index, (label, guess) in enumerate(pairs.tolist())
        if label != guess
    ][:PICTURED]
    if wrong:
        run.log_image(
            "mistakes",
            picture(
                [card(some[index][0], label, guess, settings) for index, label, guess in wrong]
            ),
        )


def labels_and_guesses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the class of each image, and the one that is most likely to the model: int64 [batch, 2]."""
    images, labels = batch
    return torch.stack([labels, model(images).argmax(1)], dim=1)


def card(image: Tensor, label: int, guess: int, settings: Settings) -> Image.Image:
    """Return an image [channels, size, size], normalised as in training, above what it is and what it was taken for."""
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (settings.data.mean, settings.data.std)
    )
    pixels = (image * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
    side = image.shape[-1] * max(1, LEAST_SIDE // image.shape[-1])
    whole = Image.new("RGB", (side, side + GAP + FONT_SIZE), "white")
    whole.paste(
        Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).resize(
            (side, side), Image.Resampling.NEAREST
        )
    )
    ImageDraw.Draw(whole).text(
        (0, side + GAP // 2), f"{label}, taken for {guess}", fill="black", font_size=FONT_SIZE
    )
    return whole


def picture(cards: Sequence[Image.Image]) -> NDArray[np.uint8]:
    """Return cards of one size in rows, uint8 [height, width, 3]; the picture has the same size for any number of them."""
    width, height = (side + GAP for side in cards[0].size)
    whole = Image.new("RGB", (IN_A_ROW * width - GAP, PICTURED // IN_A_ROW * height - GAP), "white")
    for number, one in enumerate(cards):
        whole.paste(one, (number % IN_A_ROW * width, number // IN_A_ROW * height))
    return np.array(whole)
