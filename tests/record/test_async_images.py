from __future__ import annotations

import threading
from contextlib import closing

import pytest

from samestep.errors import RecordError
from samestep.record.images import AsyncImageWriter, Picture


def picture(step, size=10):
    return Picture(step, "sample", "L", size, 1, bytes(size))


class Writer:
    """Writes down which images it is given, each when it is let."""

    def __init__(self):
        self.written, self.let = [], threading.Semaphore(0)

    def __call__(self, image, between):
        self.let.acquire()
        self.written.append((image.step, between))


def test_images_are_written_in_order_beside_the_one_who_adds_them():
    write = Writer()
    with closing(AsyncImageWriter(write)) as images:
        assert all(images.add(picture(step), between=step == 2) for step in range(4))
        assert write.written == []
        write.let.release(4)
        images.flush()
        assert write.written == [(0, False), (1, False), (2, True), (3, False)]


def test_what_is_too_much_is_dropped_until_there_is_room():
    write = Writer()
    with closing(AsyncImageWriter(write, max_bytes=25)) as images:
        assert [images.add(picture(step), between=False) for step in range(4)] == [
            True,
            True,
            False,
            False,
        ]
        write.let.release(2)
        images.flush()
        assert images.add(picture(4), between=False)
        write.let.release(1)
    assert [step for step, _ in write.written] == [0, 1, 4]


def test_one_image_is_taken_however_large_it_is():
    write = Writer()
    write.let.release(1)
    with closing(AsyncImageWriter(write, max_bytes=5)) as images:
        assert images.add(picture(0, size=6), between=False)
    assert write.written == [(0, False)]


def test_closing_writes_what_waits():
    write = Writer()
    images = AsyncImageWriter(write)
    for step in range(3):
        images.add(picture(step), between=False)
    write.let.release(3)
    images.close()
    assert len(write.written) == 3


def refuse(image, between):
    raise RecordError(f"no room for {image.step}")


def test_an_error_reaches_the_next_caller_once():
    images = AsyncImageWriter(refuse)
    images.add(picture(1), between=False)
    with pytest.raises(RecordError, match="no room for 1"):
        images.flush()
    images.flush()
    images.add(picture(2), between=False)
    images.close()  # it was tried now
    with pytest.raises(RecordError, match="no room for 2"):
        images.add(picture(3), between=False)
