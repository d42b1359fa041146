"""What held-out strips say: scores against the truth, and pictures beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Subset
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.segmentation import DiceScore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torchmetrics import Metric

    import samestep as ss
    from recipes.stain.config import Settings
    from recipes.stain.data import Strips

# of nothing, red, green and blue: background, positive cell, background, negative cell
CLASS_OF = (0, 1, 0, 2)
CLASSES = ("positive", "negative")
COLOURED = 0.5  # of the brightest channel, below which a pixel of Seg is background
GAP = 4  # white pixels between tiles of a sheet


def evaluate(
    run: ss.Run, settings: Settings, generators: nn.Module, strips: Strips
) -> dict[str, float]:
    """Return the scores over all strips, by name.

    `NAME_ssim` is the mean over tiles (Wang et al. 2004), `NAME_psnr` in dB is of the mean squared
    error over all pixels, `dice_positive` and `dice_negative` count the pixels of all strips
    together, `dice` is their mean, and `l1` the smooth L1 distance in [-1, 1].
    """
    found = run.evaluate(
        Scores(settings.modalities),
        generators,
        strips,
        lane_share(run, settings),
        loader_workers=settings.data.loader_workers,
    )
    dice = found.pop("dice")
    return {**found, **dice_scores(dice)}


def dice_scores(dice: Tensor) -> dict[str, float]:
    """Name the scores of classes [classes], NaN for one that is nowhere; `dice` is their mean."""
    by_class = dict(zip((f"dice_{name}" for name in CLASSES), dice.tolist(), strict=True))
    return {**by_class, "dice": dice.nanmean().item()}


def lane_share(run: ss.Run, settings: Settings) -> int:
    """Return how many strips a lane has in a step: so many fit a device."""
    return max(1, settings.batch_size // run.lanes)


def shown(scores: Mapping[str, float]) -> str:
    """Return scores as a person reads them."""
    numbers = {
        name: f"{value:.1f} dB" if name.endswith("psnr") else f"{value:.3f}"
        for name, value in scores.items()
    }
    return "  ".join(f"{name.replace('_', ' ')} {number}" for name, number in numbers.items())


class Scores:
    """Compares what generators make of strips with the truth; a function for `run.evaluate`."""

    def __init__(self, modalities: Sequence[str]) -> None:
        self.modalities = modalities
        self.metrics: dict[str, Metric] = {
            **{
                f"{name}_ssim": StructuralSimilarityIndexMeasure(data_range=1.0)
                for name in modalities
            },
            **{f"{name}_psnr": PeakSignalNoiseRatio(data_range=1.0) for name in modalities},
            "dice": DiceScore(
                len(CLASSES) + 1,
                include_background=False,
                average="none",
                aggregation_level="global",
                input_format="index",
            ),
        }

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
    """Return the class of each pixel [batch, height, width] of Seg [batch, 3, height, width] in [0, 1], by its brightest channel."""
    channels = torch.cat([torch.full_like(seg[:, :1], COLOURED), seg], dim=1)
    return torch.tensor(CLASS_OF, device=seg.device)[channels.argmax(1)]


def pixels(tiles: Tensor) -> Tensor:
    """Return tiles [..., 3, height, width] in [-1, 1] as uint8 [..., height, width, 3]."""
    return brightness(tiles.float()).mul(255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1)


def made_from(generators: nn.Module, strips: Tensor) -> Tensor:
    """Return the modalities and Seg made from IHC, uint8 [batch, modalities + 1, height, width, 3]; a function for `run.evaluate`."""
    return pixels(generators(strips[:, 0]))


def sheet(truth: NDArray[np.uint8], made: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Draw a strip [tiles, height, width, 3] above what was made [tiles - 1, height, width, 3] of its IHC tile, which stays blank there."""
    rows = [truth, np.concatenate([np.full_like(truth[:1], 255), made])]
    # [2, tiles, height, width, 3]
    framed = np.pad(
        np.stack(rows), ((0, 0), (0, 0), (GAP, 0), (GAP, 0), (0, 0)), constant_values=255
    )
    count, tiles, height, width, colours = framed.shape
    return framed.transpose(0, 2, 1, 3, 4).reshape(count * height, tiles * width, colours)


def log_sheets(run: ss.Run, settings: Settings, generators: nn.Module, strips: Strips) -> None:
    """Draw the first held-out strips into the record."""
    some = Subset(strips, range(min(settings.shown, len(strips))))
    if not len(some):
        return
    made = run.evaluate(made_from, generators, some, 1, gather=True)
    # gathered on the main worker, None elsewhere
    for number in range(0 if made is None else len(some)):
        run.log_image(
            f"val-{strips.paths[number].stem}",
            sheet(pixels(strips[number]).numpy(), made[number].numpy()),
        )
