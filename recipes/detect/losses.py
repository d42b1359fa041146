"""The targets of each location (FCOS, Tian et al. 2019), and the losses as sums over boxes.

Each box has the same weight, at any number of locations that learn it; so the sums are divided
once, by the number of boxes in the global batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.detect.boxes import areas, generalized_iou
from recipes.detect.config import LossSettings
from recipes.detect.data import Batch
from recipes.detect.masks import UPSAMPLING, mask_logits
from recipes.detect.model import Detector, Outputs

BACKGROUND = -1


class Positives(NamedTuple):
    """The locations of one image that learn a box."""

    locations: Tensor  # int64 [positives]
    boxes: Tensor  # int64 [positives]: the box of each location
    weights: Tensor  # float [positives]: 1 / number of locations with the same box


def detection_loss(
    model: Detector, batch: Batch, *, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of all losses over the boxes of a lane's images, and the sum of each loss."""
    outputs = model(batch.images)
    names = ("class", "box", "centerness", *["mask"] * model.has_masks)
    sums = dict.fromkeys(names, outputs.distances.new_zeros(()))
    for image in range(len(batch.images)):
        for name, value in image_losses(model, outputs, batch, image, settings).items():
            sums[name] = sums[name] + value
    return torch.stack(list(sums.values())).sum(), sums


def image_losses(
    model: Detector, outputs: Outputs, batch: Batch, image: int, settings: LossSettings
) -> dict[str, Tensor]:
    """Return the losses of one image by name, as sums over its boxes.

    An image without boxes has only the loss of the classes.
    """
    boxes, labels = batch.boxes[image], batch.labels[image]
    assigned = assign(outputs.points, outputs.strides, boxes, settings)
    locations, box_of, weights = positives = positives_of(assigned)
    logits = outputs.class_logits[image].float()  # [locations, classes]
    targets = torch.zeros_like(logits)
    targets[locations, labels[box_of]] = 1
    # FCOS divides by the number of positive locations. About this many learn a box, so dividing by
    # it keeps the balance of the losses.
    locations_per_box = (2 * settings.center_radius) ** 2
    class_loss = focal_loss(logits, targets, settings.focal_alpha, settings.focal_gamma)
    losses = {"class": class_loss / locations_per_box}
    if len(locations) == 0:
        return losses
    target_boxes = boxes[box_of]
    target_centerness = centerness(outputs.points[locations], target_boxes)
    iou = generalized_iou(outputs.boxes()[image][locations], target_boxes)
    losses["box"] = (weights * (1 - iou)).sum()
    entropy = F.binary_cross_entropy_with_logits(
        outputs.centerness[image][locations].float(), target_centerness, reduction="none"
    )
    losses["centerness"] = (positives.weights * entropy).sum()
    if model.has_masks:
        drawn = draw_locations(assigned, settings.mask_locations)
        losses["mask"] = mask_loss(model, outputs, batch.masks[image], image, drawn)
    return losses


def assign(points: Tensor, strides: Tensor, boxes: Tensor, settings: LossSettings) -> Tensor:
    """Return the box that each location learns, int64 [locations]; -1 is background.

    A location learns a box if it is in the box and within `center_radius` strides of its center,
    and if the box's farthest side is in the range of the location's level. If there are several
    such boxes, it learns the smallest.
    """
    if len(boxes) == 0:
        return torch.full_like(strides, BACKGROUND, dtype=torch.int64)
    # [locations, boxes, 4]
    distances = torch.cat([points[:, None] - boxes[:, :2], boxes[:, 2:] - points[:, None]], dim=2)
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    from_center = (points[:, None] - centers).abs().amax(2)  # [locations, boxes]
    farthest = distances.amax(2)
    reach = strides * settings.size_per_stride
    above = torch.where(strides == strides.min(), 0.0, reach / 2)[:, None]
    below = torch.where(strides == strides.max(), torch.inf, reach)[:, None]
    fits = (
        (distances.amin(2) > 0)
        & (from_center < settings.center_radius * strides[:, None])
        & (farthest > above)
        & (farthest <= below)
    )
    size, box = torch.where(fits, areas(boxes), torch.inf).min(dim=1)
    return torch.where(size.isfinite(), box, BACKGROUND)


def positives_of(assigned: Tensor) -> Positives:
    """Return the locations with a box, from the box of each location [locations]."""
    locations = (assigned != BACKGROUND).nonzero()[:, 0]
    boxes = assigned[locations]
    return Positives(locations, boxes, 1.0 / boxes.bincount().clamp(min=1)[boxes])


def draw_locations(assigned: Tensor, limit: int) -> Positives:
    """Draw at most `limit` of the locations of each box."""
    locations, boxes, _ = positives_of(assigned)
    drawn = torch.randperm(len(boxes)).to(boxes.device)
    drawn = drawn[boxes[drawn].argsort(stable=True)]  # box by box, in random order within a box
    first = boxes.bincount().cumsum(0) - boxes.bincount()
    number = torch.arange(len(drawn), device=drawn.device) - first[boxes[drawn]]  # within its box
    kept = torch.full_like(assigned, BACKGROUND)
    chosen = drawn[number < limit]
    kept[locations[chosen]] = boxes[chosen]
    return positives_of(kept)


def focal_loss(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """Return the sum of the focal loss (Lin et al. 2017) of logits and targets of one shape."""
    entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    probabilities = logits.sigmoid()
    missed = probabilities + targets - 2 * probabilities * targets  # 1 - probability of the target
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * missed**gamma * entropy).sum()


def centerness(points: Tensor, boxes: Tensor) -> Tensor:
    """Return how central each point is in its box, [pairs] in [0, 1] (Tian et al. 2019, eq. 3)."""
    before, behind = points - boxes[:, :2], boxes[:, 2:] - points
    ratios = torch.minimum(before, behind) / torch.maximum(before, behind)
    return ratios.clamp(min=0).prod(1).sqrt()


def mask_loss(
    model: Detector, outputs: Outputs, masks: Tensor, image: int, positives: Positives
) -> Tensor:
    """Return the dice loss (Milletari et al. 2016) of an image's masks, summed over its boxes.

    masks  uint8 [boxes, height, width]; a cell of the predicted masks is true if more than half of
    it is covered.
    """
    stride = int(outputs.strides[0])
    locations = positives.locations
    predicted = mask_logits(
        outputs.mask_features[image].float(),
        stride,
        model.control_head(outputs.features[image][locations]).float(),
        outputs.points[locations],
        outputs.strides[locations],
    ).sigmoid()
    covered = F.avg_pool2d(masks[None].float(), stride // UPSAMPLING)[0]
    truth = (covered > 1 / 2).float()[positives.boxes]
    shared = (predicted * truth).sum((1, 2))
    squares = (predicted**2).sum((1, 2)) + (truth**2).sum((1, 2))
    return (positives.weights * (1 - 2 * shared / squares.clamp(min=1e-5))).sum()
