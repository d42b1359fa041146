"""From the model's outputs to predictions in COCO's result format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from recipes.detect.boxes import suppressed
from recipes.detect.coco import encoded
from recipes.detect.masks import UPSAMPLING, mask_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recipes.detect.config import PredictSettings
    from recipes.detect.data import Batch
    from recipes.detect.model import Detector, Outputs

# The entries of one image in a COCO result file, the likeliest first.
Predictions = list[dict[str, Any]]


def predict(
    model: Detector,
    batch: Batch,
    *,
    categories: Sequence[tuple[int, str]],
    settings: PredictSettings,
) -> list[Predictions]:
    """Return the predictions of each image of a batch, at the image's own size."""
    outputs = model(batch.images)
    return [
        predictions_of(model, outputs, batch, image, categories, settings)
        for image in range(len(batch.images))
    ]


def predictions_of(
    model: Detector,
    outputs: Outputs,
    batch: Batch,
    image: int,
    categories: Sequence[tuple[int, str]],
    settings: PredictSettings,
) -> Predictions:
    """Return the predictions of one image; a location may predict several classes, with the same box and mask."""
    entry, (height, width) = batch.entries[image], batch.sizes[image]
    chances = (
        outputs.class_logits[image].float().sigmoid()
        * outputs.centerness[image].float().sigmoid()[:, None]
    )
    scores, order = chances.sqrt().flatten().sort(descending=True, stable=True)
    likely = int((scores[: settings.candidates] >= settings.least_score).sum())
    scores, order = scores[:likely], order[:likely]
    locations, labels = order // chances.shape[1], order % chances.shape[1]
    limits = outputs.points.new_tensor([width, height, width, height])
    boxes = outputs.boxes()[image][locations].clamp(min=0).minimum(limits)
    kept = suppressed(boxes, labels, settings.overlap)[: settings.most]
    locations, labels, scores, boxes = locations[kept], labels[kept], scores[kept], boxes[kept]
    boxes = boxes * boxes.new_tensor([entry.width / width, entry.height / height] * 2)
    logits = mask_logits(
        outputs.mask_features[image].float(),
        int(outputs.strides[0]),
        model.control_head(outputs.features[image][locations]).float(),
        outputs.points[locations],
        outputs.strides[locations],
    )
    stride = int(outputs.strides[0]) // UPSAMPLING
    return [
        {
            "image_id": entry.number,
            "category_id": categories[label][0],
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "score": score,
            "segmentation": encoded(
                whole_mask(one, stride, (height, width), (entry.height, entry.width)).cpu().numpy()
            ),
        }
        for label, score, box, one in zip(
            labels.tolist(), scores.tolist(), boxes.tolist(), logits, strict=True
        )
    ]


def whole_mask(
    logits: Tensor, stride: int, size: tuple[int, int], original: tuple[int, int]
) -> Tensor:
    """Return a mask, bool of the `original` size, from logits `stride` pixels apart of a padded image; without padding it has `size`."""
    fine = F.interpolate(
        logits[None, None], scale_factor=stride, mode="bilinear", align_corners=False
    )[..., : size[0], : size[1]]
    if size != original:
        fine = F.interpolate(fine, size=original, mode="bilinear", align_corners=False)
    return fine[0, 0] > 0
