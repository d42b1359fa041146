"""Scores and pictures of held-out strips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset
from torchmetrics import Metric
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.segmentation import DiceScore

import samestep as ss
from recipes.stain.config import Settings
from recipes.stain.data import Strips

CLASS_OF = (0, 1, 0, 2)  # class of black, red (positive), green and blue (negative)
CLASSES = ("positive", "negative")
THRESHOLD = 0.5  # a pixel of Seg with no brighter channel is background
GAP = 4  # white pixels between tiles of a sheet


def evaluate(
    run: ss.Run, settings: Settings, generators: nn.Module, strips: Strips
) -> dict[str, float]:
    """Return the scores over all strips, by name.

    `NAME_ssim` is the mean over tiles (Wang et al. 2004), `NAME_psnr` in dB is that of the mean
    squared error over all pixels, `dice_positive` and `dice_negative` count the pixels of all
    strips, `dice` is their mean, and `l1` is the smooth L1 distance in [-1, 1].
    """
    scores = run.evaluate(
        Scores(settings.modalities),
        generators,
        strips,
        lane_share(run, settings),
        loader_workers=settings.data.loader_workers,
    )
    dice = scores.pop("dice")
    return {**scores, **dice_scores(dice)}


def dice_scores(dice: Tensor) -> dict[str, float]:
    """Name the scores of classes [classes], NaN for an absent one; `dice` is their mean."""
    by_class = dict(zip((f"dice_{name}" for name in CLASSES), dice.tolist(), strict=True))
    return {**by_class, "dice": dice.nanmean().item()}


def lane_share(run: ss.Run, settings: Settings) -> int:
    """Return the number of strips of a lane in a step, which fits a device."""
    return max(1, settings.batch_size // run.lanes)


def shown(scores: Mapping[str, float]) -> str:
    """Format scores for people."""
    numbers = {
        name: f"{value:.1f} dB" if name.endswith("psnr") else f"{value:.3f}"
        for name, value in scores.items()
    }
    return "  ".join(f"{name.replace('_', ' ')} {number}" for name, number in numbers.items())


class Scores:
    """Compares generated tiles with the truth; a function for `run.evaluate`."""

    def __init__(self, modalities: Sequence[str]) -> None:
        self.modalities = modalities
        kinds = {"ssim": StructuralSimilarityIndexMeasure, "psnr": PeakSignalNoiseRatio}
        self.metrics: dict[str, Metric] = {
            f"{name}_{kind}": metric(data_range=1.0)
            for kind, metric in kinds.items()
            for name in modalities
        }
        self.metrics["dice"] = DiceScore(
            len(CLASSES) + 1,
            include_background=False,
            average="none",
            aggregation_level="global",
            input_format="index",
        )

    def __call__(self, generators: nn.Module, strips: Tensor) -> dict[str, Any]:
        """Score strips [batch, tiles, 3, height, width]."""
        made, truth = generators(strips[:, 0]).float(), strips[:, 1:]
        l1 = F.smooth_l1_loss(made, truth)
        made, truth = brightness(made), brightness(truth)
        for metric in self.metrics.values():
            metric.to(strips.device)
        for number, name in enumerate(self.modalities):
            for kind in ("ssim", "psnr"):
                self.metrics[f"{name}_{kind}"].update(made[:, number], truth[:, number])
        self.metrics["dice"].update(classes(made[:, -1]), classes(truth[:, -1]))
        return {"l1": l1, **self.metrics}


def brightness(tiles: Tensor) -> Tensor:
    """Map tiles from [-1, 1] to [0, 1]."""
    return (tiles + 1) / 2


def classes(seg: Tensor) -> Tensor:
    """Return the class of each pixel of Seg [batch, 3, height, width], by its brightest channel."""
    channels = torch.cat([torch.full_like(seg[:, :1], THRESHOLD), seg], dim=1)
    return torch.tensor(CLASS_OF, device=seg.device)[channels.argmax(1)]


def pixels(tiles: Tensor) -> Tensor:
    """Return tiles [..., 3, height, width] in [-1, 1] as uint8 [..., height, width, 3]."""
    return brightness(tiles.float()).mul(255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1)


def made_from(generators: nn.Module, strips: Tensor) -> Tensor:
    """Return the modalities and Seg made from IHC, uint8 [batch, tiles, height, width, 3]."""
    return pixels(generators(strips[:, 0]))


def sheet(truth: NDArray[np.uint8], made: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Draw a strip [tiles, height, width, 3] above the tiles made from its IHC tile.

    An IHC tile alone is drawn beside them.
    """
    if len(truth) == 1:
        rows = [np.concatenate([truth, made])]
    else:
        rows = [truth, np.concatenate([np.full_like(truth[:1], 255), made])]
    padding = ((0, 0), (0, 0), (GAP, 0), (GAP, 0), (0, 0))
    framed = np.pad(np.stack(rows), padding, constant_values=255)  # [rows, tiles, height, width, 3]
    count, tiles, height, width, colors = framed.shape
    return framed.transpose(0, 2, 1, 3, 4).reshape(count * height, tiles * width, colors)


def log_sheets(run: ss.Run, settings: Settings, generators: nn.Module, strips: Strips) -> None:
    """Record pictures of the first held-out strips."""
    subset = Subset(strips, range(min(settings.shown, len(strips))))
    if not len(subset):
        return
    made = run.evaluate(made_from, generators, subset, 1, gather=True)
    if made is None:  # only rank 0 gets them
        return
    for path, strip, tiles in zip(strips.paths, subset, made.numpy(), strict=False):
        run.log_image(f"val-{path.stem}", sheet(pixels(strip).numpy(), tiles))
