"""Annotation files in COCO's format (https://cocodataset.org/#format-data), checked and indexed."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle
from numpy.typing import NDArray

from recipes.settings import SettingsError

CROWDS: dict[Any, int] = {0: 0, 1: 1, "0": 0, "1": 1, None: 0}  # values of iscrowd; True is 1
LEAST_POLYGON = 6  # numbers: three points
LARGEST_SIDE = 2**16  # pixels of an image; masks of larger ones would need much memory
LARGEST_DIGITS = 8  # characters of a run length after its first, enough for 2**44 pixels
LARGEST_PLACE = 1e6  # of a polygon's corner
LARGEST = 1e15  # of any number; NaN is not less
FIELDS: dict[str, dict[str, type]] = {
    "categories": {"id": int, "name": str},
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "annotations": {"image_id": int, "category_id": int},
}


class AnnotationError(SettingsError):
    """An annotation file cannot be read, or one of its entries is invalid."""


def read_annotations(path: Path, *, masks: bool = True) -> COCO:
    """Read an annotation file and check every entry. Raises `AnnotationError`.

    Masks become compressed run lengths, or are removed without `masks`. An annotation's `entry` is
    its place in the file. Annotations get the ids 1, 2, …, because COCO's evaluation
    treats an object with id 0 as no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, RecursionError, ValueError) as error:
        raise AnnotationError(f"{path} cannot be read as JSON: {error}") from None
    entries = {kind: list(_entries(path, content, kind)) for kind in FIELDS}
    for kind in ("categories", "images"):
        _check_unique(path, kind, [entry["id"] for _, entry in entries[kind]])
    for where, image in entries["images"]:
        if not all(0 < image[side] <= LARGEST_SIDE for side in ("width", "height")):
            size = f"width {image['width']} and height {image['height']}"
            raise AnnotationError(f"{where}: expected 1 to {LARGEST_SIDE} pixels, got {size:.100}")
    images = {image["id"]: image for _, image in entries["images"]}
    categories = sorted(category["id"] for _, category in entries["categories"])
    for number, (where, annotation) in enumerate(entries["annotations"], start=1):
        checked = _checked(where, annotation, images, categories, masks=masks)
        annotation.pop("segmentation", None)
        annotation |= {"id": number, "entry": where.removeprefix(f"{path}: "), **checked}
    return COCO({"info": {}, **content})


