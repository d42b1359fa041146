"""Parts of a record that was sent somewhere: files named by which bytes of the run's events they hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER: Final = "record"
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.jsonl", re.ASCII)


@dataclass(frozen=True, order=True)
class Part:
    """The bytes [first, end) of a run's events: whole lines."""

    first: int
    end: int

    @property
    def path(self) -> str:
        """Where it lies, relative to the run's place."""
        return f"{FOLDER}/{self.first:020d}-{self.end:020d}.jsonl"


def parts_of(sizes: dict[str, int]) -> list[Part]:
    """Return the whole parts among files, given their sizes by name, in order; anything else in their folder counts for nothing."""
    parts = (
        Part(int(match[1]), int(match[2])) for name in sizes if (match := _NAME.fullmatch(name))
    )
    return sorted(
        part for part in parts if part.end - part.first == sizes[part.path.rpartition("/")[2]] > 0
    )


def part_with(offset: int, parts: Iterable[Part]) -> Part | None:
    """Return the part that holds the byte at `offset` and reaches farthest, None where there is none."""
    return max(
        (part for part in parts if part.first <= offset < part.end),
        key=lambda part: part.end,
        default=None,
    )


def reach(parts: Iterable[Part]) -> int:
    """Return up to which byte parts hold all from the first on."""
    end = 0
    for part in sorted(parts):
        if part.first > end:
            break
        end = max(end, part.end)
    return end


def superfluous(parts: Iterable[Part]) -> list[Part]:
    """Return the parts whose bytes another one holds, too."""
    left, end = [], 0
    for part in sorted(set(parts), key=lambda part: (part.first, -part.end)):
        if part.end <= end:
            left.append(part)
        end = max(end, part.end)
    return left
