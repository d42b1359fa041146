"""The code blocks of the documentation pages, and how each of them is tested.

An HTML comment on the line before a block, which readers do not see, selects its test:

| comment | block | test |
|---|---|---|
| `<!-- test: in a run -->` | python | run inside `with samestep.init()`, with given.py |
| `<!-- test: in a run, torch 2.9 -->` | python | the same, unless torch is older |
| `<!-- test: in a step -->` | python | the same in the body of a loop, with a batch |
| `<!-- test: file train.py -->` | python | written to a file, which commands of the page run |
| `<!-- test: file train.py, given -->` | python | the same, with the names of given.py |
| `<!-- test: run -->` | sh | its commands are run; otherwise their arguments are only parsed |
| `<!-- test: run, status 1 -->` | sh | the same, with this exit status |
| `<!-- test: run together -->` | sh | its commands run at once here, at an own address |
| `<!-- test: serve -->` | sh | its `samestep watch` serves a page, which is fetched |
| `<!-- test: printed -->` | text | equals the output of the previous block; ... matches anything |
| `<!-- test: not run: REASON -->` | python | compiled only; test_pages.py lists the reasons |

Python without a comment is run. All blocks of a page share their variables and a folder. A hidden
block (`<!-- test: setup`, Python code, `-->`) prepares what a reader has already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts),
        *ROOT.glob("skills/**/*.md"),
    ]
)
LANGUAGES = {"", "diff", "json", "python", "sh", "text", "yaml"}
NOT_RUN = "not run: "
COLUMNS = 100
WORDS = {
    "python": r"in a run(, torch \d+\.\d+)?|in a step|file \w+\.py(, given)?",
    "sh": r"run(, status \d+| together)?|serve",
    "text": "printed",
}

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<test>[^\n]*?) -->\n)?"
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$"
    r"|^<!-- test: setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, the number of its first line, and its test (see the module)."""

    page: Path
    line: int
    language: str
    text: str
    test: str = ""

    def __str__(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order. Raises `ValueError` for an unknown language or test."""
    text = page.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        setup = match["setup"] is not None
        line = text.count("\n", 0, match.start("setup" if setup else "text")) + 1
        language = "python" if setup else match["language"].strip()
        blocks.append(
            Block(
                page,
                line,
                language,
                match["setup"] if setup else match["text"],
                match["test"] or "",
            )
        )
    for block in blocks:
        # a directive of the site
        if block.language not in LANGUAGES and not block.language.startswith("{"):
            raise ValueError(
                f"{block}: language must be one of {sorted(LANGUAGES)}, got {block.language!r}"
            )
        is_known = re.fullmatch(
            WORDS.get(block.language, "(?!)"), block.test
        ) or block.test.startswith(NOT_RUN)
        if block.test and not is_known:
            raise ValueError(
                f"{block}: unknown test {block.test!r} for a block in {block.language!r}"
            )
    if text.count("<!-- test:") != sum(bool(block.test) for block in blocks) + text.count(
        "<!-- test: setup\n"
    ):
        raise ValueError(
            f"{page} has a test comment without a block; put it on the line before the block"
        )
    return blocks


def long_lines(block: Block) -> list[str]:
    """Return the page and number of each line that a reader has to scroll sideways."""
    return [
        f"{replace(block, line=number)}"
        for number, line in enumerate(block.text.splitlines(), start=block.line)
        if len(line) > COLUMNS
    ]
