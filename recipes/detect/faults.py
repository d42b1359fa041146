"""Boxes that training leaves out, and annotation files whose boxes cannot be right.

Boxes are float64 [boxes, 4]: left, top, width and height in pixels, as in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle
from numpy.typing import NDArray

from recipes.detect.coco import AnnotationError

CROWD, FLAT, OUTSIDE, APART, CUT = (  # boxes that are cut are learned, all others left out
    "crowds",
    "without width or height",
    "outside of their image",
    "with most of the mask outside of the box",
    "cut at the border of their image",
)
TOLERANCE = 1.0  # pixels that boxes may be off because they were rounded
LEAST_BOXES = 4  # fewer may look like corners by chance
BEYOND = 0.25  # boxes whose right or bottom is outside, if corners are read as sizes: about 3/4


def leave_out_faults(truth: COCO, file: Path, *, training: bool) -> str:
    """Mark the annotations that training leaves out (`left_out`), and return a summary.

    It counts images and boxes, and boxes by fault, with the first of each, and says what is done
    with them: evaluation ignores crowds and uses all others, as COCO's tools do. Raises
    `AnnotationError` if the boxes as a whole look like fractions or corners, or if most masks are
    outside of their boxes.
    """
    annotations = truth.dataset["annotations"]
    for annotation in annotations:
        annotation["left_out"] = False
    counts = f"{len(truth.imgs)} images, {len(annotations)} boxes in {len(truth.cats)} classes"
    if not annotations:
        return f"{file.name}: {counts}"
    boxes = np.array([annotation["bbox"] for annotation in annotations], dtype=np.float64)
    sizes = np.array([_size(truth, annotation) for annotation in annotations], dtype=np.float64)
    crowd = np.array([annotation["iscrowd"] for annotation in annotations], dtype=bool)
    mask_boxes = None
    if "segmentation" in annotations[0]:
        encoded = [annotation["segmentation"] for annotation in annotations]
        mask_boxes = np.asarray(rle.toBbox(encoded), dtype=np.float64).reshape(-1, 4)
    faults = _faults(boxes, sizes, crowd, mask_boxes)
    usable = ~crowd & ~faults[FLAT]
    if usable.any():
        _check_whole(file, annotations, boxes, sizes, usable, mask_boxes, faults[APART])
    left_out = np.any([faults[kind] for kind in (CROWD, FLAT, OUTSIDE, APART)], axis=0)
    for annotation, is_left_out in zip(annotations, left_out.tolist(), strict=True):
        annotation["left_out"] = is_left_out
    empty = len(truth.imgs) - len({annotation["image_id"] for annotation in annotations})
    lines = [f"{file.name}: {counts}, {empty} of the images without boxes"]
    for kind, mask in faults.items():
        if mask.any():
            first = annotations[int(mask.argmax())]["entry"]
            used, unused = ("", "left out: ") if training else ("scored: ", "ignored: ")
            done = unused if kind == CROWD or (training and kind != CUT) else used
            lines.append(f"  {done}{mask.sum()} {kind}, first {first}")
    return "\n".join(lines)


def _size(truth: COCO, annotation: dict[str, Any]) -> tuple[int, int]:
    image = truth.imgs[annotation["image_id"]]
    return image["width"], image["height"]


def _faults(
    boxes: NDArray[Any],
    sizes: NDArray[Any],
    crowd: NDArray[Any],
    mask_boxes: NDArray[Any] | None,
) -> dict[str, NDArray[Any]]:
    """Return which boxes have each fault, bool [boxes]; each box has one at most."""
    low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    faults = {
        CROWD: crowd,
        FLAT: (boxes[:, 2:] <= 0).any(1),
        OUTSIDE: ((high <= 0) | (low >= sizes)).any(1),
    }
    apart = np.zeros(len(boxes), dtype=bool)
    if mask_boxes is not None:
        area = mask_boxes[:, 2:].prod(1)
        apart = _shared(mask_boxes, _grown(boxes)) < area / 2
        apart |= area == 0
    faults[APART] = apart
    faults[CUT] = ((low < -TOLERANCE) | (high > sizes + TOLERANCE)).any(1)
    seen = np.zeros(len(boxes), dtype=bool)
    for kind, mask in faults.items():
        faults[kind] = mask & ~seen
        seen |= mask
    return faults


def _check_whole(
    file: Path,
    annotations: Sequence[dict[str, Any]],
    boxes: NDArray[Any],
    sizes: NDArray[Any],
    usable: NDArray[Any],
    mask_boxes: NDArray[Any] | None,
    apart: NDArray[Any],
) -> None:
    """Raise `AnnotationError` if the usable boxes share a mistake."""
    first = annotations[int(usable.argmax())]
    where = f"{file}: {first['entry']}: bbox {first['bbox']}"
    of_all = f"as do the {usable.sum()} boxes of the file"
    expected = "expected [left, top, width, height] in pixels"
    used, used_sizes = boxes[usable], sizes[usable]
    has_fraction = bool((used % 1 != 0).any())
    if has_fraction and (np.abs(used) <= 1).all() and (used_sizes > 2).all():
        raise AnnotationError(
            f"{where} looks like fractions of the image's sides, {of_all}; {expected}"
        )
    corners = np.concatenate([used[:, :2], used[:, 2:] - used[:, :2]], axis=1)
    beyond = (used[:, :2] + used[:, 2:] > used_sizes + TOLERANCE).any(1).mean()
    possible = (corners[:, 2:] > 0).all() and (used[:, 2:] <= used_sizes + TOLERANCE).all()
    looks_so = possible and len(used) >= LEAST_BOXES and beyond >= BEYOND
    if mask_boxes is not None and possible:  # masks know better
        masks = mask_boxes[usable]
        fit, fit_corners = _overlap(masks, used), _overlap(masks, corners)
        looks_so = np.median(fit) < 1 / 2 < np.median(fit_corners)
    if looks_so:
        raise AnnotationError(
            f"{where} looks like corners [left, top, right, bottom], {of_all}; {expected}"
        )
    if apart.sum() > usable.sum() / 2 and usable.sum() >= LEAST_BOXES:
        raise AnnotationError(
            f"{file}: the masks of {apart.sum()} of {usable.sum()} boxes are outside of their box, "
            f"first {annotations[int(apart.argmax())]['entry']}; {expected} around the mask"
        )


def _grown(boxes: NDArray[Any]) -> NDArray[Any]:
    grown = boxes.copy()
    grown[:, :2] -= TOLERANCE
    grown[:, 2:] += 2 * TOLERANCE
    return grown


def _shared(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return the area that pairs of boxes share, [boxes]."""
    low = np.maximum(left[:, :2], right[:, :2])
    high = np.minimum(left[:, :2] + left[:, 2:], right[:, :2] + right[:, 2:])
    return (high - low).clip(min=0).prod(1)


def _overlap(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return the intersection over union of pairs of boxes, [boxes]."""
    shared = _shared(left, right)
    union = left[:, 2:].clip(min=0).prod(1) + right[:, 2:].clip(min=0).prod(1) - shared
    return shared / union.clip(min=1e-9)
