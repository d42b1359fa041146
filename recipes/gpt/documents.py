"""The texts of a source: files of a folder, lines of JSON, or what is installed with Python.

A document has a name, its path in the folder, which decides whether it is held out.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

from recipes.gpt.config import DataSettings
from recipes.settings import SettingsError

LINES = ".jsonl"
NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
NAME = re.compile(r"[A-Za-z0-9_-]+")


class TextError(SettingsError):
    """Texts or their tokens cannot be used."""


class Document(NamedTuple):
    """A text, and a name that no other document of its source has."""

    name: str
    text: str

    @property
    def hashes(self) -> tuple[int, int]:
        """Two numbers that follow from the name: one for the split, and one for the order."""
        digest = sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


class Documents(Protocol):
    """Yields the documents of a source, in the same order each time."""

    def __call__(self) -> Iterator[Document]: ...


def sources_of(settings: DataSettings) -> dict[str, Documents]:
    """Return the documents of each source by its name. Raises `TextError`."""
    if settings.path is not None and settings.sources is not None:
        raise TextError("data.path and data.sources are both set; set one of them")
    if settings.path is None and settings.sources is None:
        return {"code": standard_library, "prose": descriptions}
    folders = settings.sources or {"text": settings.path}
    for name in folders:
        if not NAME.fullmatch(name) or name == "all":  # that of the scores of all sources
            raise TextError(
                f"data.sources: a name has letters, digits, - and _, and is not all, got {name!r}"
            )
    return {name: partial(folder, path, settings.endings) for name, path in folders.items() if path}


def folder(root: Path, endings: tuple[str, ...] | None) -> Iterator[Document]:
    """Yield the documents in files of a folder. Raises `TextError` for one that is no text."""
    if not root.is_dir():
        raise TextError(f"{root} is no folder; expected one with text files or {LINES} files")
    for path in files(root):
        if endings is not None and not path.name.endswith(endings):
            continue
        name = path.relative_to(root).as_posix()
        try:
            if path.suffix == LINES:
                with path.open("rb") as file:
                    yield from lines(path, name, file)
            else:
                yield Document(name, path.read_bytes().decode())
        except UnicodeDecodeError as error:
            raise TextError(
                f"{path} is no text in UTF-8 ({error.reason}); convert or remove it, or name the "
                "endings to read, as in data.endings=[.txt]"
            ) from None
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error.strerror}") from None


def lines(path: Path, name: str, file: Iterable[bytes]) -> Iterator[Document]:
    """Yield the document in the field `text` of each line of JSON."""
    for number, line in enumerate(file, 1):
        text = line.decode().strip()
        if not text:
            continue
        try:
            value = json.loads(text)["text"]
            value.encode()  # JSON may have half of a surrogate pair, or no text
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise TextError(
                f'{path}, line {number}: expected JSON such as {{"text": "..."}}, got {text[:60]!r}'
            ) from None
        yield Document(f"{name}:{number}", value)


def files(root: Path) -> Iterator[Path]:
    """Yield the files in a folder and in those within, by path, except hidden ones."""
    try:
        with os.scandir(root) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise TextError(f"{root} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def standard_library() -> Iterator[Document]:
    """Yield the modules of Python's standard library, without those for tests."""
    yield from _installed(Path(sysconfig.get_path("stdlib")), (".py",), NOT_CODE)


def descriptions() -> Iterator[Document]:
    """Yield the descriptions and the documentation of installed packages."""
    # of several versions, the first is imported
    found = {dist.metadata["Name"]: dist for dist in reversed([*metadata.distributions()])}
    for name in sorted(filter(None, found)):
        fields = found[name].metadata
        payload = fields.get_payload()  # older formats have a field instead
        text = (
            payload if isinstance(payload, str) and payload.strip() else fields.get("Description")
        )
        if text:
            yield Document(f"description/{name}", text.encode("utf-8", "replace").decode())
    yield from _installed(Path(sysconfig.get_path("purelib")), (".md", ".rst"), {"__pycache__"})


def _installed(root: Path, endings: tuple[str, ...], left_out: set[str]) -> Iterator[Document]:
    """Yield files of the installation, of which those in other encodings are left out."""
    for path in files(root):
        if path.name.endswith(endings):
            name = path.relative_to(root)
            if not left_out.intersection(name.parts):
                with suppress(OSError, UnicodeDecodeError):
                    yield Document(name.as_posix(), path.read_bytes().decode())
