from __future__ import annotations

import gzip
import random
import shutil
import struct
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from recipes.digits import held_out_fifth
from recipes.file_check import FileCheck
from recipes.vit.config import DataSettings, ModelSettings
from recipes.vit.data import (
    ImageError,
    center_crop,
    jitter,
    open_images,
    random_crop_and_flip,
    read_idx,
)
from recipes.vit.randaugment import OPERATIONS, randaugment

DIGITS = DataSettings(source="digits", mean=(0.3,), std=(0.4,))
DIGITS_MODEL = ModelSettings(image_size=8, patch_size=2, channels=1, classes=10)
FOLDER_MODEL = ModelSettings(image_size=16, patch_size=8, classes=2)


def images_of(dataset):
    return torch.stack([image for image, _ in dataset.__getitems__(list(range(len(dataset))))])


def paint(path, colour, size=(20, 12)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "val"):
        paint(tmp_path / part / "cat" / "b.png", (255, 0, 0))
        paint(tmp_path / part / "cat" / "a.JPG", (0, 255, 0))
        paint(tmp_path / part / "dog" / "c.webp", (0, 0, 255))
        (tmp_path / part / "dog" / "notes.txt").write_text("no image")
    return tmp_path


# The digits


@given(labels=st.lists(st.integers(0, 4), max_size=60).map(torch.tensor))
def test_a_fifth_of_each_class_is_held_out(labels):
    held_out = held_out_fifth(labels)

    sizes, held = Counter(labels.tolist()), Counter(labels[held_out].tolist())
    assert all(held[label] == size // 5 for label, size in sizes.items())
    # later samples change nothing
    assert torch.equal(held_out[: len(labels) // 2], held_out_fifth(labels[: len(labels) // 2]))


def test_the_digits_are_split_without_loss():
    split = open_images(replace(DIGITS, augment=False), DIGITS_MODEL)
    every = torch.from_numpy(load_digits().images).float()[:, None]

    assert (len(split.train), len(split.test), split.classes) == (1442, 355, 10)
    both = torch.cat([images_of(split.train), images_of(split.test)]) * 0.4 + 0.3
    assert Counter((both * 16).round().int().flatten(1).sum(1).tolist()) == Counter(
        every.int().flatten(1).sum(1).tolist()
    )
    torch.testing.assert_close(images_of(split.train)[0], (every[0] / 16 - 0.3) / 0.4)


def test_training_digits_change_with_the_generators_and_held_out_ones_never():
    split = open_images(DIGITS, DIGITS_MODEL)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append((images_of(split.train), images_of(split.test)))

    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert torch.equal(drawn[0][1], drawn[2][1])


@given(size=st.integers(2, 12), shift=st.integers(-2, 2))
def test_jitter_of_nothing_leaves_images_as_they_are(size, shift):
    images = torch.rand(6, 1, size, size)
    torch.testing.assert_close(
        jitter(images, pixels=0, degrees=0, scale=0), images, atol=1e-4, rtol=0
    )


def test_jitter_shifts_by_at_most_so_many_pixels_and_leaves_half_sharp():
    torch.manual_seed(0)
    images = torch.zeros(4_000, 1, 9, 9)
    images[:, :, 4, 4] = 1

    shifted = jitter(images, pixels=2, degrees=0, scale=0)[:, 0]

    axis = torch.arange(9.0) - 4
    mass = shifted.sum((1, 2))
    offsets = torch.stack([(shifted.sum(2) * axis).sum(1), (shifted.sum(1) * axis).sum(1)]) / mass
    assert offsets.abs().max() <= 2.001
    assert offsets.abs().max() > 1.9
    assert (shifted[:, 4, 4] > 0.999).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_jitter_flips_half_where_asked():
    torch.manual_seed(0)
    images = torch.zeros(2_000, 1, 4, 4)
    images[..., 0] = 1
    flipped = jitter(images, pixels=0, degrees=0, scale=0, flip=True)
    assert flipped[:, 0, 0, 3].round().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(flipped.round().sum((1, 2, 3)), images.sum((1, 2, 3)))


# Folders


def test_a_folder_is_read_in_the_order_of_its_names(folder):
    split = open_images(DataSettings(path=folder), FOLDER_MODEL)

    assert [(path.name, label) for path, label in split.test.items] == [
        ("a.JPG", 0),
        ("b.png", 0),
        ("c.webp", 1),
    ]
    image, label = split.test[1]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.float32, 0)
    torch.testing.assert_close(
        image, torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 16, 16)
    )


def test_a_class_may_have_no_held_out_images(folder):
    for file in (folder / "val" / "cat").iterdir():
        file.unlink()
    (folder / "val" / "cat").rmdir()
    assert [
        label for _, label in open_images(DataSettings(path=folder), FOLDER_MODEL).test.items
    ] == [1]


def test_grey_models_see_grey_images(folder):
    split = open_images(
        DataSettings(path=folder, mean=(0.0,), std=(1.0,)), replace(FOLDER_MODEL, channels=1)
    )
    # ITU-R 601: 0.299 red
    torch.testing.assert_close(split.test[1][0], torch.full((1, 16, 16), 76 / 255))


def test_training_images_change_with_the_generators(folder):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8))
    image.save(folder / "train" / "cat" / "b.png")
    train = open_images(DataSettings(path=folder), FOLDER_MODEL).train
    drawn = []
    for seed in (1, 1, 2):
        random.seed(seed)
        drawn.append(train[1][0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    fixed = open_images(DataSettings(path=folder, augment=False), FOLDER_MODEL).train
    assert torch.equal(fixed[1][0], fixed[1][0])


@pytest.mark.parametrize("damage", [b"", b"\x89PNG\r\n\x1a\n", b"no image at all"])
def test_a_damaged_image_is_named(folder, damage):
    (folder / "train" / "cat" / "b.png").write_bytes(damage)
    with pytest.raises(ImageError, match=r"train/cat/b\.png cannot be read as an image"):
        open_images(DataSettings(path=folder), FOLDER_MODEL).train[1]


def test_a_torn_image_is_named(folder):
    file = folder / "train" / "cat" / "b.png"
    paint(file, (3, 4, 5), size=(200, 200))
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(ImageError, match=r"train/cat/b\.png cannot be read as an image"):
        open_images(DataSettings(path=folder), FOLDER_MODEL).train[1]


@given(
    width=st.integers(1, 60),
    height=st.integers(1, 60),
    least=st.floats(0.05, 1),
    seed=st.integers(0, 2**32),
)
def test_a_random_crop_lies_inside_and_is_no_smaller_than_asked(width, height, least, seed):
    assume(max(width, height) <= 16 * min(width, height))
    columns, rows = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    image = Image.fromarray(np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8))
    random.seed(seed)
    assert random_crop_and_flip(image, size=7, least=least).size == (7, 7)


def test_a_centre_crop_takes_the_middle():
    pixels = np.zeros((40, 80), dtype=np.uint8)
    pixels[5:35, 25:55] = 200  # three quarters of the shorter side, in the middle
    assert set(np.unique(center_crop(Image.fromarray(pixels), size=30, part=0.75))) == {200}
    assert np.unique(center_crop(Image.fromarray(pixels), size=40, part=1.0)).tolist() == [0, 200]


# Fashion-MNIST


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_fashion_mnist_is_read_from_its_files(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (20, 28, 28), dtype=np.uint8)
    labels = (np.arange(20) % 10).astype(np.uint8)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels), mtime=0))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels), mtime=0))
    settings = DataSettings(source="fashion-mnist", path=tmp_path, mean=(0.0,), std=(1.0,))

    split = open_images(settings, replace(DIGITS_MODEL, image_size=28))

    image, label = split.test[13]
    assert label == 3
    torch.testing.assert_close(image[0], torch.from_numpy(pixels[13]) / 255)


