"""Data sets with the faults that people's data has, on one and two workers.

Each is either right, with the results of a clean data set that shows the same, or refused with a
message before the first step.
"""

from __future__ import annotations

import argparse
import re
import unicodedata
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import faster_coco_eval  # noqa: F401  imported once, and not in each worker
import numpy as np
import pytest
import torch
from PIL import Image

from recipes.image_files import TURNS
from recipes.settings import read
from recipes.stain import config as stain
from recipes.vit import config as vit
from recipes.vit.model import VisionTransformer
from samestep.cli import main as samestep
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import events, fingerprint, logged
from tests.recipes.small_data import (
    FIRST,
    SETTINGS,
    added,
    all_of,
    box,
    converted,
    copied,
    each_box,
    edited,
    make,
    moved,
    painted,
    pixels,
    removed,
    save,
    torn,
    without,
    written,
)
from tests.recipes.stain.test_pretrained import write_deepliif
from tests.workers import WorkerFailedError, run_workers

NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


class Case(NamedTuple):
    """A data set with a `fault`.

    It is `refused` with a message that matches, or a run gives the results of the clean data set
    after the change `same_as`. `says` matches the output.
    """

    recipe: str
    fault: Any
    arguments: str = ""
    refused: str = ""
    same_as: Any = None
    says: str = ""


CASES: dict[str, Case] = {}


def case(name, recipe, fault, **more):
    """Add a case; those of every image recipe have its `FIRST` image as their argument."""
    for kind in ("vit", "stain", "detect") if recipe == "all" else (recipe,):
        made = {
            key: value(kind) if recipe == "all" and callable(value) else value
            for key, value in {"fault": fault, **more}.items()
        }
        CASES[f"{name}, {kind}"] = Case(kind, **made)


def corners(bbox):
    left, top, width, height = bbox
    return [left, top, left + width, top + height]


def fewer(root):
    """Remove the second image of detection with its objects."""

    def change(content):
        content["images"] = [image for image in content["images"] if image["id"] != 4]
        left = [entry for entry in content["annotations"] if entry["image_id"] != 4]
        content["annotations"] = left

    edited(change)(root)


# 6. 16 bits


def wide(recipe, bits):
    """Return random gray pixels of so many bits, uint16 [height, width]."""
    shape = pixels(recipe, 5, channels=0).shape
    return np.random.default_rng(6).integers(2**bits, size=shape).astype(np.uint16)


def narrow(values, bits):
    """Return gray pixels of 8 bits."""
    return np.rint(values * (255 / (2**bits - 1))).astype(np.uint8)


for bits, arguments in ((16, ""), (12, "data.bits=12")):
    case(
        f"gray images of {bits} bits",
        "all",
        lambda kind, bits=bits: painted(FIRST[kind], wide(kind, bits)),
        same_as=lambda kind, bits=bits: painted(FIRST[kind], narrow(wide(kind, bits), bits)),
        arguments=arguments,
        says=rf"1 of \d images are 16-bit and divided by {2**bits - 1} \(data.bits={bits}\)",
    )
case(
    "12 bits read as 10",
    "vit",
    painted(FIRST["vit"], wide("vit", 12)),
    arguments="data.check=full data.bits=10",
    refused=r"cat/1\.png .*expected pixels from 0 to 1023 \(data\.bits=10\), got \d+ to \d{4}",
)
case(
    "pixels of floats",
    "vit",
    all_of(painted("train/cat/1.tif", np.zeros((8, 10), np.float32)), removed(FIRST["vit"])),
    refused=r"cat/1\.tif .*its pixels are floats of an unknown range",
)


# 7. Transparency


def colored(recipe, mode):
    """Return pixels with color under transparent ones, as an image of a mode with alpha."""
    alpha = np.where(pixels(recipe, 7, channels=0) < 128, 0, 255).astype(np.uint8)
    values = pixels(recipe, 8, channels=len(mode) - 1)
    return Image.fromarray(np.dstack([values, alpha]), mode)


def on_white(image):
    """Return an image in color without transparency."""
    base = Image.new("RGBA", image.size, "white")
    base.alpha_composite(image.convert("RGBA"))
    return base.convert("RGB")


