from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.file_check import FileCheck
from recipes.stain.config import DataSettings, Settings
from recipes.stain.data import StripError, open_strips

PLAIN = DataSettings(load_size=16, crop_size=16, flip=False)
COLOURS = {"IHC": (255, 0, 0), "a": (0, 255, 0), "b": (0, 0, 255), "Seg": (255, 255, 255)}


def settings(folder, **changes):
    return Settings(modalities=("a", "b"), data=replace(PLAIN, path=folder, **changes))


def save(path, strip):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(strip).save(path)


def plain_strip(size=16):
    return np.concatenate(
        [np.full((size, size, 3), colour, np.uint8) for colour in COLOURS.values()], axis=1
    )


def strip_of_places(size):
    """Return a strip whose tiles have each pixel's row and column in red and green."""
    rows, columns = np.mgrid[:size, :size].astype(np.uint8)
    return np.concatenate(
        [np.stack([rows, columns, np.full_like(rows, number)], axis=-1) for number in range(4)],
        axis=1,
    )


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "val"):
        for name in ("b.png", "a.png"):
            save(tmp_path / part / name, plain_strip())
    (tmp_path / "train" / "notes.txt").write_text("no strip")
    return tmp_path


def places(strip):
    """Return the rows and columns [tiles, size, size] that pixels of a strip come from."""
    values = ((strip + 1) * 127.5).round().int()
    return values[:, 0], values[:, 1]


def test_strips_are_cut_into_tiles_in_their_order(folder):
    strips = open_strips(settings(folder))
    assert [path.name for path in strips.val.paths] == ["a.png", "b.png"]
    assert (len(strips.train), len(strips.val)) == (2, 2)
    strip = strips.val[0]
    assert (strip.shape, strip.dtype) == ((4, 3, 16, 16), torch.float32)
    for tile, colour in zip(strip, COLOURS.values(), strict=True):
        torch.testing.assert_close(
            tile, (torch.tensor(colour) / 127.5 - 1)[:, None, None].expand(3, 16, 16)
        )


def test_tiles_are_resized_and_training_tiles_cropped(folder):
    save(folder / "val" / "c.png", plain_strip(size=40))
    strips = open_strips(settings(folder, load_size=24, crop_size=20))
    assert strips.val[2].shape == strips.val[0].shape == (4, 3, 24, 24)
    assert strips.train[0].shape == (4, 3, 20, 20)
    torch.testing.assert_close(strips.val[2], strips.val[0])


def test_all_tiles_of_a_strip_are_cropped_and_flipped_alike(tmp_path):
    for part in ("train", "val"):
        save(tmp_path / part / "a.png", strip_of_places(16))
    strips = open_strips(settings(tmp_path, crop_size=12, flip=True))
    seen = set()
    for seed in range(200):
        random.seed(seed)
        rows, columns = places(strips.train[0])
        assert torch.equal(rows, rows[:1].expand_as(rows))
        assert torch.equal(columns, columns[:1].expand_as(columns))
        assert torch.equal(
            rows[0].sort(0).values, rows[0].min() + torch.arange(12)[:, None].expand(12, 12)
        )
        assert torch.equal(
            columns[0].sort(1).values, columns[0].min() + torch.arange(12).expand(12, 12)
        )
        seen.add(
            (
                rows.min().item(),
                columns.min().item(),
                (rows[0, 0] > rows[0, 1]).any().item(),
                (columns[0, :, 0] > columns[0, :, 1]).any().item(),
            )
        )
    assert [set(values) for values in zip(*seen, strict=True)] == [
        set(range(5)),
        set(range(5)),
        {False, True},
        {False, True},
    ]


def test_what_is_drawn_depends_on_the_generator_and_held_out_strips_on_none(tmp_path):
    for part in ("train", "val"):
        save(tmp_path / part / "a.png", strip_of_places(16))
    strips = open_strips(settings(tmp_path, crop_size=8, flip=True))
    drawn = []
    for seed in (1, 1, 2):
        random.seed(seed)
        drawn.append((strips.train[0], strips.val[0]))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert torch.equal(drawn[0][1], drawn[2][1])
    rows, columns = places(strips.val[0])
    assert torch.equal(rows[0], torch.arange(16, dtype=torch.int32)[:, None].expand(16, 16))
    assert torch.equal(columns[0], torch.arange(16, dtype=torch.int32).expand(16, 16))


# What is refused


def test_a_strip_of_another_width_is_named(folder):
    save(folder / "train" / "wide.png", np.zeros((16, 80, 3), np.uint8))
    with pytest.raises(
        StripError,
        match=r"train/wide\.png: expected the 4 square tiles IHC, a, b, Seg, got 80 x 16 pixels",
    ):
        open_strips(settings(folder))


def test_a_file_that_is_no_image_is_named(folder):
    (folder / "val" / "text.png").write_text("no image")
    with pytest.raises(StripError, match=r"val/text\.png cannot be read as an image"):
        open_strips(settings(folder))


def test_a_torn_image_is_named_when_it_is_read(folder):
    path = folder / "val" / "torn.png"
    save(path, np.random.default_rng(0).integers(255, size=(16, 64, 3), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-200])
    strips = open_strips(settings(folder))
    with pytest.raises(StripError, match=r"val/torn\.png cannot be read as an image"):
        strips.val[2]


def test_folders_without_strips_are_named(tmp_path):
    with pytest.raises(StripError, match=r"data\.path must be a folder"):
        open_strips(settings(None))
    with pytest.raises(StripError, match=r"train has no strips: expected .*/train/\*\.png"):
        open_strips(settings(tmp_path))


def test_strips_of_all_endings_are_read(folder):
    for part in ("train", "val"):
        Image.fromarray(plain_strip()).save(folder / part / "c.jpg", quality=100)
        Image.fromarray(plain_strip()).save(folder / part / "d.TIF")
        (folder / part / "a.png").unlink()
        (folder / part / "._b.png").touch()
    lines = []
    wanted = settings(folder, load_size=20)
    strips = open_strips(wanted, FileCheck(wanted.data, say=lines.append))
    assert [path.name for path in strips.train.paths] == ["b.png", "c.jpg", "d.TIF"]
    middle = strips.val[1][..., 9:11, 9:11], strips.val[0][..., 9:11, 9:11]
    torch.testing.assert_close(*middle, atol=0.05, rtol=0)
    enlarged = f"smaller than data.load_size=20 and enlarged, first: {folder}/train/b.png"
    assert lines[0] == f"train: 3 of 3 images are {enlarged}"
    assert lines[2] == "train: 3 strips of 4 tiles; ignored: 1 *.txt, 1 hidden"


def test_strips_with_the_same_name_would_overwrite_each_other(folder):
    Image.fromarray(plain_strip()).save(folder / "val" / "a.jpg")
    with pytest.raises(StripError, match=r"val has 2 files a\.\*: expected different names"):
        open_strips(settings(folder))


def test_a_crop_fits_into_the_tile(folder):
    with pytest.raises(StripError, match=r"crop_size must be at most data\.load_size=16, got 17"):
        open_strips(settings(folder, crop_size=17))