# mtime: with the time in it, the test would have another name in each process of pytest-xdist.
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"", mtime=0),
        gzip.compress(idx(np.zeros((2, 3), np.uint8))[:-1], mtime=0),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, content):
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(ImageError, match=r"a\.gz cannot be read as a gzipped IDX file"):
        read_idx(tmp_path / "a.gz")


def test_an_idx_file_of_another_type_is_named(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 13, 1, 2) + bytes(2)))
    with pytest.raises(ImageError, match=r"expected IDX type 8 .*, got 13"):
        read_idx(tmp_path / "a.gz")


# Settings that do not fit


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (DIGITS, replace(DIGITS_MODEL, classes=9), "model.classes must be 10 for digits, got 9"),
        (
            DIGITS,
            replace(DIGITS_MODEL, image_size=16),
            "digits needs model.channels=1 and model.image_size=8",
        ),
        (replace(DIGITS, mean=(0.1, 0.2)), DIGITS_MODEL, "must have a number per channel (1), got"),
        (
            DIGITS,
            replace(DIGITS_MODEL, channels=2),
            "model.channels must be 1 (gray) or 3 (color), got 2",
        ),
        (DataSettings(), FOLDER_MODEL, "data.path must be a folder with train/CLASS/* and val"),
    ],
)
def test_settings_that_do_not_fit_the_images_are_named(data, model, message):
    with pytest.raises(ImageError) as caught:
        open_images(data, model)
    assert message in str(caught.value)