for mode in ("RGBA", "LA"):
    case(
        f"transparent pixels in {mode}",
        "all",
        lambda kind, mode=mode: painted(FIRST[kind], colored(kind, mode)),
        same_as=lambda kind, mode=mode: painted(FIRST[kind], on_white(colored(kind, mode))),
        says=r"1 of \d images are laid on white, as they have transparency",
    )


# 8. Orientation


def turned(recipe, orientation):
    """Return a fault: an image that is displayed as before, with its pixels in another order."""

    def fault(root):
        path, exif = root / FIRST[recipe], Image.Exif()
        exif[274] = orientation
        back = {6: Image.Transpose.ROTATE_90, 3: Image.Transpose.ROTATE_180}[orientation]
        with Image.open(path) as image:
            stored = image.transpose(back)
            assert np.array_equal(stored.transpose(TURNS[orientation]), image)
        save(path, stored, exif=exif)

    return fault


for orientation in (3, 6):
    case(
        f"orientation {orientation}",
        "all",
        lambda kind, orientation=orientation: turned(kind, orientation),
        says=r"1 of \d images are turned by their EXIF orientation, first: \S+/1\.png\n",
    )
case(
    "boxes in the order of the stored pixels",
    "detect",
    all_of(
        turned("detect", 6),
        edited(lambda content: content["images"][1].update(width=16, height=24)),
    ),
    refused=r"1\.png: expected 16 x 24 pixels as in .*train\.json, got 24 x 16, as its EXIF "
    r"orientation turns it; annotations must be in the coordinates of the image as it is displayed",
)


# 1, 2, 5 and 9. Annotations

case(
    "no annotations",
    "detect",
    removed("train.json"),
    refused=r"train\.json does not exist; expected train\.json and train/, or COCO's",
)
for name, change in {
    "no masks": without("segmentation"),
    "empty masks": each_box(segmentation=lambda _: []),
}.items():
    case(
        name,
        "detect",
        all_of(*(edited(change, part=part) for part in ("train", "val"))),
        arguments="model.masks=false",
    )
    case(
        f"{name}, which are to be learned",
        "detect",
        edited(change),
        refused=r"annotations\[0\]: expected segmentation as .*model\.masks=false learns boxes",
    )
case(
    "no object to evaluate",
    "detect",
    edited(lambda content: content["annotations"].clear(), part="val"),
    same_as=edited(lambda content: content["annotations"].clear(), part="val"),
    says="no AP: the held-out images have no objects",
)
case(
    "no object at all",
    "detect",
    edited(lambda content: content["annotations"].clear()),
    refused=r"train\.json has no box to learn\ntrain\.json: 4 images, 0 boxes in 2 classes",
)
for name, wrong, said in (
    ("zero width", box(3, 2, 2, 0, 5), "1 without width or height"),
    ("outside of the image", box(3, 30, 2, 4, 4), "1 outside of their image"),
    ("crowd", box(3, 2, 2, 5, 5, iscrowd=1), "1 crowds"),
    ("mask elsewhere", box(3, 2, 2, 5, 5, bbox=[12, 9, 5, 5]), "1 with most of the mask outside"),
):
    case(
        f"a box, {name}",
        "detect",
        edited(added(wrong)),
        same_as=None,
        says=rf"  left out: {said}.*, first annotations\[8\]\n",
    )
