"""The page's files: what a strict content policy, a network that is away and a reader's eyes ask of them."""

from __future__ import annotations

import re

import pytest

from samestep.watch.report import PAGE
from tests.watch.markup import Markup

OURS = sorted(path for path in PAGE.glob("*.js") if not path.name.startswith("uPlot"))
TEXTS = sorted(path for path in PAGE.iterdir() if path.suffix in {".css", ".html", ".js"})
MARKUP = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "createContextualFragment",
    "DOMParser",
    "srcdoc",
    "eval(",
    "Function(",
)
THEMES = ("light", "dark", "dark by the system")
READABLE = 4.5  # WCAG 2.2, 1.4.3
VISIBLE = 3.0  # and 1.4.11, for what is no text


@pytest.fixture
def page():
    return Markup((PAGE / "index.html").read_text())


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_file_names_another_host(path):
    text = path.read_text()
    if path.name.startswith("uPlot"):
        text = re.sub(r"\A/\*!.*?\*/", "", text)  # the comment that its license asks for
    assert not re.search(r"(?:https?:|wss?:)?//[\w-]+\.\w|url\(|@import", text)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_of_texts(path):
    text = path.read_text()
    assert not [word for word in MARKUP if word in text]
    assert not re.search(r"setAttribute\(\s*[\"'](?:style|on)", text)
    # as an attribute, which the policy refuses; `vars` is its place
    assert not re.search(r"\bstyle:", text)
    assert "</script" not in text.lower()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_what_they_are_about(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines)) <= 140
    assert lines[0].startswith("// ")


def test_html_has_nothing_inline(page):
    assert not any("".join(texts) for texts in page.texts.values())
    for tag, attributes in page.elements:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag


def test_all_files_are_used_and_all_used_are_there(page):
    used = {"index.html"} | {
        (given.get("src") or given.get("href") or "").removeprefix("page/")
        for tag, given in page.elements
        if tag != "a"
    } - {""}
    found = [name for name in used if name.endswith(".js")]
    while found:
        imported = set(re.findall(r'from "\./([\w.]+)"', (PAGE / found.pop()).read_text())) - used
        used |= imported
        found += imported
    there = {path.name for path in PAGE.iterdir()}
    assert used <= there
    assert there - used == {"uPlot-1.6.32.LICENSE.txt"}


def test_the_library_is_the_version_that_its_license_file_names():
    assert "(v1.6.32)" in (PAGE / "uPlot.iife.min.js").read_text()[:80]


def test_every_control_of_the_frame_has_a_name(page):
    for tag, attributes in page.elements:
        if tag in {"nav", "section"}:
            assert attributes.get("aria-label"), attributes
    assert dict(page.elements)["html"]["lang"] == "en"


@pytest.mark.parametrize("theme", THEMES)
def test_texts_can_be_read(theme):
    colour = colours(theme)
    for text in ("ink", "soft", "faint", "accent", "good", "bad"):
        for ground in ("ground", "sheet", "sunk"):
            assert contrast(colour[text], colour[ground]) >= (
                VISIBLE if text == "faint" and ground == "sunk" else READABLE
            ), (text, ground)
    assert contrast(colour["on-accent"], colour["accent"]) >= READABLE


@pytest.mark.parametrize("theme", THEMES)
def test_colours_of_runs_differ_from_each_other_and_from_the_sheet(theme):
    """Okabe and Ito's colours; the pale ones come last, and the value stands beside each curve as well."""
    colour = colours(theme)
    runs = [colour[f"run-{number}"] for number in range(7)]
    assert len(set(runs)) == len(runs)
    assert all(contrast(run, colour["sheet"]) >= VISIBLE for run in runs[:3])
    assert all(contrast(run, colour["sheet"]) >= 2 for run in runs)


def test_both_ways_to_dark_are_the_same():
    assert colours("dark") == colours("dark by the system")


def colours(theme):
    """Return the colours of a theme by the names of their variables."""
    blocks = re.findall(r"(:root[^{]*)\{([^}]*)\}", (PAGE / "page.css").read_text())
    assert len(blocks) == len(THEMES)
    light, system, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for _, block in blocks
    )
    return {"light": light, "dark": light | dark, "dark by the system": light | system}[theme]


def contrast(one, other):
    """Return the contrast of two colours, 1 to 21, as WCAG 2.2 defines it."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
