"""What one part of the examination found: facts, and what to say about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Tone = Literal["good", "note", "change"]


@dataclass(frozen=True)
class Finding:
    """One sentence, and the command or option that `mend`s it: "change" where a run would fail or crawl, "note" where it may be slower."""

    tone: Tone
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Section:
    """Facts by name, as JSON has them: None where the system does not tell. Names end in their unit, such as `_bytes`."""

    name: str
    facts: Mapping[str, Any]
    findings: Sequence[Finding]


def good(text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("good", text)


def note(text: str, mend: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding("note", text, mend)


def change(text: str, mend: str) -> Finding:
    """Return a finding that has to be mended."""
    return Finding("change", text, mend)


def some(count: float, noun: str) -> str:
    """Write a number of things."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"