case(
    "iscrowd as text",
    "detect",
    edited(each_box(iscrowd=lambda _: "0")),
    says=r"train\.json: 4 images, 8 boxes in 2 classes, 0 of the images without boxes\n",
)
case(
    "widths as floats",
    "detect",
    edited(lambda content: [image.update(width=24.0) for image in content["images"]]),
)
case(
    "boxes as corners",
    "detect",
    edited(each_box(bbox=lambda entry: corners(entry["bbox"]))),
    refused=r"annotations\[0\]: bbox \[1, 2, 10, 9\] looks like corners",
)
case(
    "boxes as corners, without masks",
    "detect",
    edited(added(box(4, 9, 7, 14, 8)), each_box(bbox=lambda entry: corners(entry["bbox"]))),
    arguments="model.masks=false",
    refused=r"annotations\[0\]: bbox \[1, 2, 10, 9\] looks like corners",
)
case(
    "boxes as fractions",
    "detect",
    edited(each_box(bbox=lambda entry: [number / 24 for number in entry["bbox"]])),
    refused=r"annotations\[0\]: bbox \[0\.04\d+, .* looks like fractions of the image's sides",
)
case(
    "masks outside of their boxes",
    "detect",
    edited(each_box(bbox=lambda entry: [entry["bbox"][0] + 9.5, 0.5, 2, 1])),
    refused=r"the masks of 8 of 8 boxes are outside of their box, first annotations\[0\]",
)
case(
    "run lengths that are cut short",
    "detect",
    edited(
        lambda content: content["annotations"][2].update(
            segmentation={"size": [16, 24], "counts": "l0j0"}
        )
    ),
    refused=r"annotations\[2\]: expected counts of 384 pixels, got counts that are cut short",
)
case(
    "placeholder strips",
    "stain",
    painted("val/0.png", np.tile(pixels("stain", 1)[:, :16], (1, 4, 1))),
    refused=r"val/0\.png: all tiles are copies of its IHC tile, in 1 of 2 strips",
)

# 10. Types and folders

for ending in (".tif", ".bmp", ".PNG"):
    case(f"all files {ending}", "vit", converted("train/cat", ending))
    case(f"all strips {ending}", "stain", converted("train", ending))
case("one GIF", "vit", converted("val/dog", ".gif"), same_as=converted("val/dog", ".gif"))
case(
    "a class without images",
    "vit",
    written("train/fox/.keep", ""),
    arguments="model.classes=3",
    refused=r"class fox has no images: expected .*/train/fox/\*\.jpg .*, got ignored: 1 hidden",
)
case(
    "a class of unknown files",
    "vit",
    written("train/fox/a.xcf", "no image"),
    arguments="model.classes=3",
    refused=r"class fox has no images: .*, got ignored: 1 \*\.xcf",
)
case(
    "images one level deeper",
    "vit",
    moved("train/dog", "train/dog2/deep"),
    refused=r"class dog2 has no images: .*folders such as deep, whose images belong one level hi",
)
case(
    "a class that is not readable",
    "vit",
    all_of(removed("train/dog"), written("train/dog/a.png", "no image")),
    arguments="data.broken=skip data.broken_limit=0.5",
    refused="train: no images are left of dog",
)
case(
    "no strips",
    "stain",
    all_of(removed("val"), written("val/a.xcf", "")),
    refused=r"val has no strips: expected .*/val/\*\.png \(or .*; ignored: 1 \*\.xcf",
)

# 11. Broken and missing files

for name, content, reason in (
    ("an empty file", b"", "cannot be read as an image"),
    ("a file of text", b"no image", "cannot be read as an image"),
):
    case(
        name,
        "all",
        lambda kind, content=content: written(FIRST[kind], content),
        refused=rf"1\.png {reason}.*; data\.broken=skip trains without",
    )
case(
    "a torn file, all pixels",
    "all",
    lambda kind: torn(FIRST[kind]),
    arguments="data.check=full",
    refused=r"1\.png cannot be read as an image: .*; data\.broken=skip trains without broken files",
)
case(
    "a torn held-out file, all pixels",
    "vit",
    torn("val/dog/1.png"),
    arguments="data.check=full",
    refused=r"val/dog/1\.png cannot be read as an image",
)
case(
    "two torn files, all pixels",
    "vit",
    all_of(torn(FIRST["vit"]), torn("val/dog/1.png")),
    arguments="data.check=full",
    refused=r"2 of 12 image files cannot be used:\n  \S+cat/1\.png .*\n  \S+dog/1\.png .*\n"
    r"recipes/check\.py lists all of them",
)
case(
    "a missing file",
    "detect",
    removed(FIRST["detect"]),
    refused=r"train/1\.png does not exist; data\.broken=skip trains without",
)
case(
    "another size than annotated",
    "detect",
    painted(FIRST["detect"], pixels("vit", 1)),
    refused=r"1\.png: expected 24 x 16 pixels as in \S+train\.json, got 10 x 8",
)
case(
    "a strip of another form",
    "stain",
    painted(FIRST["stain"], pixels("detect", 1)),
    refused=r"1\.png: expected the 4 square tiles IHC, hematoxylin, dab, Seg, got 24 x 16 pixels",
)
SKIP = "data.broken=skip data.broken_limit=0.3"
for name, fault in {
    "torn": lambda kind: torn(FIRST[kind]),
    "no image": lambda kind: written(FIRST[kind], b"no image"),
}.items():
    case(
        f"left out, {name}",
        "all",
        fault,
        same_as=lambda kind: removed(FIRST[kind]) if kind != "detect" else fewer,
        arguments=f"{SKIP} data.check=full",
        says=r"train: left out 1 of \d files, first: \S+/1\.png cannot be read",
    )
