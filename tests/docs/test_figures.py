"""What README, Performance and GPUs say about speed is what docs/figures.json has.

A new measurement changes that file first: the text of a claim, the values of the table that it
summarizes, and when, where and with which command they were measured.
"""

from __future__ import annotations

import json
import re
from datetime import date

import pytest

from tests.docs.blocks import ROOT
from tests.docs.commands import check, commands_of

FIGURES = json.loads((ROOT / "docs" / "figures.json").read_text())
# the parts of pages that may have no other figures, from one text to another
CLAIMS = {
    "README.md": ("\n## Speed\n", "\n## "),
    "docs/performance.md": ("\nIn short, ", "\n## "),
    "docs/gpu.md": ("\n| | images per second |\n", "\n\n"),
}
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def part_of(page):
    """Return the claims of a page, in one line."""
    begin, end = CLAIMS[page]
    text = (ROOT / page).read_text().partition(begin)[2].partition(end)[0]
    assert text, f"{page} has no part that begins with {begin!r}"
    return " ".join(text.split())


def number(text):
    return float(text.replace(",", ""))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["text"])
def test_a_claim_is_on_its_pages_and_sums_up_the_values_of_a_table(figure):
    for page in figure["pages"]:
        assert figure["text"] in part_of(page)
    is_of_gpu = figure["machine"].startswith("one NVIDIA")
    page = ROOT / "docs" / ("gpu.md" if is_of_gpu else "performance.md")
    tables = [line for line in page.read_text().splitlines() if "|" in line]
    values = figure.get("values") or figure["ratio"]
    cells = {text for line in tables for text in NUMBER.findall(line)}
    assert [value for value in values if value not in cells] == []
    claimed = NUMBER.findall(figure["text"])
    if "ratio" in figure:
        ours, theirs = map(number, values)
        assert claimed == [f"{ours / theirs:.2f}"]
    else:
        numbers = [*map(number, values)]
        assert sorted(map(number, claimed)) == sorted({min(numbers), max(numbers)})
    assert date.fromisoformat(figure["date"]) <= date.today()  # noqa: DTZ011  a day is enough
    assert re.fullmatch(r"[0-9a-f]{8}", figure["commit"])
    assert figure["machine"]
    for words in commands_of(figure["command"]):
        check(words)


@pytest.mark.parametrize("page", CLAIMS)
def test_a_page_claims_nothing_else(page):
    text = part_of(page)
    for figure in FIGURES:
        if page in figure["pages"]:
            text = text.replace(figure["text"], "")
    # numbers that name something: a rate of a link, a width, a job, a version
    text = re.sub(r"\b\d+ (Gbit/s|GB|bits|lanes?)|fp16|H200|[A-Z]\w*-\d|\]\([^)]*\)", "", text)
    assert NUMBER.findall(text) == []
