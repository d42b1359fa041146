"""Pictures of held-out images that a model misclassifies."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import Subset

import samestep as ss
from recipes.pictures import FONT_SIZE, GAP, grid
from recipes.vit.config import Settings
from recipes.vit.data import Split

MOST_CHECKED = 512  # held-out images, evenly spaced
COLUMNS, ROWS = 8, 2
LEAST_SIDE = 112  # pixels; small images are enlarged by an integer factor


def log_mistakes(run: ss.Run, settings: Settings, model: nn.Module, images: Split) -> None:
    """Record a picture of mistakes among the held-out images, if there are any."""
    step = -(-len(images.test) // MOST_CHECKED)
    checked = Subset(images.test, range(0, len(images.test), step))
    pairs = run.evaluate(
        predictions,
        model,
        checked,
        settings.evaluate_batch_size or settings.batch_size,
        gather=True,
        loader_workers=settings.data.loader_workers,
    )
    if pairs is None:  # only rank 0 gets them
        return
    wrong = [(index, *pair) for index, pair in enumerate(pairs.tolist()) if pair[0] != pair[1]]
    cards = [
        card(checked[index][0], label, predicted, settings)
        for index, label, predicted in wrong[: COLUMNS * ROWS]
    ]
    if cards:
        run.log_image("mistakes", grid(cards, COLUMNS, ROWS))


def predictions(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the class of each image and the predicted class, int64 [batch, 2]."""
    images, labels = batch
    return torch.stack([labels, model(images).argmax(1)], dim=1)


def card(image: Tensor, label: int, predicted: int, settings: Settings) -> Image.Image:
    """Draw a normalized image [channels, size, size] above its class and the predicted class."""
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (settings.data.mean, settings.data.std)
    )
    pixels = (image * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
    side = image.shape[-1] * max(1, LEAST_SIDE // image.shape[-1])
    drawn = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    made = Image.new("RGB", (side, side + GAP + FONT_SIZE), "white")
    made.paste(drawn.resize((side, side), Image.Resampling.NEAREST))
    caption = f"{label}, predicted {predicted}"
    ImageDraw.Draw(made).text((0, side + GAP // 2), caption, fill="black", font_size=FONT_SIZE)
    return made