case(
    "left out by a list",
    "vit",
    all_of(torn(FIRST["vit"]), written("list.txt", f"\ufeff# torn\r\n{FIRST['vit']}\r\n")),
    same_as=removed(FIRST["vit"]),
    arguments="data.check=full data.leave_out=ROOT/list.txt",
    says="train: data.leave_out lists 1 of 8 files\n",
)
case(
    "left out, beyond the limit",
    "all",
    lambda kind: written(FIRST[kind], b""),
    arguments="data.broken=skip data.broken_limit=0.01",
    refused=r"train: 1 of \d files are broken, more than data\.broken_limit=0\.01 allows, first: ",
)
case(
    "a folder in place of a file",
    "detect",
    all_of(removed(FIRST["detect"]), written(f"{FIRST['detect']}/a", "")),
    arguments=SKIP,
    refused=r"1\.png cannot be read as an image: .*Is a directory",
)

# 12. Names, lists and copies

case(
    "files of macOS",
    "all",
    lambda kind: all_of(
        written(str(Path(FIRST[kind]).with_name("._1.png")), "no image"),
        written("train/.ipynb_checkpoints/a.png", "no image"),
        written("train/__MACOSX/a.png", "no image"),
        written("val/.DS_Store", ""),
    ),
    says=lambda kind: r"train: .*; ignored: .*3 hidden" if kind != "detect" else "",
)
LISTS = {
    part: [
        f"{part}/{name}/{number}.png {label}"
        for label, name in enumerate(("cat", "dog"))
        for number in range(count)
    ]
    for part, count in {"train": 4, "val": 2}.items()
}
FORMS = {
    "plain": "\n".join,
    "BOM, CRLF, tabs and blank lines": lambda lines: (
        "\ufeff\r\n" + "\r\n\r\n".join(line.replace(" ", "\t") for line in lines) + "\r\n"
    ),
    "commas and backslashes": lambda lines: "\n".join(
        line.replace(" ", ",").replace("/", "\\") for line in lines
    ),
}
for name, form in FORMS.items():
    lists = [written(f"{part}_list.txt", form(lines)) for part, lines in LISTS.items()]
    case(f"a list, {name}", "vit", all_of(*lists))
