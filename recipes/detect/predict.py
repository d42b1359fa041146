"""Predictions in COCO's result format from the outputs of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from recipes.detect.boxes import non_maximum_suppression
from recipes.detect.coco import encoded
from recipes.detect.config import PredictSettings
from recipes.detect.data import Batch
from recipes.detect.masks import UPSAMPLING, mask_logits
from recipes.detect.model import Detector, Outputs

Predictions = list[dict[str, Any]]  # the entries of an image in a COCO result file, best first


def predict(
    model: Detector, batch: Batch, *, categories: Sequence[int], settings: PredictSettings
) -> list[Predictions]:
    """Return the predictions of each image of a batch, at the image's original size.

    `categories` has the id of each label.
    """
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
    categories: Sequence[int],
    settings: PredictSettings,
) -> Predictions:
    """Return the predictions of one image; a location may predict several classes."""
    entry, (height, width) = batch.entries[image], batch.sizes[image]
    original = entry["height"], entry["width"]
    probabilities = outputs.class_logits[image].float().sigmoid()
    probabilities = probabilities * outputs.centerness[image].float().sigmoid()[:, None]
    scores, order = probabilities.sqrt().flatten().sort(descending=True, stable=True)
    likely = int((scores[: settings.candidates] >= settings.least_score).sum())
    scores, order = scores[:likely], order[:likely]
    locations, labels = order // probabilities.shape[1], order % probabilities.shape[1]
    limits = outputs.points.new_tensor([width, height, width, height])
    boxes = outputs.boxes()[image][locations].clamp(min=0).minimum(limits)
    kept = non_maximum_suppression(boxes, labels, settings.overlap)[: settings.most]
    locations, labels, scores, boxes = locations[kept], labels[kept], scores[kept], boxes[kept]
    boxes = boxes * boxes.new_tensor([original[1] / width, original[0] / height] * 2)
    detections = zip(labels.tolist(), scores.tolist(), boxes.tolist(), strict=True)
    predictions = [
        {
            "image_id": entry["id"],
            "category_id": categories[label],
            "bbox": [left, top, right - left, bottom - top],
            "score": score,
        }
        for label, score, (left, top, right, bottom) in detections
    ]
    if model.has_masks:
        masks = masks_of(model, outputs, image, locations, (height, width), original)
        for prediction, mask in zip(predictions, masks, strict=True):
            prediction["segmentation"] = encoded(mask.cpu().numpy())
    return predictions


def masks_of(
    model: Detector,
    outputs: Outputs,
    image: int,
    locations: Tensor,
    size: tuple[int, int],
    original: tuple[int, int],
) -> Iterator[Tensor]:
    """Yield the mask of each location of an image, bool [original]; `size` is without padding."""
    stride = int(outputs.strides[0])
    logits = mask_logits(
        outputs.mask_features[image].float(),
        stride,
        model.control_head(outputs.features[image][locations]).float(),
        outputs.points[locations],
        outputs.strides[locations],
    )
    for instance_logits in logits:
        yield full_mask(instance_logits, stride // UPSAMPLING, size, original)


def full_mask(
    logits: Tensor, stride: int, size: tuple[int, int], original: tuple[int, int]
) -> Tensor:
    """Return a mask, bool [original], from the logits of a padded image.

    Logits are `stride` pixels apart; `size` is the image's size without padding.
    """
    fine = F.interpolate(
        logits[None, None], scale_factor=stride, mode="bilinear", align_corners=False
    )[..., : size[0], : size[1]]
    if size != original:
        fine = F.interpolate(fine, size=original, mode="bilinear", align_corners=False)
    return fine[0, 0] > 0
