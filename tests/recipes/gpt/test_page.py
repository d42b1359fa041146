from __future__ import annotations

import numpy as np
import pytest

from recipes.gpt.page import COLUMNS, MOST_LINES, picture


def height(*texts):
    return picture(texts).shape[0]


def test_texts_are_drawn_below_each_other():
    made = picture(["def f():\n\treturn 1", "The second."])
    assert made.dtype == np.uint8
    assert made.shape[2] == 3
    assert made.min() < 100 < made.max()
    assert made.shape[0] > height("The second.")


def test_long_lines_are_wrapped_and_long_texts_cut():
    one, wide, cut = ("a" * COLUMNS, "a" * (2 * COLUMNS), "a\n" * 500)
    assert picture([wide]).shape[1] <= picture([one]).shape[1] + 1
    assert height(one) < height(wide) < height(cut) == height("a\n" * MOST_LINES)


@pytest.mark.parametrize("text", ["", "\x00\x07\r\n", "\u2028é漢字\ufffd"])
def test_any_text_can_be_drawn(text):
    assert picture([text, text]).size > 0
