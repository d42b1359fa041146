from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as rle
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from recipes.detect import make_data
from recipes.detect.coco import AnnotationError, decoded_runs, encoded, read_annotations
from recipes.detect.config import DataSettings
from recipes.detect.data import boxes_in, collate, new_size, open_images
from recipes.file_check import FileCheck
from recipes.image_files import ImageError
from recipes.settings import SettingsError

SQUARE = [2, 1, 6, 1, 6, 4, 2, 4]  # x from 2 to 6, y from 1 to 4


def entry(**changes):
    return {
        "id": 1,
        "image_id": 7,
        "category_id": 3,
        "bbox": [2, 1, 4, 3],
        "segmentation": [SQUARE],
        "area": 12,
        "iscrowd": 0,
        **changes,
    }


def write(directory, *annotations, part="train", **lists):
    """Write an annotation file of one image of 10 x 8 pixels, and the image."""
    image = {"id": 7, "file_name": "a.png", "width": 10, "height": 8}
    categories = [{"id": 3, "name": "square"}, {"id": 1, "name": "round"}]
    (directory / part).mkdir(parents=True, exist_ok=True)
    pixels = np.arange(240, dtype=np.uint8).reshape(8, 10, 3)
    Image.fromarray(pixels).save(directory / part / "a.png")
    file = directory / f"{part}.json"
    file.write_text(
        json.dumps(
            {"images": [image], "annotations": list(annotations), "categories": categories} | lists
        )
    )
    return file


def settings(directory, **changes):
    return DataSettings(path=directory, flip=0.0, mean=(0, 0, 0), std=(1, 1, 1), **changes)


def open_one(directory, *annotations, **changes):
    write(directory, *annotations)
    write(directory, part="val")
    return open_images(settings(directory, **changes)).train


# Annotation files


def test_polygons_and_both_kinds_of_run_lengths_give_the_same_mask(tmp_path):
    square = np.zeros((8, 10), dtype=np.uint8)
    square[1:4, 2:6] = 1
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[2], square.T.ravel(), [2]])))).tolist()
    kinds = ([SQUARE], {"size": [8, 10], "counts": runs}, encoded(square))
    file = write(tmp_path, *(entry(segmentation=kind) for kind in kinds))

    truth = read_annotations(file)

    assert list(truth.anns) == [1, 2, 3]
    assert all(
        np.array_equal(truth.annToMask(annotation), square) for annotation in truth.anns.values()
    )
    assert [annotation["area"] for annotation in truth.imgToAnns[7]] == [12] * 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"image_id": 8},
            "annotations[1] (id 1): expected the id of one of the 1 images, got image_id 8",
        ),
        ({"image_id": "7"}, "annotations[1] (id 1): expected int image_id, got '7'"),
        ({"category_id": 2}, "annotations[1] (id 1): expected one of [1, 3], got category_id 2"),
        ({"bbox": [1, 2, 3]}, "expected x, y, width and height, got bbox [1, 2, 3]"),
        ({"bbox": [1, 2, -3, 4]}, "got bbox [1, 2, -3, 4]"),
        ({"bbox": [1, 2, float("nan"), 4]}, "got bbox [1, 2, nan, 4]"),
        ({"bbox": None}, "got bbox None"),
        ({"area": "large"}, "got area 'large'"),
        ({"segmentation": None}, "expected segmentation as run lengths or as polygons"),
        ({"segmentation": []}, "expected segmentation as run lengths or as polygons"),
        ({"segmentation": [[1, 2, 3, 4]]}, "expected segmentation as run lengths or as polygons"),
        (
            {"segmentation": [[1, 2, 3, 4, 5, 6, 7]]},
            "expected segmentation as run lengths or as polygons",
        ),
        (
            {"segmentation": {"size": [10, 8], "counts": [80]}},
            "expected a mask of the image's size [8, 10], got [10, 8]",
        ),
        (
            {"segmentation": {"size": [8, 10], "counts": [79]}},
            "expected counts that sum to 80 pixels",
        ),
        (
            {"segmentation": {"size": [8, 10], "counts": "012"}},
            "expected counts of 80 pixels, got counts that are cut short or broken",
        ),
    ],
)
def test_a_wrong_annotation_is_named_with_its_file(change, expected, tmp_path):
    file = write(tmp_path, entry(), entry(**change))
    with pytest.raises(AnnotationError) as caught:
        read_annotations(file)
    assert str(caught.value).startswith(f"{file}: annotations[1]")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"images": {}}, "got no list 'images'"),
        ({"categories": []}, "has no categories"),
        ({"annotations": [3]}, "annotations[0]: expected an object, got 3"),
        ({"categories": [{"id": 3}]}, "categories[0] (id 3): expected str name, got None"),
        (
            {"categories": [{"id": 3, "name": "a"}, {"id": 3, "name": "b"}]},
            "categories must have unique ids, got 3 2 times",
        ),
        (
            {"images": [{"id": 1, "file_name": "a.png", "width": 0, "height": 8}]},
            "images[0] (id 1): expected 1 to 65536 pixels, got width 0 and height 8",
        ),
        (
            {"images": [{"file_name": "a.png", "width": 1, "height": 8}]},
            "images[0]: expected int id, got None",
        ),
    ],
)
def test_a_wrong_list_is_named_with_its_file(lists, expected, tmp_path):
    file = write(tmp_path, **lists)
    with pytest.raises(AnnotationError) as caught:
        read_annotations(file)
    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_file_that_is_not_an_annotation_file_is_named(content, tmp_path):
    file = tmp_path / "train.json"
    file.write_text(content, encoding="latin1")
    with pytest.raises(AnnotationError, match=str(file)):
        read_annotations(file)