case(
    "a list with a class too many",
    "vit",
    all_of(
        written("train_list.txt", "\n".join([*LISTS["train"], "train/cat/0.png 2"])),
        written("val_list.txt", "\n".join(LISTS["val"])),
    ),
    refused=r"train_list\.txt, line 9: expected PATH CLASS with a class from 0 to 1",
)
case(
    "a list with a missing file",
    "vit",
    all_of(
        written("train_list.txt", "\n".join([*LISTS["train"], "train/cat/9.png 1"])),
        written("val_list.txt", "\n".join(LISTS["val"])),
    ),
    refused=r"train/cat/9\.png does not exist",
)
case(
    "a list that is not UTF-8",
    "vit",
    all_of(written("train_list.txt", b"caf\xe9.png 0\n"), written("val_list.txt", "a 0")),
    refused=r"train_list\.txt cannot be read as UTF-8 text",
)
case(
    "classes in both forms of Unicode",
    "vit",
    all_of(moved("train/cat", f"train/{NFC}"), moved("val/cat", f"val/{NFD}")),
    says=f"train: 8 images: {NFC} 4, dog 4\n",
)
case(
    "a class twice in Unicode",
    "vit",
    all_of(moved("train/cat", f"train/{NFC}"), written(f"train/{NFD}/a.png", "")),
    refused="have the same name in Unicode; merge them",
)
case(
    "annotations with a BOM, names with backslashes and in Unicode",
    "detect",
    all_of(
        edited(lambda content: content["images"][1].update(file_name=f"sub\\{NFD}.png")),
        moved(FIRST["detect"], f"train/sub/{NFC}.png"),
        lambda root: (root / "val.json").write_text(
            (root / "val.json").read_text(), encoding="utf-8-sig"
        ),
    ),
)
case(
    "a class that is not UTF-8",
    "vit",
    moved("train/dog", b"train/d\xf6g"),
    refused=r"train/d\\xf6g: expected a name in UTF-8, of one line; rename the folder",
)
case(
    "a file that is not UTF-8",
    "vit",
    moved(FIRST["vit"], b"train/cat/\xf6.png"),
    refused=r"train/cat/\\xf6\.png: expected a name in UTF-8, of one line; rename the file",
)
case(
    "a file that is not UTF-8, left out",
    "vit",
    moved(FIRST["vit"], b"train/cat/\xf6.png"),
    same_as=removed(FIRST["vit"]),
    arguments=SKIP,
    says=r"left out 1 of 8 files, first: \S+cat/\\xf6\.png: expected a name in UTF-8, of one line",
)
case(
    "copies, all pixels",
    "all",
    lambda kind: copied(FIRST[kind], f"{FIRST[kind][:-5]}0.png"),
    same_as=lambda kind: copied(FIRST[kind], f"{FIRST[kind][:-5]}0.png"),
    arguments="data.check=full",
    says=r"train: files with the content of another: 1, first: \S+/0\.png and \S+/1\.png\n",
)
case(
    "copies between parts, all pixels",
    "vit",
    copied(FIRST["vit"], "val/cat/1.png"),
    same_as=copied(FIRST["vit"], "val/cat/1.png"),
    arguments="data.check=full",
    says=r"train and val: files with the content of another: 1, first: ",
)
case(
    "tiles smaller than their size",
    "stain",
    written("notes", ""),
    same_as=written("notes", ""),
    arguments="data.load_size=20",
    says=r"train: 4 of 4 images are smaller than data\.load_size=20 and enlarged, first: \S+0\.png",
)
case(
    "large images",
    "all",
    lambda _: written("notes", ""),
    arguments="data.most_pixels=60",
    refused=r"it has \d+ x \d+ pixels, more than data\.most_pixels=60; set it to \d+, or cut",
)
case(
    "strips of two types with one name",
    "stain",
    painted("train/1.bmp", pixels("stain", 1)),
    refused=r"train has 2 files 1\.\*: expected different names",
)


# 1 and 3. Weights of other programs and of other models, and rates for another batch size


def saved(name, make_content):
    """Return a fault that is none: weights beside the data."""

    def fault(root):
        torch.manual_seed(0)
        torch.save(make_content(), root / name)

    return fault


def vit_of_timm(classes):
    """Return the content of a file of timm's training script, with the script's arguments."""
    model = VisionTransformer(
        read(vit.Settings, [*SETTINGS["vit"], f"model.classes={classes}"]).model
    )
    return {"state_dict": model.state_dict(), "args": argparse.Namespace(lr=0.1), "epoch": 3}


# the least depth of DeepLIIF's U-Nets, which halve tiles five times
DEEP = "model.unet_depth=5 data.load_size=32 data.crop_size=32"


def deepliif(root):
    words = [*SETTINGS["stain"], "modalities=[a, b]", *DEEP.split()]
    write_deepliif(root, read(stain.Settings, words))


