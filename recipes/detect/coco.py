"""Annotation files in COCO's format (https://cocodataset.org/#format-data), read and checked entry by entry."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from faster_coco_eval.core import mask as rle

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

POLYGON_LEAST = 6  # numbers: three points


class AnnotationError(ValueError):
    """An annotation file cannot be read, or an entry of it makes no sense."""


@dataclass(frozen=True)
class Instance:
    """One annotated object: `box` is x, y, width and height in pixels, `mask` compressed run lengths as COCO writes them."""

    label: int
    box: tuple[float, float, float, float]
    mask: dict[str, Any]
    area: float
    crowd: bool


@dataclass(frozen=True)
class ImageEntry:
    """One image of an annotation file, with the objects in it."""

    number: int
    file_name: str
    width: int
    height: int
    instances: list[Instance] = field(default_factory=list)


@dataclass(frozen=True)
class Annotations:
    """The images of a file in its order; label i is category `categories[i]`, an id with its name, sorted by id."""

    images: list[ImageEntry]
    categories: list[tuple[int, str]]


def read_annotations(path: Path) -> Annotations:
    """Read an annotation file. Raises `AnnotationError` that names the file, the entry, and what was expected."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AnnotationError(f"{path} cannot be read as JSON: {error}") from None
    lists = content if isinstance(content, dict) else {}
    for name in ("images", "annotations", "categories"):
        if not isinstance(lists.get(name), list):
            raise AnnotationError(
                f"{path} has no list {name!r}; expected COCO's format with images, annotations and categories"
            )
    categories = sorted(
        _category(path, number, entry) for number, entry in enumerate(lists["categories"])
    )
    labels = {identity: label for label, (identity, _) in enumerate(categories)}
    _check_unique(path, "categories", [identity for identity, _ in categories])
    images = [_image(path, number, entry) for number, entry in enumerate(lists["images"])]
    _check_unique(path, "images", [image.number for image in images])
    by_number = {image.number: image for image in images}
    for number, entry in enumerate(lists["annotations"]):
        where = _where(path, "annotations", number, entry)
        image = by_number.get(_take(where, entry, "image_id", int))
        if image is None:
            raise AnnotationError(
                f"{where} has image_id {entry['image_id']}; expected the id of one of the {len(images)} images"
            )
        image.instances.append(_instance(where, entry, image, labels))
    return Annotations(images, categories)


def decoded(instance: Instance) -> NDArray[np.uint8]:
    """Return an instance's mask as zeros and ones [height, width]."""
    return np.asarray(rle.decode(instance.mask))


def encoded(mask: NDArray[Any]) -> dict[str, Any]:
    """Return a mask [height, width] as run lengths that can be written as JSON."""
    runs = rle.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def _category(path: Path, number: int, entry: Any) -> tuple[int, str]:
    where = _where(path, "categories", number, entry)
    return _take(where, entry, "id", int), _take(where, entry, "name", str)


def _image(path: Path, number: int, entry: Any) -> ImageEntry:
    where = _where(path, "images", number, entry)
    width, height = (_take(where, entry, side, int) for side in ("width", "height"))
    if width < 1 or height < 1:
        raise AnnotationError(
            f"{where} has width {width} and height {height}; expected at least a pixel"
        )
    return ImageEntry(
        _take(where, entry, "id", int), _take(where, entry, "file_name", str), width, height
    )


def _instance(
    where: str, entry: dict[str, Any], image: ImageEntry, labels: dict[int, int]
) -> Instance:
    category = _take(where, entry, "category_id", int)
    if category not in labels:
        raise AnnotationError(
            f"{where} has category_id {category}; expected one of {sorted(labels)}"
        )
    box = entry.get("bbox")
    if not _are_numbers(box) or len(box) != 4 or min(box[2:]) < 0:
        raise AnnotationError(
            f"{where} has bbox {box!r}; expected x, y, width and height in pixels"
        )
    mask = _runs(where, entry.get("segmentation"), image)
    area = entry.get("area", float(rle.area(mask)))
    if not _are_numbers([area]):
        raise AnnotationError(f"{where} has area {area!r}; expected a number of pixels")
    x, y, width, height = map(float, box)
    return Instance(
        labels[category], (x, y, width, height), mask, float(area), bool(entry.get("iscrowd", 0))
    )


def _runs(where: str, segmentation: Any, image: ImageEntry) -> dict[str, Any]:
    """Return polygons or run lengths as compressed run lengths of the image's size."""
    size = [image.height, image.width]
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if segmentation.get("size") != size:
            raise AnnotationError(
                f"{where} has a mask of size {segmentation.get('size')}; expected {size}, its image's height and width"
            )
        if isinstance(counts, str):
            return {"size": size, "counts": counts.encode()}
        if _are_numbers(counts) and sum(counts) == image.height * image.width:
            return dict(rle.frPyObjects(segmentation, *size))
        raise AnnotationError(
            f"{where} has a mask whose counts do not cover its {size[0]} x {size[1]} pixels"
        )
    if (
        isinstance(segmentation, list)
        and segmentation
        and all(_is_polygon(part) for part in segmentation)
    ):
        return dict(rle.merge(rle.frPyObjects(segmentation, *size)))
    raise AnnotationError(
        f"{where} has no mask that can be read; expected segmentation as polygons of x, y, x, y, … or as run lengths"
    )


def _is_polygon(part: Any) -> bool:
    return _are_numbers(part) and len(part) >= POLYGON_LEAST and len(part) % 2 == 0


def _are_numbers(values: Any) -> bool:
    plain = isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    )
    return plain and all(map(math.isfinite, values))


def _where(path: Path, kind: str, number: int, entry: Any) -> str:
    if not isinstance(entry, dict):
        raise AnnotationError(f"{path}: {kind}[{number}] is {entry!r}; expected an object")
    return f"{path}: {kind}[{number}]" + (f" (id {entry['id']})" if "id" in entry else "")


def _take(where: str, entry: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = entry.get(name)
    if type(value) is not kind:
        raise AnnotationError(
            f"{where} has {name} {value!r}; expected {'a whole number' if kind is int else 'text'}"
        )
    return value


def _check_unique(path: Path, kind: str, numbers: list[int]) -> None:
    if not numbers:
        raise AnnotationError(f"{path} has no {kind}; expected at least one")
    (number, times), *_ = Counter(numbers).most_common(1)
    if times > 1:
        raise AnnotationError(
            f"{path}: {kind} has the id {number} {times} times; expected each once"
        )
