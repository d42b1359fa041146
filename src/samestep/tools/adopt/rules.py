"""The tables of rules.md: what is found in a script, and what takes its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

Kind = Literal["goes", "changes", "breaks", "unseen"]
KINDS: Final[tuple[Kind, ...]] = ("changes", "breaks", "goes", "unseen")
TABLE: Final = Path(__file__).with_name("rules.md")
CODE: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules.

    `write` takes the place of what was found, with names in braces for what the script has there;
    `say` is what to know about it, and `link` a page of the documentation.
    """

    section: str
    name: str
    kind: Kind
    where: str  # only there, such as in a lane
    patterns: tuple[str, ...]  # names of calls and attributes, or examples
    write: str
    say: str
    link: str


@cache
def rules() -> dict[str, Rule]:
    """Return the rules by name, in the order of the tables."""
    table: dict[str, Rule] = {}
    for section, (name, kind, *cells) in _rows():
        if kind in KINDS:
            where, examples, write, say, link = cells
            lines = write.strip("`").replace("<br>", "\n")
            patterns = tuple(CODE.findall(examples))
            table[name] = Rule(section, name, kind, where, patterns, lines, say, link)
    return table


@cache
def roles() -> dict[str, list[re.Pattern[str]]]:
    """Return the names by which roles are known: of calls, of what a call made, of variables."""
    rows = (cells for section, cells in _rows() if section == "Roles")
    return {role: [matcher(*CODE.findall(cell)) for cell in cells] for role, *cells in rows}


@cache
def calls(purpose: str) -> re.Pattern[str]:
    """Return what matches the names in a row of the last table."""
    (names,) = (cells[1] for section, cells in _rows() if [section, cells[0]] == ["Calls", purpose])
    return matcher(*CODE.findall(names))


def _rows() -> Iterator[tuple[str, list[str]]]:
    """Yield the section and the cells of each row, without the heads of the tables."""
    for section in TABLE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *lines = section.splitlines()
        rows = [line for line in lines if line.startswith("| ")]
        yield from (
            (title, [cell.strip() for cell in row.strip("|").split("|")]) for row in rows[1:]
        )


def matcher(*patterns: str) -> re.Pattern[str]:
    """Return what matches names in full, of which `*` is any part; without patterns, nothing."""
    texts = (re.escape(text).replace(r"\*", ".*") for text in patterns)
    return re.compile("|".join(texts) or "(?!)")
