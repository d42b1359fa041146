"""The code blocks of the pages, and what a page says about the test of a block.

A comment that no reader sees may stand on the line before a block:

    <!-- test: in a run -->         python: inside `with samestep.init() as run`, with a model and
    an optimizer (see given.py) <!-- test: in a step -->        python: in the body of a loop, with
    a batch <!-- test: file train.py -->    python: not run, but written to a file, which commands
    of the page run <!-- test: run -->              sh: its commands are run; without this their
    arguments are only parsed <!-- test: run, status 1 -->    sh: and each ends with that exit
    status <!-- test: printed -->          text: exactly what the block before it printed, where ...
    stands for anything <!-- test: not run: REASON -->  the reason is frozen in test_pages.py

Python without a comment is run. All blocks of a page share their names, from the first to the last,
as well as a folder. A hidden block, `<!-- test: setup`, Python, `-->`, prepares what a reader has
already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts),
    ]
)
LANGUAGES = {"", "diff", "json", "python", "sh", "text", "yaml"}
NOT_RUN = "not run: "
WORDS = {
    "python": r"in a run|in a step|file \w+\.py",
    "sh": r"run(, status \d+)?",
    "text": "printed",
}

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<test>[^\n]*?) -->\n)?^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$"
    r"|^<!-- test: setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page; `line` is that of its first line, and `test` what the page says about its test."""

    page: Path
    line: int
    language: str
    text: str
    test: str = ""

    def __str__(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order. Raises `ValueError` for a language or a test that nobody knows."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        setup = match["setup"] is not None
        line = text.count("\n", 0, match.start("setup" if setup else "text")) + 1
        language = "python" if setup else match["language"].strip()
        found.append(
            Block(
                page,
                line,
                language,
                match["setup"] if setup else match["text"],
                match["test"] or "",
            )
        )
    for block in found:
        # a directive of the site
        if block.language not in LANGUAGES and not block.language.startswith("{"):
            raise ValueError(
                f"{block} is in {block.language!r}; expected one of {sorted(LANGUAGES)}"
            )
        known = re.fullmatch(
            WORDS.get(block.language, "(?!)"), block.test
        ) or block.test.startswith(NOT_RUN)
        if block.test and not known:
            raise ValueError(
                f"{block}: nobody knows the test {block.test!r} of a block in {block.language!r}"
            )
    if text.count("<!-- test:") != sum(bool(block.test) for block in found) + text.count(
        "<!-- test: setup\n"
    ):
        raise ValueError(
            f"{page} has a comment about a test that belongs to no block; put it on the line before one"
        )
    return found
