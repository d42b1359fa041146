"""The page's files: a strict content policy, no network, and readable colors."""

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
THEMES = ("light", "dark")
READABLE = 4.5  # WCAG 2.2, 1.4.3
VISIBLE = 3.0  # and 1.4.11, for graphics


@pytest.fixture
def page():
    return Markup((PAGE / "index.html").read_text())


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_file_refers_to_another_host(path):
    text = path.read_text()
    if path.name.startswith("uPlot"):
        text = re.sub(r"\A/\*!.*?\*/", "", text)  # the comment that its license requires
    assert not re.search(r"(?:https?:|wss?:)?//[\w-]+\.\w|url\(|@import", text)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup_or_code(path):
    text = path.read_text()
    assert not [word for word in MARKUP if word in text]
    assert not re.search(r"setAttribute\(\s*[\"'](?:style|on)", text)
    # the policy rejects style attributes; use `vars`
    assert not re.search(r"\bstyle:", text)
    assert "</script" not in text.lower()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_scripts_are_short_and_start_with_a_comment(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("// ")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_scripts_import_what_others_export(path):
    """A browser would show nothing else than "Connecting"."""
    for names, script in re.findall(
        r'^import \{([^}]*)\} from "\./(.*)";$', path.read_text(), re.MULTILINE
    ):
        other = (PAGE / script).read_text()
        exported = re.findall(
            r"^export (?:async )?(?:const|let|function\*?|class) (\w+)", other, re.MULTILINE
        )
        assert {name.split()[0] for name in names.split(",") if name.strip()} <= {*exported}


def test_html_has_no_inline_styles_or_scripts(page):
    assert not any("".join(texts) for texts in page.texts.values())
    for tag, attributes in page.elements:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag


def test_all_files_exist_and_are_used(page):
    used = {"index.html"} | {
        (attributes.get("src") or attributes.get("href") or "").removeprefix("page/")
        for tag, attributes in page.elements
        if tag != "a"
    } - {""}
    pending = [name for name in used if name.endswith(".js")]
    while pending:
        imported = set(re.findall(r'from "\./([\w.]+)"', (PAGE / pending.pop()).read_text())) - used
        used |= imported
        pending += imported
    existing = {path.name for path in PAGE.iterdir()}
    assert used <= existing
    assert existing - used == {"uPlot-1.6.32.LICENSE.txt"}


def test_the_license_file_names_the_version_of_the_library():
    assert "(v1.6.32)" in (PAGE / "uPlot.iife.min.js").read_text()[:80]


def test_landmarks_have_names(page):
    for tag, attributes in page.elements:
        if tag in {"nav", "section"}:
            assert attributes.get("aria-label"), attributes
    assert dict(page.elements)["html"]["lang"] == "en"


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable(theme):
    color = colors(theme)
    for text in ("ink", "soft", "faint", "accent", "good", "bad"):
        for ground in ("ground", "sheet", "sunk"):
            assert contrast(color[text], color[ground]) >= (
                VISIBLE if text == "faint" and ground == "sunk" else READABLE
            ), (text, ground)
    assert contrast(color["on-accent"], color["accent"]) >= READABLE


@pytest.mark.parametrize("theme", THEMES)
def test_colors_of_runs_differ_from_each_other_and_from_the_sheet(theme):
    """Colors of Okabe and Ito; the pale ones are last."""
    color = colors(theme)
    runs = [color[f"run-{number}"] for number in range(7)]
    assert len(set(runs)) == len(runs)
    assert all(contrast(run, color["sheet"]) >= VISIBLE for run in runs[:3])
    assert all(contrast(run, color["sheet"]) >= 2 for run in runs)


def colors(theme):
    """Return the colors of a theme by the names of their variables."""
    css = (PAGE / "page.css").read_text()
    colors = re.findall(r"--([\w-]+): (?:light-dark\()?(#[0-9a-f]{6})(?:, (#[0-9a-f]{6})\))?;", css)
    assert len(colors) > 20
    return {name: dark if theme == "dark" and dark else light for name, light, dark in colors}


def contrast(first, second):
    """Return the contrast of two colors, 1 to 21, as WCAG 2.2 defines it."""
    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(color):
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
