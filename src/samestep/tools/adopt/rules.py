"""The table of rules.md: what is found in a script, and what takes its place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

Kind = Literal["goes", "changes", "breaks", "unseen"]
TABLE: Final = Path(__file__).with_name("rules.md")
KINDS: Final[tuple[Kind, ...]] = ("goes", "changes", "breaks", "unseen")
COLUMNS: Final = 7
_CODE: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    `write` is the text that takes the place of what was found, with names in braces for what the
    script has there; `say` is what to know about it, and `link` a page of the documentation.
    """

    section: str
    name: str
    kind: Kind
    where: str  # only there, such as in a lane; see `Scan.is_where`
    found: str  # names of calls and attributes, or examples, in backticks
    write: str
    say: str
    link: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names by which it is found, if no finder does that."""
        return tuple(_CODE.findall(self.found))


@cache
def rules() -> dict[str, Rule]:
    """Return the rules of the table by name, in its order."""
    found: dict[str, Rule] = {}
    section = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        kind = next((kind for kind in KINDS if cells[1:2] == [kind]), None)
        if kind and len(cells) == COLUMNS:
            name, _, where, examples, write, say, link = cells
            lines = write.strip("`").replace("<br>", "\n")
            found[name] = Rule(section, name, kind, where, examples, lines, say, link)
    return found


def matcher(*patterns: str) -> re.Pattern[str]:
    """Return what matches names in full, of which `*` is any part."""
    return re.compile("|".join(re.escape(text).replace(r"\*", ".*") for text in patterns))