def test_evaluating_needs_no_training_images(folder):
    trained = open_images(DataSettings(path=folder), FOLDER_MODEL)
    shutil.rmtree(folder / "train")
    shutil.rmtree(folder / "val" / "cat")  # the class keeps its index
    data = DataSettings(path=folder, class_names=trained.class_names)
    split = open_images(data, FOLDER_MODEL, train=False)
    assert [label for _, label in split.test.items] == [1]
    assert len(split.train) == 0


def test_without_training_images_or_names_the_held_out_folders_are_the_classes(folder):
    shutil.rmtree(folder / "train")
    split = open_images(DataSettings(path=folder), FOLDER_MODEL, train=False)
    assert split.class_names == ("cat", "dog")


def test_held_out_folders_that_lack_a_class_need_the_names_of_all(folder):
    shutil.rmtree(folder / "train")
    shutil.rmtree(folder / "val" / "cat")
    expected = "has 1 classes and the model 2, .* pass the settings.yaml of the run .*class_names"
    with pytest.raises(ImageError, match=expected):
        open_images(DataSettings(path=folder), FOLDER_MODEL, train=False)
    shutil.rmtree(folder / "val" / "dog")
    with pytest.raises(ImageError, match="val has no images"):
        open_images(DataSettings(path=folder), FOLDER_MODEL, train=False)


def test_lists_of_images_are_read(folder):
    (folder / "train_list.txt").write_text("train/cat/a.JPG 0\ntrain/dog/c.webp 1\n")
    (folder / "val_list.txt").write_text("val/dog/c.webp 1\n")
    split = open_images(DataSettings(path=folder), FOLDER_MODEL)
    assert [label for _, label in split.train.items] == [0, 1]
    image, label = split.test[0]
    assert (image.shape, label) == ((3, 16, 16), 1)


def test_lists_of_windows_and_of_spreadsheets_are_read(folder):
    lines = ["\ufefftrain\\cat\\a.JPG\t0\r", "", '"train/cat/b.png",0', "train/dog/c.webp  1 ", ""]
    (folder / "train_list.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "val_list.txt").write_text("val/dog/c.webp,1\n")
    split = open_images(DataSettings(path=folder), FOLDER_MODEL)
    assert [path.name for path, _ in split.train.items] == ["a.JPG", "b.png", "c.webp"]
    assert [label for _, label in split.train.items] == [0, 0, 1]
    assert [label for _, label in split.test.items] == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("missing.png 0\n", "missing.png does not exist"),
        ("a.png 0\nb.png 2\n", "line 2: expected PATH CLASS with a class from 0 to 1"),
        ("a.png\n", r"line 1: .*got 'a\.png'"),
        ("", "is empty"),
    ],
)
def test_a_wrong_line_of_a_list_is_named(folder, content, message):
    (folder / "val_list.txt").write_text(content)
    with pytest.raises(ImageError, match=message):
        open_images(DataSettings(path=folder), FOLDER_MODEL, train=False)


@given(seed=st.integers(0, 2**32), magnitude=st.floats(0, 10))
def test_randaugment_keeps_size_and_mode_and_repeats_with_the_generator(seed, magnitude):
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    for mode in ("RGB", "L"):
        image = Image.fromarray(pixels).convert(mode)
        made = []
        for _ in range(2):
            random.seed(seed)
            made.append(randaugment(image, operations=2, magnitude=magnitude))
        assert (made[0].size, made[0].mode) == (image.size, mode)
        assert made[0].tobytes() == made[1].tobytes()


