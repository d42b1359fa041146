"""Arithmetic of boxes, float [boxes, 4]: left, top, right and bottom in pixels."""

from __future__ import annotations

import torch
from torch import Tensor


def areas(boxes: Tensor) -> Tensor:
    """Return the area of each box [..., 4]."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def intersections(left: Tensor, right: Tensor) -> Tensor:
    """Return the area that boxes [..., 4] share."""
    corners = [
        torch.maximum(left[..., :2], right[..., :2]),
        torch.minimum(left[..., 2:], right[..., 2:]),
    ]
    return areas(torch.cat(corners, dim=-1))


def overlaps(boxes: Tensor) -> Tensor:
    """Return the intersection over union of all pairs, [boxes, boxes]."""
    shared = intersections(boxes[:, None], boxes)
    return shared / (areas(boxes)[:, None] + areas(boxes) - shared).clamp(min=1e-9)


def generalized_iou(left: Tensor, right: Tensor) -> Tensor:
    """Return the generalized intersection over union of pairs of boxes, [pairs], in (-1, 1].

    Rezatofighi et al. 2019.
    """
    shared = intersections(left, right)
    corners = [torch.minimum(left[:, :2], right[:, :2]), torch.maximum(left[:, 2:], right[:, 2:])]
    hull = areas(torch.cat(corners, dim=1)).clamp(min=1e-6)
    union = areas(left) + areas(right) - shared
    return shared / union.clamp(min=1e-6) - (hull - union) / hull


def non_maximum_suppression(boxes: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """Return the indices of the boxes that overlap no better box of their label too much.

    Boxes are sorted, best first; too much is `overlap` or more with a box that is returned.
    """
    clash = (overlaps(boxes) >= overlap) & (labels[:, None] == labels)
    clash = clash.cpu()  # the loop reads one row at a time, which is slow on a device
    keep = torch.ones(len(boxes), dtype=torch.bool)
    for index in range(len(boxes)):
        if keep[index]:
            keep[index + 1 :] &= ~clash[index, index + 1 :]
    return keep.nonzero()[:, 0].to(boxes.device)
