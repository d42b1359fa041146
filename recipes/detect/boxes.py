"""Arithmetic of boxes, float [boxes, 4]: left, top, right and bottom in pixels."""

from __future__ import annotations

import torch
from torch import Tensor


def areas(boxes: Tensor) -> Tensor:
    """Return the area of each box, [boxes]."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def overlaps(boxes: Tensor) -> Tensor:
    """Return the intersection over union of each box with each, [boxes, boxes]."""
    shared = areas(
        torch.cat(
            [
                torch.maximum(boxes[:, None, :2], boxes[:, :2]),
                torch.minimum(boxes[:, None, 2:], boxes[:, 2:]),
            ],
            dim=2,
        )
    )
    return shared / (areas(boxes)[:, None] + areas(boxes) - shared).clamp(min=1e-9)


def generalized_iou(left: Tensor, right: Tensor) -> Tensor:
    """Return the generalized intersection over union of boxes by pairs, [pairs], in (-1, 1] (Rezatofighi et al. 2019)."""
    shared = areas(
        torch.cat(
            [torch.maximum(left[:, :2], right[:, :2]), torch.minimum(left[:, 2:], right[:, 2:])],
            dim=1,
        )
    )
    hull = areas(
        torch.cat(
            [torch.minimum(left[:, :2], right[:, :2]), torch.maximum(left[:, 2:], right[:, 2:])],
            dim=1,
        )
    ).clamp(min=1e-6)
    union = areas(left) + areas(right) - shared
    return shared / union.clamp(min=1e-6) - (hull - union) / hull


def suppressed(boxes: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """Return the indices of boxes, given best first, that overlap no better kept box of their label by `overlap` or more."""
    clash = (overlaps(boxes) >= overlap) & (labels[:, None] == labels)
    clash = clash.cpu()  # one look at each box in turn: on a device, each look would wait for it
    keep = torch.ones(len(boxes), dtype=torch.bool)
    for index in range(len(boxes)):
        if keep[index]:
            keep[index + 1 :] &= ~clash[index, index + 1 :]
    return keep.nonzero()[:, 0].to(boxes.device)