@given(
    pixels=st.integers(1, 9).flatmap(
        lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1)
    )
)
def test_compressed_run_lengths_that_are_cut_short_are_found(pixels):
    mask = np.array(pixels, dtype=np.uint8)
    counts = encoded(mask)["counts"].encode()
    runs = decoded_runs(counts)
    values = np.arange(len(runs)) % 2
    assert np.array_equal(np.repeat(values, runs), mask.T.ravel())
    for length in range(len(counts)):
        runs = decoded_runs(counts[:length])
        assert runs is None or runs.sum() < mask.size


def test_annotations_of_windows_and_macos_are_read(tmp_path):
    image = {"id": 7, "file_name": "sub\\e\u0301.png", "width": 10.0, "height": 8.0}
    file = write(tmp_path, images=[image])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    (tmp_path / "train" / "sub").mkdir()
    (tmp_path / "train" / "a.png").rename(tmp_path / "train" / "sub" / "\u00e9.png")
    write(tmp_path, part="val")
    assert open_images(settings(tmp_path)).train[0].image.shape == (3, 8, 10)


# Samples


def test_boxes_are_cut_to_the_image_and_crowds_left_out(tmp_path):
    images = open_one(
        tmp_path,
        entry(bbox=[-3, 2, 20, 99]),
        entry(iscrowd=1),
        entry(bbox=[4, 4, 0, 2]),
        entry(bbox=[10, 0, 3, 3]),
    )
    sample = images[0]
    assert sample.boxes.tolist() == [[0, 2, 10, 8]]
    assert sample.labels.tolist() == [1]
    assert sample.masks.shape == (1, 8, 10)
    torch.testing.assert_close(
        sample.image, torch.arange(240).view(8, 10, 3).permute(2, 0, 1) / 255
    )


def test_an_image_without_objects_is_a_sample(tmp_path):
    sample = open_one(tmp_path)[0]
    assert (sample.boxes.shape, sample.labels.shape, sample.masks.shape) == (
        (0, 4),
        (0,),
        (0, 8, 10),
    )


def test_resizing_and_mirroring_keep_boxes_around_masks(tmp_path):
    images = open_one(tmp_path, entry(), short_sides=(16, 32))
    images.settings = settings(tmp_path, short_sides=(16, 32)).__class__(
        **{**vars(images.settings), "flip": 0.5}
    )
    random.seed(1)
    seen = set()
    for _ in range(20):
        sample = images[0]
        rows, columns = (torch.nonzero(sample.masks[0].amax(axis))[:, 0] for axis in (1, 0))
        assert sample.boxes.tolist() == [
            [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]
        ]
        seen.add((sample.image.shape[1], bool(sample.image[0, 0, 0] > sample.image[0, 0, -1])))
    assert seen == {(16, False), (16, True), (32, False), (32, True)}


def test_held_out_images_are_never_mirrored_and_have_the_last_size(tmp_path):
    write(tmp_path)
    write(tmp_path, entry(), part="val")
    images = open_images(DataSettings(path=tmp_path, flip=1.0, short_sides=(32, 16))).val
    sample = images[0]
    assert sample.image.shape == (3, 16, 20)
    assert sample.boxes.tolist() == [[4, 2, 12, 8]]


@pytest.mark.parametrize(
    ("sides", "size"), [((100, None), (8, 10)), ((100, 16), (16, 20)), ((15, 16), (12, 15))]
)
def test_the_longer_side_limits_the_shorter(sides, size):
    longest, short = sides
    assert new_size(8, 10, short, longest) == size