def encoded(mask: NDArray[Any]) -> dict[str, Any]:
    """Return a mask [height, width] as run lengths that can be written as JSON."""
    runs = rle.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def _entries(path: Path, content: Any, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = content.get(kind) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise AnnotationError(f"{path}: expected lists {', '.join(FIELDS)}, got no list {kind!r}")
    for number, entry in enumerate(entries):
        where = f"{path}: {kind}[{number}]"
        if not isinstance(entry, dict):
            raise AnnotationError(f"{where}: expected an object, got {entry!r}")
        where += f" (id {entry['id']})" if "id" in entry else ""
        for name, expected in FIELDS[kind].items():
            value = entry.get(name)
            if expected is int and type(value) is float and value.is_integer():
                entry[name] = int(value)  # such as "width": 159.0
            if type(entry.get(name)) is not expected:
                got = f"{expected.__name__} {name}, got {entry.get(name)!r}"
                raise AnnotationError(f"{where}: expected {got}")
        yield where, entry


def _check_unique(path: Path, kind: str, ids: list[int]) -> None:
    if not ids:
        raise AnnotationError(f"{path} has no {kind}: expected at least one")
    ((number, times),) = Counter(ids).most_common(1)
    if times > 1:
        raise AnnotationError(f"{path}: {kind} must have unique ids, got {number} {times} times")


def _checked(
    where: str,
    entry: dict[str, Any],
    images: dict[int, Any],
    categories: list[int],
    *,
    masks: bool,
) -> dict[str, Any]:
    """Return the fields of an annotation that evaluation and training need."""
    image, category, box = images.get(entry["image_id"]), entry["category_id"], entry.get("bbox")
    if image is None:
        ids = f"the id of one of the {len(images)} images"
        raise AnnotationError(f"{where}: expected {ids}, got image_id {entry['image_id']}")
    if category not in categories:
        raise AnnotationError(f"{where}: expected one of {categories}, got category_id {category}")
    if not _are_numbers(box) or len(box) != 4 or min(box[2:]) < 0:
        raise AnnotationError(f"{where}: expected x, y, width and height, got bbox {box!r}")
    crowd = _crowd(entry.get("iscrowd"))
    if crowd is None:
        raise AnnotationError(f"{where}: expected 0 or 1, got iscrowd {entry['iscrowd']!r}")
    if not masks:
        return {"area": _area(where, entry, box[2] * box[3]), "iscrowd": crowd}
    try:
        mask = _runs(where, entry.get("segmentation"), [image["height"], image["width"]])
        pixels = float(rle.area(mask))
    except (RuntimeError, TypeError, ValueError) as error:  # of the library
        if isinstance(error, AnnotationError):
            raise
        raise AnnotationError(f"{where}: expected valid run lengths: {error}") from None
    return {"segmentation": mask, "area": _area(where, entry, pixels), "iscrowd": crowd}


def _crowd(value: Any) -> int | None:
    return CROWDS.get(value) if isinstance(value, (int, float, str, type(None))) else None


def _area(where: str, entry: dict[str, Any], default: float) -> float:
    area = entry.get("area", default)
    if not _are_numbers([area]):
        raise AnnotationError(f"{where}: expected a number of pixels, got area {area!r}")
    return area


def _runs(where: str, segmentation: Any, size: list[int]) -> dict[str, Any]:
    if isinstance(segmentation, dict):
        counts, got = segmentation.get("counts"), segmentation.get("size")
        if got != size:
            raise AnnotationError(f"{where}: expected a mask of the image's size {size}, got {got}")
        if isinstance(counts, str):
            runs = decoded_runs(counts.encode())
            if runs is None or runs.sum() != math.prod(size):
                pixels = f"{math.prod(size)} pixels"
                raise AnnotationError(
                    f"{where}: expected counts of {pixels}, got counts that are cut short or broken"
                )
            return {"size": size, "counts": counts.encode()}
        if _are_numbers(counts) and sum(counts) == math.prod(size):
            return dict(rle.frPyObjects(segmentation, *size))
        raise AnnotationError(f"{where}: expected counts that sum to {math.prod(size)} pixels")
    if isinstance(segmentation, list) and segmentation and all(map(_is_polygon, segmentation)):
        return dict(rle.merge(rle.frPyObjects(segmentation, *size)))
    hint = "" if segmentation else ", got none; model.masks=false learns boxes alone"
    raise AnnotationError(
        f"{where}: expected segmentation as run lengths or as polygons of x, y, x, y, …{hint}"
    )


def decoded_runs(counts: bytes) -> NDArray[np.int64] | None:
    """Return the run lengths of COCO's compressed counts, None if they are broken.

    A number has 5 bits per character, lowest first; 32 marks that more follow, and 16 in the last
    one a negative number. From the fourth on, it is the difference to the number two before it.
    """
    codes = np.frombuffer(counts, dtype=np.uint8).astype(np.int64) - 48
    if not codes.size or codes.min() < 0 or codes.max() >= 64 or codes[-1] & 32:
        return None
    ends = np.flatnonzero(codes & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(codes.size) - np.repeat(starts, ends - starts + 1)
    if places.max() > LARGEST_DIGITS:
        return None
    runs = np.add.reduceat((codes & 31) << (5 * places), starts)
    runs -= np.where(codes[ends] & 16, np.int64(1) << (5 * (ends - starts + 1)), 0)
    runs[1::2], runs[2::2] = runs[1::2].cumsum(), runs[2::2].cumsum()
    return runs if runs.min() >= 0 else None


def _is_polygon(part: Any) -> bool:
    return (
        _are_numbers(part)
        and len(part) >= LEAST_POLYGON
        and len(part) % 2 == 0
        and max(map(abs, part)) <= LARGEST_PLACE
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) in {int, float} and -LARGEST <= value <= LARGEST for value in values
    )
