from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from samestep.errors import RecordError
from samestep.record.images import (
    AsyncImageWriter,
    Picture,
    copy_picture,
    image_paths,
    safe_name,
    write_picture,
)

RANDOM = np.random.default_rng(0)
SHAPES = [(1, 1), (5, 3), (5, 3, 1), (5, 3, 3)]


def write_image(directory, step, name, pixels):
    picture = copy_picture(step, name, pixels)
    write_picture(directory, picture)
    return picture.path, picture.width, picture.height


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "arranged", [np.ascontiguousarray, np.asfortranarray, lambda pixels: pixels[::-1]]
)
def test_pixels_round_trip(tmp_path, shape, arranged):
    pixels = arranged(RANDOM.integers(0, 256, shape, np.uint8))
    path, width, height = write_image(tmp_path, 3, "sample", pixels)
    assert (height, width) == shape[:2]
    with Image.open(tmp_path / path) as image:
        assert np.array_equal(
            np.asarray(image), pixels.squeeze(-1) if shape[2:] == (1,) else pixels
        )


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4), bool),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((0, 4), np.uint8),
        [[0, 255]],
        None,
    ],
)
def test_arrays_that_are_not_images_raise(tmp_path, pixels):
    with pytest.raises(RecordError, match=r"'sample' must be a uint8 .*\[H, W, 3\], got"):
        write_image(tmp_path, 0, "sample", pixels)
    assert list(tmp_path.iterdir()) == []


@given(
    st.text()
    | st.sampled_from(
        [
            "../../x",
            "/etc/passwd",
            "<script>",
            "",
            ".",
            "..",
            "a/b",
            "C:\\x",
            "a\0b",
            "x" * 300,
            "-rf",
        ]
    )
)
def test_no_name_leads_out_of_the_folder(name):
    path = Path("/run/images") / f"{safe_name(name)}-00000000.png"
    assert path.resolve().parent == Path("/run/images")
    assert path.name.isascii()
    assert len(path.name) < 255
    assert not set(path.name) & set("/\\<>:\"'&%?# \0\n")


@given(st.lists(st.text("ab/._-", max_size=4), min_size=2, unique=True))
def test_different_names_have_different_files(names):
    assert len({safe_name(name) for name in names}) == len(names)


def test_a_plain_name_is_unchanged():
    assert safe_name("val_faces-2") == "val_faces-2"


@pytest.mark.parametrize("name", ["../../x", "<script>alert(1)</script>"])
def test_an_image_with_a_hostile_name_is_written_inside_the_run(tmp_path, name):
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    path, _, _ = write_image(run, 0, name, np.zeros((2, 2), np.uint8))
    assert [file.relative_to(run) for file in tmp_path.rglob("*") if file.is_file()] == [Path(path)]


def test_rewriting_an_image_leaves_one_complete_file(tmp_path):
    for value in (0, 255):
        path, _, _ = write_image(tmp_path, 0, "sample", np.full((2, 2), value, np.uint8))
    assert [file.name for file in (tmp_path / "images").iterdir()] == ["sample-00000000.png"]
    with Image.open(tmp_path / path) as image:
        assert image.getpixel((0, 0)) == 255


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RecordError, match=r"pip install .samestep\[images\]"):
        write_image(tmp_path, 0, "sample", np.zeros((2, 2), np.uint8))


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "images").write_text("a file")
    with pytest.raises(RecordError, match=r"images/sample-00000000\.png cannot be written"):
        write_image(tmp_path, 0, "sample", np.zeros((2, 2), np.uint8))


def test_a_picture_is_a_copy_of_the_pixels():
    pixels = np.zeros((2, 3), np.uint8)
    picture = copy_picture(0, "sample", pixels)
    pixels[:] = 255
    assert picture.data == bytes(6)


def test_images_are_found_in_lines_of_events():
    lines = (
        b'{"event":"image","path":"images/a.png"}\n{"event":"scalars","values":{"image":1}}\n'
        b'{"event":"image","path":"torn'
    )
    assert image_paths(lines) == ["images/a.png"]


def picture(step, size=10):
    return Picture(step, "sample", "L", size, 1, bytes(size))


class Writer:
    """Records the images that it is called with; each call blocks until `allowed`."""

    def __init__(self):
        self.written, self.allowed = [], threading.Semaphore(0)

    def __call__(self, image, between):
        self.allowed.acquire()
        self.written.append((image.step, between))


def test_images_are_written_in_order_in_the_background():
    write = Writer()
    with closing(AsyncImageWriter(write)) as images:
        assert all(images.add(picture(step), between=step == 2) for step in range(4))
        assert write.written == []
        write.allowed.release(4)
        images.flush()
        assert write.written == [(0, False), (1, False), (2, True), (3, False)]


def test_images_are_dropped_while_the_queue_is_full():
    write = Writer()
    with closing(AsyncImageWriter(write, max_bytes=25)) as images:
        assert [images.add(picture(step), between=False) for step in range(4)] == [
            True,
            True,
            False,
            False,
        ]
        write.allowed.release(2)
        images.flush()
        assert images.add(picture(4), between=False)
        write.allowed.release(1)
    assert [step for step, _ in write.written] == [0, 1, 4]


def test_a_single_image_may_exceed_the_limit():
    write = Writer()
    write.allowed.release(1)
    with closing(AsyncImageWriter(write, max_bytes=5)) as images:
        assert images.add(picture(0, size=6), between=False)
    assert write.written == [(0, False)]


def test_close_writes_queued_images():
    write = Writer()
    images = AsyncImageWriter(write)
    for step in range(3):
        images.add(picture(step), between=False)
    write.allowed.release(3)
    images.close()
    assert len(write.written) == 3


def refuse(image, between):
    raise RecordError(f"no room for {image.step}")


def test_an_error_is_raised_once_by_the_next_call():
    images = AsyncImageWriter(refuse)
    images.add(picture(1), between=False)
    with pytest.raises(RecordError, match="no room for 1"):
        images.flush()
    images.flush()
    images.add(picture(2), between=False)
    images.close()  # it was tried now
    with pytest.raises(RecordError, match="no room for 2"):
        images.add(picture(3), between=False)


def test_any_error_of_the_writer_is_raised_and_nothing_waits_for_ever():
    def fail(picture, between):
        raise MemoryError("too large")

    images = AsyncImageWriter(fail)
    images.add(picture(1), between=False)
    with pytest.raises(MemoryError, match="too large"):
        images.flush()
    images.close()