@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_every_operation_changes_an_image(operation):
    pixels = np.random.default_rng(0).integers(40, 200, (48, 64, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    random.seed(0)
    assert operation(image, 0.9).tobytes() != image.tobytes()


def test_training_images_of_a_folder_are_augmented(folder):
    pixels = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "train" / "cat" / "b.png")

    def drawn(strength):
        data = DataSettings(path=folder, randaugment=strength)
        random.seed(1)
        return open_images(data, FOLDER_MODEL).train[1][0]

    assert not torch.equal(drawn(9.0), drawn(0.0))


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"train has no images: expected .*train/CLASS/\*\.jpg"):
        open_images(DataSettings(path=tmp_path), FOLDER_MODEL)


def test_a_held_out_class_that_was_never_trained_is_named(folder):
    paint(folder / "val" / "fox" / "a.png", (1, 2, 3))
    with pytest.raises(ImageError, match=r"val has folders of none of the 2 classes, .*: fox$"):
        open_images(DataSettings(path=folder), FOLDER_MODEL)


def test_files_of_all_endings_and_forms_of_names_are_read(folder):
    for ending in (".bmp", ".gif", ".tif"):
        paint(folder / "train" / "cat" / f"d{ending}", (9, 9, 9))
    (folder / "train" / "cat" / "._a.JPG").touch()
    for name in ("__MACOSX", ".ipynb_checkpoints"):
        paint(folder / "train" / name / "a.png", (9, 9, 9))
    (folder / "train" / "dog").rename(folder / "train" / "\u00e9")
    (folder / "val" / "dog").rename(folder / "val" / "e\u0301")
    paint(folder / "train" / "sheet.png", (9, 9, 9))
    lines = []
    data = DataSettings(path=folder)
    split = open_images(data, FOLDER_MODEL, FileCheck(data, say=lines.append))
    assert split.class_names == ("cat", "\u00e9")
    assert [label for _, label in split.test.items] == [0, 0, 1]
    ignored = "1 *.txt, 3 hidden, 1 outside a class"
    assert lines[-2:] == [
        f"train: 6 images: cat 5, \u00e9 1; ignored: {ignored}",
        "val: 3 images: cat 2, \u00e9 1; ignored: 1 *.txt",
    ]


@pytest.mark.parametrize(
    ("files", "got"),
    [
        ([], "an empty folder"),
        (["a.xcf", "b.xcf", ".hidden"], "ignored: 2 *.xcf, 1 hidden"),
        (["deep/a.png"], "folders such as deep, whose images belong one level higher"),
    ],
)
def test_a_class_without_images_is_refused(files, got, folder):
    empty = folder / "train" / "fox"
    empty.mkdir()
    for name in files:
        paint(folder / "train" / "fox" / "a.png", (1, 2, 3))
        (empty / name).parent.mkdir(exist_ok=True)
        (empty / "a.png").rename(empty / name)
    with pytest.raises(ImageError) as caught:
        open_images(DataSettings(path=folder), replace(FOLDER_MODEL, classes=3))
    expected = f"expected {empty}/*.jpg (or another type of image), got {got}"
    assert str(caught.value) == f"class fox has no images: {expected}"


def test_a_class_that_loses_all_images_is_refused(folder):
    (folder / "train" / "dog" / "c.webp").write_bytes(b"no image")
    data = DataSettings(path=folder, broken="skip", broken_limit=0.5)
    with pytest.raises(ImageError, match="train: no images are left of dog"):
        open_images(data, FOLDER_MODEL)


def test_16_bits_and_transparency_reach_the_model(folder):
    wide = np.full((20, 20), 257 * 123, np.uint16)  # 123 of 255
    Image.fromarray(wide).save(folder / "val" / "cat" / "b.png")
    Image.new("LA", (20, 20), (0, 0)).save(folder / "val" / "cat" / "c.png")
    data = DataSettings(path=folder, mean=(0.0,) * 3, std=(1.0,) * 3)
    split = open_images(data, FOLDER_MODEL)
    gray, transparent = (split.test[number][0] for number in (1, 2))
    torch.testing.assert_close(gray, torch.full((3, 16, 16), 123 / 255))
    torch.testing.assert_close(transparent, torch.ones(3, 16, 16))
