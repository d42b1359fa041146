"""What each location is to say (FCOS, Tian et al. 2019), and how far the model is from it, as sums over boxes.

Each box weighs the same, whether one location learns it or nine; so the sums are divided by the
number of boxes, once, of the global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from recipes.detect.boxes import areas, generalized_iou
from recipes.detect.masks import UPSAMPLING, mask_logits

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.detect.config import LossSettings
    from recipes.detect.data import Batch
    from recipes.detect.model import Detector, Outputs

BACKGROUND = -1


class Positives(NamedTuple):
    """The locations of one image that learn a box."""

    locations: Tensor  # int64 [positives]
    boxes: Tensor  # int64 [positives]: the box that each learns
    weights: Tensor  # float [positives]: 1 over the number of locations that learn the same box


def detection_loss(
    model: Detector, batch: Batch, *, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of all losses of a lane's images over their boxes, and the sum of each."""
    outputs = model(batch.images)
    sums = dict.fromkeys(("class", "box", "centerness", "mask"), outputs.distances.new_zeros(()))
    for image in range(len(batch.images)):
        for name, value in image_losses(model, outputs, batch, image, settings).items():
            sums[name] = sums[name] + value
    return torch.stack(list(sums.values())).sum(), sums


def image_losses(
    model: Detector, outputs: Outputs, batch: Batch, image: int, settings: LossSettings
) -> dict[str, Tensor]:
    """Return the losses of one image by name, each a sum over its boxes; an image without boxes has only that of classes."""
    boxes, labels = batch.boxes[image], batch.labels[image]
    learnt = assign(outputs.points, outputs.strides, boxes, settings)
    logits = outputs.class_logits[image].float()  # [locations, classes]
    targets = torch.zeros_like(logits)
    positives = positives_of(learnt)
    targets[positives.locations, labels[positives.boxes]] = 1
    # About as many locations learn a box: dividing by them keeps the balance of losses that FCOS
    # has by dividing by positives.
    locations_a_box = (2 * settings.center_radius) ** 2
    losses = {
        "class": focal_loss(logits, targets, settings.focal_alpha, settings.focal_gamma)
        / locations_a_box
    }
    if len(positives.locations) == 0:
        return losses
    goals = boxes[positives.boxes]
    points = outputs.points[positives.locations]
    central = centerness(points, goals)
    losses["box"] = (
        positives.weights
        * (1 - generalized_iou(outputs.boxes()[image][positives.locations], goals))
    ).sum()
    said = outputs.centerness[image][positives.locations].float()
    losses["centerness"] = (
        positives.weights * F.binary_cross_entropy_with_logits(said, central, reduction="none")
    ).sum()
    losses["mask"] = mask_loss(
        model, outputs, batch.masks[image], image, some_of(learnt, settings.mask_locations)
    )
    return losses


def assign(points: Tensor, strides: Tensor, boxes: Tensor, settings: LossSettings) -> Tensor:
    """Return the box that each location learns, int64 [locations]; -1 is background.

    A location learns a box if it lies within `center_radius` strides of the box's centre and inside
    of the box, and the box's farthest side is in the range of the location's level; of several such
    boxes, the smallest.
    """
    if len(boxes) == 0:
        return torch.full_like(strides, BACKGROUND, dtype=torch.int64)
    # [locations, boxes, 4]
    distances = torch.cat([points[:, None] - boxes[:, :2], boxes[:, 2:] - points[:, None]], dim=2)
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    from_center = (points[:, None] - centers).abs().amax(2)  # [locations, boxes]
    farthest = distances.amax(2)
    above = torch.where(strides == strides.min(), 0.0, strides * settings.size_per_stride / 2)[
        :, None
    ]
    below = torch.where(strides == strides.max(), torch.inf, strides * settings.size_per_stride)[
        :, None
    ]
    fits = (
        (distances.amin(2) > 0)
        & (from_center < settings.center_radius * strides[:, None])
        & (farthest > above)
        & (farthest <= below)
    )
    size, box = torch.where(fits, areas(boxes), torch.inf).min(dim=1)
    return torch.where(size.isfinite(), box, BACKGROUND)


def positives_of(learnt: Tensor) -> Positives:
    """Return the locations that learn a box, of [locations] numbers of boxes."""
    locations = (learnt != BACKGROUND).nonzero()[:, 0]
    boxes = learnt[locations]
    return Positives(locations, boxes, 1.0 / boxes.bincount().clamp(min=1)[boxes])


def some_of(learnt: Tensor, most: int) -> Positives:
    """Return at most `most` of the locations that learn each box, drawn at random."""
    locations, boxes, _ = positives_of(learnt)
    drawn = torch.randperm(len(boxes)).to(boxes.device)
    drawn = drawn[boxes[drawn].argsort(stable=True)]  # box by box, in a random order within a box
    first = boxes.bincount().cumsum(0) - boxes.bincount()
    number = torch.arange(len(drawn), device=drawn.device) - first[boxes[drawn]]  # within its box
    kept = torch.full_like(learnt, BACKGROUND)
    chosen = drawn[number < most]
    kept[locations[chosen]] = boxes[chosen]
    return positives_of(kept)


def focal_loss(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """Return the sum of the focal loss (Lin et al. 2017) of logits and targets of one shape."""
    entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    chances = logits.sigmoid()
    missed = chances + targets - 2 * chances * targets  # 1 minus the probability of the truth
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * missed**gamma * entropy).sum()


def centerness(points: Tensor, boxes: Tensor) -> Tensor:
    """Return how central each point lies in its box, [pairs] in [0, 1]: 1 at the centre (Tian et al. 2019, equation 3)."""
    before, behind = points - boxes[:, :2], boxes[:, 2:] - points
    return (
        (torch.minimum(before, behind) / torch.maximum(before, behind)).clamp(min=0).prod(1).sqrt()
    )


def mask_loss(
    model: Detector, outputs: Outputs, masks: Tensor, image: int, positives: Positives
) -> Tensor:
    """Return the dice loss of an image's masks (Milletari et al. 2016, as CondInst has it), summed over its boxes.

    masks  uint8 [boxes, height, width]; the truth is what covers more than half of a cell of the
    predicted masks.
    """
    stride = int(outputs.strides[0])
    where = positives.locations
    controls = model.control_head(outputs.features[image][where]).float()
    predicted = mask_logits(
        outputs.mask_features[image].float(),
        stride,
        controls,
        outputs.points[where],
        outputs.strides[where],
    ).sigmoid()
    # as predicted
    truth = (F.avg_pool2d(masks[None].float(), stride // UPSAMPLING)[0] > 1 / 2).float()[
        positives.boxes
    ]
    shared = (predicted * truth).sum((1, 2))
    squares = (predicted**2).sum((1, 2)) + (truth**2).sum((1, 2))
    return (positives.weights * (1 - 2 * shared / squares.clamp(min=1e-5))).sum()