case(
    "weights of timm's script",
    "vit",
    saved("last.pth.tar", lambda: vit_of_timm(3)),
    same_as=saved("last.pth.tar", lambda: vit_of_timm(3)),
    arguments="--pretrained ROOT/last.pth.tar",
    says=r"loaded \S+last\.pth\.tar; head not loaded: it has 2 classes, the file has 3 classes\n",
)
case(
    "scores of a head for other classes",
    "vit",
    saved("last.pth.tar", lambda: vit_of_timm(3)),
    arguments="--eval --pretrained ROOT/last.pth.tar",
    refused=r"head has 2 classes, the file has 3 classes; scores of a head that is not trained",
)
case(
    "networks of DeepLIIF",
    "stain",
    deepliif,
    same_as=deepliif,
    arguments=f"--pretrained ROOT optimizer.reference_batch_size=1 {DEEP}",
    says=r"loaded 5 generators and discriminators of DeepLIIF in (.|\n)*?batch size 4, scaled from",
)
case(
    "a serialized model",
    "stain",
    written("G1.pt", "no zip"),
    arguments="--pretrained ROOT",
    refused=r"must have latest_net_G1\.pth and so on; serialized models \(G1\.pt\) are not read",
)
case(
    "a backbone of another norm",
    "detect",
    saved(
        "r50.pth", lambda: {"layer1.0.conv1.weight": torch.zeros(1), "conv1.weight": torch.zeros(1)}
    ),
    arguments="--pretrained ROOT/r50.pth",
    refused=r"is a ResNet with batch norm, which needs 'model\.norm=frozen' 'data\.mean=",
)


# The runs


def run(case, root, directory, workers):
    """Run the recipe; return what the run left, by name."""
    main = import_module(f"recipes.{case.recipe}.train").main
    arguments = case.arguments.replace("ROOT", str(root)).split()
    words = [*SETTINGS[case.recipe], f"data.path={root}", *arguments]
    words += [] if "--eval" in arguments else ["--dir", str(directory)]
    scores = run_workers(main, workers, words)
    assert all(others == scores[0] for others in scores)
    state = fingerprint(load(list_snapshots(directory)[-1]).state)
    return {**scores[0], **state, **logged(directory)}


IN_CI = {
    "left out, torn, detect",
    "a torn file, all pixels, stain",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_CI)) for name in CASES]
)
def test_a_data_set_is_right_or_refused_before_the_first_step(name, tmp_path, capfd):
    case = CASES[name]
    make(case.recipe, tmp_path / "dirty")
    case.fault(tmp_path / "dirty")
    if case.refused:
        for workers in (1, 2):
            with pytest.raises(WorkerFailedError) as caught:
                run(case, tmp_path / "dirty", tmp_path / str(workers), workers)
            assert re.search(case.refused, str(caught.value.__cause__))
            assert not list_snapshots(tmp_path / str(workers))
            if "--eval" not in case.arguments:
                assert not events(tmp_path / str(workers), "scalars")
        return
    results = [
        run(case, tmp_path / "dirty", tmp_path / str(workers), workers) for workers in (1, 2)
    ]
    assert results[0] == results[1]
    said = capfd.readouterr().out
    assert len(re.findall(case.says, said)) >= 2
    make(case.recipe, tmp_path / "clean")
    if case.same_as is not None:
        case.same_as(tmp_path / "clean")
    arguments = " ".join(word for word in case.arguments.split() if "leave_out" not in word)
    clean = case._replace(arguments=arguments)
    assert run(clean, tmp_path / "clean", tmp_path / "other", 1) == results[0]


@pytest.mark.long
@pytest.mark.parametrize("recipe", SETTINGS)
def test_a_file_that_vanishes_within_an_epoch_is_one_message(recipe, tmp_path, capfd):
    make(recipe, tmp_path)
    script = str(Path(import_module(f"recipes.{recipe}.train").__file__))
    words = [
        *SETTINGS[recipe],
        "batch_size=2",
        f"data.path={tmp_path}",
        "--dir",
        str(tmp_path / "r"),
    ]
    assert samestep(["run", "-n", "2", "--stop-after", "1", script, *words]) == 0
    (fewer if recipe == "detect" else removed(FIRST[recipe]))(tmp_path)
    capfd.readouterr()
    assert samestep(["run", "-n", "2", script, *words]) == 1
    said = capfd.readouterr().err
    assert re.search(r"expected samples=(\d), got samples=\d; .*Restore the old data", said)
    assert "Traceback" not in said
