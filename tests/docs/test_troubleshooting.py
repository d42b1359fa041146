"""docs/troubleshooting.md has an entry for every exception and quotes only existing messages."""

from __future__ import annotations

import ast
import re

from samestep import errors
from samestep.host import parse
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = ROOT / "src" / "samestep"
ANY = "…"
LEAST_LETTERS = 8  # of a quote, so that it is distinctive
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def texts_of(source: str) -> list[str]:
    """Return the strings in a source; in f-strings, … replaces each value."""
    texts, parts = [], set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts |= set(map(id, node.values))
            texts.append(
                "".join(
                    part.value if isinstance(part, ast.Constant) else ANY for part in node.values
                )
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            texts.append(node.value)
    return texts


def occurs(message: str, texts: list[str]) -> bool:
    """Return whether a text contains the message, in which … matches anything."""
    pattern = re.compile(".*".join(map(re.escape, message.strip(ANY).split(ANY))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_every_quoted_message_exists():
    texts = [text for path in sorted(SOURCES.rglob("*.py")) for text in texts_of(path.read_text())]
    short = [message for message in MESSAGES if len(re.findall(r"\w", message)) < LEAST_LETTERS]
    assert short == []
    assert [message for message in MESSAGES if not occurs(message, texts)] == []


def test_every_exception_has_an_entry():
    classes = {
        name
        for name, member in vars(errors).items()
        if isinstance(member, type) and issubclass(member, Exception)
    }
    headings = re.findall(r"^##+ (\w+Error)$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(classes)
    assert len(MESSAGES) > len(classes)


def test_a_message_that_does_not_exist_is_found():
    texts = texts_of(
        'raise ValueError(f"lanes={lanes} was given; " "expected more")\nshort = f"{a}"'
    )
    assert occurs("lanes=… was given; expected more", texts)
    assert occurs("… was given; …", texts)
    assert not occurs("lanes=… was given; expected fewer", texts)
    assert not occurs("expected more … lanes=", texts)
