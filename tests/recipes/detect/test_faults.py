"""Small annotation files with the faults that users of such programs report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from recipes.detect.coco import AnnotationError, encoded
from recipes.detect.config import DataSettings
from recipes.detect.data import open_images

WIDTH, HEIGHT = 100, 80
BOXES = [[10, 5, 30, 40], [60, 10, 30, 60], [5, 50, 80, 20], [40, 40, 20, 30], [70, 3, 10, 9]]


def mask(left, top, width, height):
    pixels = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    pixels[top : top + height, left : left + width] = 1
    return encoded(pixels)


def entries(boxes, masks=None):
    masks = [mask(*map(int, box)) for box in boxes] if masks is None else masks
    return [
        {"id": 100 + number, "image_id": 1, "category_id": 1, "bbox": box, "segmentation": runs}
        for number, (box, runs) in enumerate(zip(boxes, masks, strict=True))
    ]


def opened(directory, annotations, *, with_masks=True):
    """Return the training images of an annotation file with one image and one class."""
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": WIDTH, "height": HEIGHT}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": annotations,
    }
    for part in ("train", "val"):
        (directory / part).mkdir(exist_ok=True)
        (directory / f"{part}.json").write_text(json.dumps(content))
    settings = DataSettings(path=directory, check="none")  # there are no image files
    return open_images(settings, masks=with_masks)


def learned(images):
    return sum(not entry["left_out"] for entry in images.train.truth.anns.values())


def test_boxes_without_fault_are_counted(tmp_path):
    images = opened(tmp_path, entries(BOXES))
    assert learned(images) == 5
    counts = "1 images, 5 boxes in 1 classes, 0 of the images without boxes"
    assert images.describe() == f"train.json: {counts}\nval.json: {counts}"


def test_the_summary_counts_boxes_by_fault_with_the_first_of_each(tmp_path):
    wrong = [[20, 20, 0, 5], [5, 5, 5, 0], [100, 5, 8, 8], [10, 10, 20, 20], [90, 60, 20, 10]]
    annotations = entries([*BOXES, *wrong], [mask(*box) for box in [*BOXES, *wrong]])
    annotations[8]["segmentation"] = mask(60, 60, 10, 10)
    annotations.append({**annotations[0], "id": 7, "iscrowd": 1})

    images = opened(tmp_path, annotations)

    assert images.train.summary.splitlines() == [
        "train.json: 1 images, 11 boxes in 1 classes, 0 of the images without boxes",
        "  left out: 1 crowds, first annotations[10] (id 7)",
        "  left out: 2 without width or height, first annotations[5] (id 105)",
        "  left out: 1 outside of their image, first annotations[7] (id 107)",
        "  left out: 1 with most of the mask outside of the box, first annotations[8] (id 108)",
        "  1 cut at the border of their image, first annotations[9] (id 109)",
    ]
    assert learned(images) == 6
    assert images.train.describe() == "1 images, 6 objects: thing 6"
    # evaluation uses all but crowds, as COCO's tools do
    assert images.val.summary.splitlines()[1:] == [
        "  ignored: 1 crowds, first annotations[10] (id 7)",
        "  scored: 2 without width or height, first annotations[5] (id 105)",
        "  scored: 1 outside of their image, first annotations[7] (id 107)",
        "  scored: 1 with most of the mask outside of the box, first annotations[8] (id 108)",
        "  scored: 1 cut at the border of their image, first annotations[9] (id 109)",
    ]
    assert images.val.describe() == "1 images, 10 objects: thing 10"


def test_crowds_may_be_text_and_nothing_else(tmp_path):
    annotations = [{**entry, "iscrowd": "0"} for entry in entries(BOXES)]
    assert learned(opened(tmp_path, annotations)) == 5
    annotations[3]["iscrowd"] = "1"
    assert learned(opened(tmp_path, annotations)) == 4
    for value in ("no", 2, [0]):
        annotations[3]["iscrowd"] = value
        with pytest.raises(AnnotationError, match=r"\(id 103\): expected 0 or 1, got iscrowd"):
            opened(tmp_path, annotations)


@pytest.mark.parametrize("with_masks", [True, False])
def test_corners_and_fractions_are_named(with_masks, tmp_path):
    masks = [mask(*box) for box in BOXES]
    corners = [[x, y, x + width, y + height] for x, y, width, height in BOXES]
    fractions = [[x / WIDTH, y / HEIGHT, w / WIDTH, h / HEIGHT] for x, y, w, h in BOXES]
    for boxes, name in (
        (corners, r"corners \[left, top, right, bottom\]"),
        (fractions, "fractions"),
    ):
        with pytest.raises(AnnotationError, match=rf"\(id 100\): bbox \[.*\] looks like {name}"):
            opened(tmp_path, entries(boxes, masks), with_masks=with_masks)


def test_large_boxes_that_could_be_corners_are_not_taken_for_them(tmp_path):
    boxes = [[10, 5, 90, 75], [1, 2, 99, 78], [0, 0, 100, 80], [20, 30, 80, 50], [3, 3, 7, 9]]
    for with_masks in (True, False):
        assert learned(opened(tmp_path, entries(boxes), with_masks=with_masks)) == 5


def test_masks_of_other_boxes_are_an_error(tmp_path):
    masks = [mask(0, 72, 4, 4)] * len(BOXES)
    with pytest.raises(AnnotationError, match=r"masks of 5 of 5 boxes are outside"):
        opened(tmp_path, entries(BOXES, masks))
    assert learned(opened(tmp_path, entries(BOXES, masks), with_masks=False)) == 5


@pytest.mark.parametrize("annotations", [[], [{**entries(BOXES)[0], "iscrowd": 1}]])
def test_training_needs_a_box(annotations, tmp_path):
    images = opened(tmp_path, annotations)
    with pytest.raises(AnnotationError, match=r"train\.json has no box to learn"):
        images.describe()
    assert images._replace(train=None).describe().startswith("val.json: 1 images")
