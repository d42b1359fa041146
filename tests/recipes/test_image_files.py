"""Image files as people have them are read as they are displayed, or refused with a reason."""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from recipes.image_files import (
    TURNS,
    ImageError,
    ImageFileSettings,
    data_folder,
    find_images,
    inspect,
    listed_path,
    read_image,
    read_text,
)

PLAIN = ImageFileSettings()
GRAY = np.arange(12, dtype=np.uint16).reshape(3, 4)  # [height, width]


def save(path, pixels, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


def pixels_of(path, mode="L", settings=PLAIN):
    return np.asarray(read_image(path, mode, settings))


# 16 bits


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bits_are_scaled_by_their_range(ending, tmp_path):
    wide = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    path = save(tmp_path / f"a.{ending}", wide)
    expected = np.arange(256).reshape(16, 16)
    assert np.array_equal(pixels_of(path), expected)
    assert np.array_equal(pixels_of(path, "RGB")[..., 1], expected)


def test_12_bits_in_16_are_scaled_by_12(tmp_path):
    path = save(tmp_path / "a.png", np.linspace(0, 4095, 256).round().astype(np.uint16)[None])
    assert pixels_of(path, settings=ImageFileSettings(bits=12)).tolist() == [list(range(256))]
    assert pixels_of(path).max() == 16  # of 255
    message = r"expected pixels from 0 to 1023 \(data\.bits=10\), got 0 to 4095"
    with pytest.raises(ImageError, match=message):
        read_image(path, "L", ImageFileSettings(bits=10))


def test_16_bits_with_white_as_0_are_inverted(tmp_path):
    path = save(tmp_path / "a.tif", np.array([[0, 65535]], np.uint16), tiffinfo={262: 0})
    assert pixels_of(path).tolist() == [[255, 0]]


def test_floats_have_no_range_and_are_refused(tmp_path):
    path = save(tmp_path / "a.tif", np.zeros((2, 2), np.float32))
    assert "its pixels are floats of an unknown range" in inspect(path, PLAIN, full=False).fault
    with pytest.raises(ImageError, match="its pixels are floats of an unknown range"):
        read_image(path, "L", PLAIN)


# Transparency


def test_transparent_pixels_show_the_background(tmp_path):
    color = np.zeros((1, 3, 4), np.uint8)
    color[..., 0], color[..., 3] = 200, [0, 255, 51]  # red; transparent, opaque and a fifth
    path = save(tmp_path / "a.png", color)
    assert pixels_of(path, "RGB")[0].tolist() == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
    black = ImageFileSettings(background="black")
    assert pixels_of(path, "RGB", black)[0].tolist() == [[0, 0, 0], [200, 0, 0], [40, 0, 0]]


def test_gray_with_alpha_and_a_transparent_color_show_the_background(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.array([[[9, 0], [9, 255]]], np.uint8), "LA").save(path)
    assert pixels_of(path).tolist() == [[255, 9]]
    save(path, np.array([[7, 9]], np.uint8), transparency=7)
    assert pixels_of(path).tolist() == [[255, 9]]
    save(path, np.array([[7, 0]], np.uint16), transparency=7)
    assert pixels_of(path).tolist() == [[255, 0]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(path, transparency=0)
    assert pixels_of(path, "RGB").tolist() == [[[255, 255, 255], [40, 50, 60]]]


# Orientation


@pytest.mark.parametrize("orientation", [1, *TURNS])
@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
def test_images_are_turned_as_they_are_displayed(ending, orientation, tmp_path):
    exif = Image.Exif()
    exif[274] = orientation
    pixels = GRAY.astype(np.uint8) * 20
    color = np.stack([pixels] * 3, axis=-1)
    options = {"lossless": True} if ending == "webp" else {}
    path = save(tmp_path / f"a.{ending}", color, exif=exif, **options)

    expected = Image.fromarray(pixels)
    if orientation in TURNS:
        expected = expected.transpose(TURNS[orientation])
    assert np.array_equal(pixels_of(path), np.asarray(expected))
    facts = inspect(path, PLAIN, full=False)
    assert (facts.width, facts.height, facts.turned) == (*expected.size, orientation != 1)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_an_orientation_behind_the_pixels_of_a_png_counts(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    path = save(tmp_path / "a.png", GRAY.astype(np.uint8))
    content, late = path.read_bytes(), chunk(b"eXIf", exif.tobytes()[6:])
    path.write_bytes(content[:-12] + late + content[-12:])
    facts = inspect(path, PLAIN, full=False)
    assert (facts.width, facts.height, facts.turned) == (3, 4, True)
    assert pixels_of(path).shape == (4, 3)


def test_broken_exif_is_no_orientation(tmp_path):
    path = save(tmp_path / "a.png", GRAY.astype(np.uint8), exif=b"Exif\0\0MM\0*broken")
    assert inspect(path, PLAIN, full=True).fault == ""
    assert pixels_of(path).shape == (3, 4)


# Frames, sizes and faults


def test_the_first_of_several_frames_is_read(tmp_path):
    frames = [Image.fromarray(np.full((2, 2), value, np.uint8)) for value in (10, 200)]
    for ending in ("gif", "tif"):
        path = tmp_path / f"a.{ending}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        assert inspect(path, PLAIN, full=False).frames
        assert set(pixels_of(path).ravel()) == {10}


def test_large_images_have_a_limit_of_their_own(tmp_path):
    path = save(tmp_path / "a.png", np.zeros((20, 30), np.uint8))
    fault = inspect(path, ImageFileSettings(most_pixels=500), full=False).fault
    assert "it has 30 x 20 pixels, more than data.most_pixels=500; set it to 600, or cut" in fault
    assert inspect(path, ImageFileSettings(most_pixels=600), full=False).fault == ""


@pytest.mark.parametrize(
    ("content", "kind"), [(None, "missing"), (b"", "broken"), (b"no", "broken")]
)
def test_a_file_that_is_no_image_has_a_fault(content, kind, tmp_path):
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    facts = inspect(path, PLAIN, full=False)
    assert facts.kind == kind
    assert str(path) in facts.fault


def test_a_torn_image_has_a_fault_if_all_pixels_are_read(tmp_path):
    noise = np.random.default_rng(0).integers(255, size=(40, 40, 3), dtype=np.uint8)
    path = save(tmp_path / "a.png", noise)
    path.write_bytes(path.read_bytes()[:-900])
    assert inspect(path, PLAIN, full=False).fault == ""
    assert f"{path} cannot be read as an image" in inspect(path, PLAIN, full=True).fault


# Names


def test_files_of_other_programs_are_ignored(tmp_path):
    for name in ("a.PNG", "b.bmp", "c.gif", "d.tif", "._a.png", ".DS_Store", "Thumbs.db", "notes"):
        (tmp_path / name).touch()
    for name in (".ipynb_checkpoints", "__MACOSX", "cat"):
        (tmp_path / name).mkdir()
    listing = find_images(tmp_path)
    assert [path.name for path in listing.files] == ["a.PNG", "b.bmp", "c.gif", "d.tif"]
    assert list(listing.folders) == ["cat"]
    assert listing.ignored == {"hidden": 4, "*.db": 1, "without an ending": 1}


def test_names_differ_only_in_their_unicode_form(tmp_path):
    (tmp_path / "e\u0301").mkdir()  # as macOS writes it
    (tmp_path / "e\u0301" / "a.png").touch()
    assert list(find_images(tmp_path).folders) == ["\u00e9"]
    assert listed_path(tmp_path, "\u00e9\\a.png").exists()
    (tmp_path / "\u00e9").mkdir()
    with pytest.raises(ImageError, match="have the same name in Unicode; merge them"):
        find_images(tmp_path)


def test_names_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / os.fsdecode(b"\xe9.png")
    save(path, GRAY.astype(np.uint8))
    fault = inspect(path, PLAIN, full=False).fault
    assert fault == f"{tmp_path}/\\xe9.png: expected a name in UTF-8, of one line; rename the file"
    (tmp_path / os.fsdecode(b"\xe9")).mkdir()
    with pytest.raises(
        ImageError, match=r"\\xe9: expected a name in UTF-8, of one line; rename the folder"
    ):
        find_images(tmp_path)


def test_text_may_have_a_byte_order_mark_and_must_be_utf8(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("a.png 0", encoding="utf-8-sig")
    assert read_text(file) == "a.png 0"
    file.write_text("a.png 0", encoding="utf-16")
    with pytest.raises(ImageError, match=r"list\.txt cannot be read as UTF-8 text"):
        read_text(file)


def test_a_data_folder_may_be_in_the_other_form_of_unicode(tmp_path):
    composed, decomposed = (tmp_path / form for form in ("caf\u00e9", "cafe\u0301"))
    decomposed.mkdir()
    assert data_folder(composed, "a folder") == decomposed
    with pytest.raises(ImageError, match=r"data\.path must be a folder, got \S+/b, which does not"):
        data_folder(tmp_path / "b", "a folder")
    other = tmp_path / os.fsdecode(b"caf\xe9")
    other.mkdir()
    with pytest.raises(ImageError, match=r"/caf\\xe9: expected a name in UTF-8, .*rename the fold"):
        data_folder(other, "a folder")


def test_a_name_of_two_lines_has_a_fault(tmp_path):
    path = save(tmp_path / "a\nb.png", GRAY)
    fault = inspect(path, PLAIN, full=False).fault
    assert fault == f"{tmp_path}/a\\nb.png: expected a name in UTF-8, of one line; rename the file"
