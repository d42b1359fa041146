"""Clean data sets of a few small images for each image recipe, and faults that a test gives them.

`train` and `val` have `COUNTS` images: in the folders `cat` and `dog` for ViT, as strips for stain,
and beside `train.json` and `val.json` for detection. A fault is a function of the root.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
from PIL import Image

from tests.recipes.detect.small import SMALL as SMALL_DETECT
from tests.recipes.stain.strips import SMALL as SMALL_STAIN

COUNTS = {"train": 4, "val": 2}
SIZES = {"vit": (10, 8), "stain": (64, 16), "detect": (24, 16)}  # width and height
FIRST = {  # an image of the training part
    "vit": "train/cat/1.png",
    "stain": "train/1.png",
    "detect": "train/1.png",
}
SETTINGS = {
    "vit": [
        *("data.source=folder", "epochs=2", "batch_size=4", "lanes=2", "data.augment=false"),
        *("model.width=8", "model.depth=1", "model.heads=2", "model.image_size=8"),
        *("model.patch_size=4", "model.classes=2"),
    ],
    "stain": [*SMALL_STAIN, "epochs=1", "batch_size=4", "lanes=2"],
    "detect": [
        *(*SMALL_DETECT, "lanes=2", "optimizer.steps=2", "optimizer.decay_steps=[1]"),
        "evaluate_every=2",
    ],
}


def pixels(recipe, seed, channels=3):
    """Return random pixels of a recipe's size, uint8 [height, width, channels]."""
    width, height = SIZES[recipe]
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def save(path, values, **options):
    """Write pixels or an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(path, **options)


def make(recipe, root):
    """Write the clean data set of a recipe."""
    for part, count in COUNTS.items():
        seeds = [10 * count + number for number in range(count)]
        if recipe == "vit":
            for name in ("cat", "dog"):
                for seed in seeds:
                    number = seed - 10 * count
                    seed_of_class = seed + 100 * ord(name[0])
                    save(root / part / name / f"{number}.png", pixels(recipe, seed_of_class))
            continue
        for number, seed in enumerate(seeds):
            save(root / part / f"{number}.png", pixels(recipe, seed))
        if recipe == "detect":
            (root / f"{part}.json").write_text(json.dumps(annotations(count)))


def annotations(count):
    """Return an annotation file of `count` images with two rectangles each."""
    width, height = SIZES["detect"]
    return {
        "images": [
            {"id": 3 + number, "file_name": f"{number}.png", "width": width, "height": height}
            for number in range(count)
        ],
        "annotations": [
            box(3 + number, *corner, 9, 7)
            for number in range(count)
            for corner in ((1, 2), (12, 8))
        ],
        "categories": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}],
    }


def box(image, left, top, width, height, **changes):
    """Return the annotation of a rectangle."""
    right, bottom = left + width, top + height
    return {
        "image_id": image,
        "category_id": 1 + left % 2,
        "bbox": [left, top, width, height],
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
        "iscrowd": 0,
        **changes,
    }


# Faults


def edited(*changes, part="train"):
    """Return a fault that changes the content of an annotation file in place."""

    def fault(root):
        file = root / f"{part}.json"
        content = json.loads(file.read_text())
        for change in changes:
            change(content)
        file.write_text(json.dumps(content))

    return fault


def added(*boxes):
    """Return a change of an annotation file: more boxes."""
    return lambda content: content["annotations"].extend(boxes)


def each_box(**changes):
    """Return a change of an annotation file: of each box, `name=function of the annotation`."""

    def change(content):
        for annotation in content["annotations"]:
            new = {name: value(annotation) for name, value in changes.items()}
            annotation.update(new)

    return change


def without(key):
    """Return a change of an annotation file: no annotation has a key."""
    return lambda content: [annotation.pop(key) for annotation in content["annotations"]]


def written(name, content):
    """Return a fault: a file of text or bytes, or a removed file for None."""

    def fault(root):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")

    return fault


def painted(name, values, **options):
    """Return a fault: an image of pixels [height, width, …]."""
    return lambda root: save(root / name, values, **options)


def moved(old, new):
    """Return a fault: a file or folder with another name, which may be bytes."""

    def fault(root):
        target = root / os.fsdecode(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / old).rename(target)

    return fault


def torn(name, kept=0.6):
    """Return a fault: a file whose end is missing."""

    def fault(root):
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: int(len(content) * kept)])

    return fault


def copied(old, new):
    """Return a fault: another file with the same content."""
    return lambda root: shutil.copy(root / old, root / new)


def converted(folder, ending):
    """Return a fault: the images of a folder are of another type."""

    def fault(root):
        for path in sorted((root / folder).glob("*.png")):
            with Image.open(path) as image:
                image.save(path.with_suffix(ending))
            path.unlink()

    return fault


def removed(*names):
    """Return a fault: files or folders that are missing."""

    def fault(root):
        for name in names:
            shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()

    return fault


def all_of(*faults):
    """Return several faults as one."""

    def fault(root):
        for part in faults:
            part(root)

    return fault