def test_a_batch_is_padded_to_its_largest_image(digits):
    train = open_images(DataSettings(path=digits)).train
    samples = [train[index] for index in range(4)]
    batch = collate(samples, multiple=16)

    height, width = batch.images.shape[2:]
    assert (height % 16, width % 16) == (0, 0)
    assert height - 16 < max(sample.image.shape[1] for sample in samples) <= height
    assert width - 16 < max(sample.image.shape[2] for sample in samples) <= width
    for number, sample in enumerate(samples):
        own_height, own_width = batch.sizes[number]
        assert torch.equal(batch.images[number, :, :own_height, :own_width], sample.image)
        assert torch.equal(batch.masks[number][:, :own_height, :own_width], sample.masks)
        assert batch.images[number].count_nonzero() == sample.image.count_nonzero()
        assert batch.masks[number].shape[1:] == (height, width)
    assert boxes_in(batch) == sum(len(sample.boxes) for sample in samples)


def test_groups_are_those_of_aspect(digits):
    train = open_images(DataSettings(path=digits)).train
    groups = train.groups()
    assert set(groups) == {False, True}
    assert groups == [
        train.read(index).width >= train.read(index).height for index in range(len(train))
    ]


# What is missing or broken


def test_missing_data_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"data\.path must be a folder"):
        open_images(DataSettings())
    with pytest.raises(SettingsError, match=f"{tmp_path}/train.json does not exist"):
        open_images(DataSettings(path=tmp_path))
    write(tmp_path)
    with pytest.raises(SettingsError, match=f"{tmp_path}/val.json does not exist"):
        open_images(DataSettings(path=tmp_path))
    with pytest.raises(SettingsError, match=f"{tmp_path}/train is no file"):
        open_images(DataSettings(path=tmp_path, train_annotations=tmp_path / "train"))


def test_paths_of_their_own_stand_for_the_folder(tmp_path):
    write(tmp_path, entry(), part="images2017")
    file, folder = tmp_path / "images2017.json", tmp_path / "images2017"
    images = open_images(
        DataSettings(
            train_annotations=file, train_images=folder, val_annotations=file, val_images=folder
        )
    )
    assert len(images.train) == len(images.val) == 1


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("{part}.json", "{part}"),
        ("annotations/instances_{part}2017.json", "{part}2017"),
        ("annotations/instances_{part}2014.json", "images/{part}2014"),
        ("annotations/instances_{part}.json", "{part}"),
        ("annotations/instances_{part}2017.json", "{part}"),
    ],
)
def test_folders_in_the_layouts_of_coco_are_read(file, folder, tmp_path):
    for part in ("train", "val"):
        write(tmp_path, entry(), part="written")
        for old, new in (("written.json", file), ("written", folder)):
            target = tmp_path / new.format(part=part)
            target.parent.mkdir(exist_ok=True)
            (tmp_path / old).rename(target)
    (tmp_path / "annotations").mkdir(exist_ok=True)
    (tmp_path / "annotations" / "captions_train2017.json").write_text("{}")
    images = open_images(settings(tmp_path))
    assert [part.paths[0].parent for part in images] == [
        tmp_path / folder.format(part=part) for part in ("train", "val")
    ]


def test_annotations_of_two_years_must_be_chosen_from(tmp_path):
    write(tmp_path, entry(), part="val")
    (tmp_path / "annotations").mkdir()
    files = [tmp_path / "annotations" / f"instances_train{year}.json" for year in (2014, 2017)]
    for file in files:
        file.write_bytes((tmp_path / "val.json").read_bytes())
    message = r"2014\.json and .*2017\.json exist; choose one with data\.train_annotations"
    with pytest.raises(SettingsError, match=message):
        open_images(settings(tmp_path))
    (tmp_path / "val").rename(tmp_path / "train2014")
    (tmp_path / "val").symlink_to("train2014")
    assert len(open_images(settings(tmp_path, train_annotations=files[0])).train) == 1


def test_categories_must_agree(tmp_path):
    write(tmp_path)
    write(tmp_path, part="val", categories=[{"id": 3, "name": "square"}])
    with pytest.raises(AnnotationError, match="must have the same categories"):
        open_images(settings(tmp_path))


