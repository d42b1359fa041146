"""Check that the relative links and anchors in all documents resolve."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "recipes", "skills", "benchmarks")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(d for f in FOLDERS for d in ROOT.glob(f"{f}/**/*.md"))])
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=\"([^\"]+)\"", re.MULTILINE
)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
ANCHOR = re.compile(r"(?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def anchors(text):
    """Return the anchors of a document as GitHub names them, with numbers if they repeat."""
    names = set(ANCHOR.findall(text))
    for heading in HEADING.findall(
        re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        numbered = (f"{slug}-{n}" if n else slug for n in range(len(names) + 1))
        names.add(next(name for name in numbered if name not in names))
    return names


def broken_links(document):
    links = (
        first or second or third
        for first, second, third in LINK.findall(CODE.sub("", document.read_text()))
    )
    broken = []
    for link in links:
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (
            anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text()))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    assert broken_links(document) == []


def test_the_check_finds_broken_links(tmp_path):
    (tmp_path / "other.md").write_text(
        "# A `tree`, and *more*\n## Twice\n## Twice\n```\n# no heading\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-tree-and-more 'title') [c](other.md#twice-1)\n"
        "[d](#here) [e](https://example.org/x)\n# Here\n`[f](not-a-link.md)` ![g](missing.png)\n"
        "[h](other.md#twice-2) [i](#no-heading) [j](other.md#no-heading)\n"
        '```\n[k](in-code.md)\n```\n[l][ref]\n\n[ref]: gone.md\n<a href="away.md">m</a>\n'
    )
    assert broken_links(page) == [
        "missing.png",
        "other.md#twice-2",
        "#no-heading",
        "other.md#no-heading",
        "gone.md",
        "away.md",
    ]
