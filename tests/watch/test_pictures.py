from __future__ import annotations

import io

import pytest
from PIL import Image

from samestep.watch.pictures import media_type, recognized


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_an_image_is_known_by_its_first_bytes(kind):
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, kind)
    assert media_type(file.getvalue()) == f"image/{kind}"
    assert media_type(file.getvalue()[1:]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'>",
        b"<html>",
        b"RIFF1234WAVE",
        b"GIF",
        b"%PDF-1.7",
    ],
)
def test_all_else_is_none(data):
    assert media_type(data) is None


def test_only_the_first_piece_is_read_to_know_it():
    pieces = iter([b"\x89PNG\r\n\x1a\nxx", b"rest"])
    kind, whole = recognized(pieces)
    assert kind == "image/png"
    assert next(whole).startswith(b"\x89PNG")
    assert next(pieces) == b"rest"
    assert recognized(iter(()))[0] is None