def test_broken_images_are_named(tmp_path):
    images = open_one(tmp_path)
    Image.new("RGB", (9, 8)).save(tmp_path / "train" / "a.png")
    with pytest.raises(
        AnnotationError, match=r"a\.png: expected 10 x 8 pixels as in .*train\.json, got 9 x 8"
    ):
        images[0]
    (tmp_path / "train" / "a.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"a\.png cannot be read as an image"):
        images[0]


def turn(path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    with Image.open(path) as image:
        image.save(path, exif=exif)


def test_turned_images_are_compared_as_they_are_displayed(tmp_path):
    pixels = np.asarray(open_one(tmp_path).read(0))
    turn(tmp_path / "train" / "a.png", 3)
    lines = []
    train = open_images(settings(tmp_path), FileCheck(settings(tmp_path), say=lines.append)).train
    assert np.array_equal(np.asarray(train.read(0)), pixels[::-1, ::-1])
    first = f"first: {tmp_path}/train/a.png"
    assert lines[0] == f"train: 1 of 1 images are turned by their EXIF orientation, {first}"

    turn(tmp_path / "train" / "a.png", 6)
    hint = "as its EXIF orientation turns it; annotations must be in the coordinates of the image"
    with pytest.raises(ImageError, match=f"expected 10 x 8 pixels as in .*, got 8 x 10, {hint}"):
        open_images(settings(tmp_path))


def test_left_out_images_leave_their_objects(tmp_path):
    image = {"id": 7, "file_name": "a.png", "width": 10, "height": 8}
    torn = {"id": 8, "file_name": "torn.png", "width": 10, "height": 8}
    write(tmp_path, entry(), entry(image_id=8), images=[torn, image])
    write(tmp_path, part="val")
    data, lines = settings(tmp_path, broken="skip", broken_limit=0.5), []
    train = open_images(data, FileCheck(data, tmp_path, say=lines.append)).train
    assert [entry["id"] for entry in train.entries] == list(train.truth.imgs) == [7]
    assert [annotation["image_id"] for annotation in train.truth.anns.values()] == [7]
    assert train[0].boxes.tolist() == [[2, 1, 6, 4]]
    assert lines == [
        f"train: left out 1 of 2 files, first: {tmp_path}/train/torn.png does not exist",
        "train: 1 images, 1 objects: round 0, square 1",
        "val: 1 images, 0 objects: round 0, square 0",
    ]
    with pytest.raises(ImageError, match=r"torn\.png does not exist; data\.broken=skip"):
        open_images(settings(tmp_path))


# The digits


def test_the_made_set_is_the_same_each_time_and_other_with_another_seed(digits, tmp_path):
    make_data.main([str(tmp_path / "again"), "--train", "13", "--val", "5"])
    make_data.main([str(tmp_path / "other"), "--train", "13", "--val", "5", "--seed", "1"])
    files = sorted(path.relative_to(digits) for path in digits.rglob("*") if path.is_file())
    assert len(files) == 13 + 5 + 2
    assert all(
        (digits / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files
    )
    assert all(
        (digits / file).read_bytes() != (tmp_path / "other" / file).read_bytes() for file in files
    )


def test_the_made_set_has_what_it_promises(tmp_path):
    make_data.main([str(tmp_path), "--train", "60", "--val", "1"])
    truth = read_annotations(tmp_path / "train.json")
    counts = [len(truth.imgToAnns[number]) for number in truth.imgs]
    assert 0 in counts
    assert max(counts) > 3
    overlapping = 0
    for objects in truth.imgToAnns.values():
        masks = [truth.annToMask(annotation) for annotation in objects]
        if masks:
            assert np.sum(masks, axis=0).max() == 1  # each pixel is of the uppermost digit
        for mask, annotation in zip(masks, objects, strict=True):
            assert annotation["bbox"] == rle.toBbox(annotation["segmentation"]).tolist()
            assert annotation["area"] == mask.sum() > 0
        boxes = np.array(
            [[x, y, x + w, y + h] for x, y, w, h in (annotation["bbox"] for annotation in objects)]
        ).reshape(-1, 4)
        low, high = (
            np.maximum(boxes[:, None, :2], boxes[:, :2]),
            np.minimum(boxes[:, None, 2:], boxes[:, 2:]),
        )
        overlapping += ((high > low).all(2).sum() > len(boxes)).item()
    assert overlapping > 5


def test_held_out_digits_are_seen_in_no_training_image(tmp_path, monkeypatch):
    digits_by_part = {}
    monkeypatch.setattr(
        make_data,
        "write",
        lambda directory, part, images, digits, labels, draw: digits_by_part.update({part: digits}),
    )
    make_data.main([str(tmp_path)])
    train, val = ({digit.tobytes() for digit in digits_by_part[part]} for part in ("train", "val"))
    assert not train & val
    assert len(train | val) == len(
        {digit.tobytes() for digit in np.float32(load_digits().images / 16)}
    )


@pytest.mark.parametrize("wrong", [["--train", "0"], ["--val", "-1"], ["--seed", "-1"]])
def test_wrong_numbers_are_refused(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        make_data.main([str(tmp_path), *wrong])
    assert "must be at least" in capsys.readouterr().err
