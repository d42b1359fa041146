"""The calls of a process that changed files, and what a disk may hold when the power is lost.

Only what was synced is certain: the content of a file after `fsync`, and the names in a folder
after `fsync` of that folder. Everything else may be there, be lost, or be there in part.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

Entries = dict[str, Any]  # files and folders by name, None for a name that is removed
HEADER = struct.Struct("=16s7q")
BLOCK = 512
# of what is not synced: all is lost, all is there, only names, only content, or a random mixture
LOSSES = ("all", "none", "content", "names", "some")


class Call(NamedTuple):
    """A call with its paths relative to the root, and the data that it wrote; `error` if failed."""

    name: str
    is_worker: int  # 0 for the process that sends the record
    error: int
    offset: int
    new_size: int  # -1 if it stays
    path: str
    other: str
    data: bytes

    @property
    def is_sync(self) -> bool:
        """Whether it makes something durable."""
        return self.name in {"fsync", "fdatasync"}


def read_calls(path: Path) -> Iterator[Call]:
    """Yield the calls that `calls.c` recorded."""
    content, start = path.read_bytes() if path.exists() else b"", 0
    while start < len(content):
        name, *numbers = HEADER.unpack_from(content, start)
        start += HEADER.size
        texts = []
        for size in numbers[4:]:
            texts.append(content[start : start + size])
            start += size
        path_text, other, data = texts
        yield Call(
            name.rstrip(b"\0").decode(), *numbers[:4], path_text.decode(), other.decode(), data
        )


@dataclass
class File:
    """A file: its synced content, and changes: data at an offset, or None for a new size."""

    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        """Make the content durable."""
        self.synced, self.changes = self.content(self.changes), []

    def content(self, changes: Sequence[tuple[int, bytes | None]]) -> bytes:
        """Return the content after some changes; bytes that were never written are zero."""
        content = bytearray(self.synced)
        for offset, data in changes:
            end = offset + len(data or b"")
            content += bytes(max(0, end - len(content)))
            if data is None:
                del content[offset:]
            else:
                content[offset:end] = data
        return bytes(content)

    def after(self, loss: str, chance: random.Random) -> bytes:
        """Return what may be left."""
        if loss == "all":
            return self.synced
        current = self.content(self.changes)
        if loss == "content":  # a file system may have stored the new size
            return (self.synced + bytes(len(current)))[
                : chance.choice([len(current), len(self.synced)])
            ]
        if loss == "some":
            return self.content(
                [change for change in map(chance.choice, map(_torn, self.changes)) if change]
            )
        return current


def _torn(change: tuple[int, bytes | None]) -> list[tuple[int, bytes | None] | None]:
    """Return what may be left of a change: all, nothing, its beginning, its end or its blocks."""
    offset, data = change
    if not data:
        return [change, None]
    half = len(data) // 2
    zeros = bytes(min(BLOCK, half)) + data[min(BLOCK, half) :]
    return [
        change,
        change,
        None,
        (offset, data[:half]),
        (offset + half, data[half:]),
        (offset, zeros),
    ]


@dataclass
class Folder:
    """A folder: its synced names, and the changes since then: names and what they became."""

    synced: Entries = field(default_factory=dict)
    entries: Entries = field(default_factory=dict)
    changes: list[Entries] = field(default_factory=list)

    def find(self, path: str) -> Any:
        """Return the file or folder at a relative path, None if there is none."""
        name, _, rest = path.partition("/")
        entry = self.entries.get(name) if name else self
        return entry.find(rest) if rest and entry is not None else entry

    def change(self, names: Entries) -> None:
        """Change several names in one step; None removes a name."""
        self.changes.append(names)
        self.entries = _changed(self.entries, [names])

    def sync(self) -> None:
        """Make the names durable, but not the content of files."""
        self.synced, self.changes = dict(self.entries), []

    def write(self, path: Path, loss: str, chance: random.Random) -> None:
        """Write what may be left to a new folder."""
        entries = self.entries if loss in {"none", "content"} else self.synced
        if loss == "some":
            entries = _changed(
                self.synced, [names for names in self.changes if chance.random() < 0.6]
            )
        path.mkdir()
        for name, entry in entries.items():
            if isinstance(entry, Folder):
                entry.write(path / name, loss, chance)
            else:
                (path / name).write_bytes(entry.after(loss, chance))


def _changed(entries: Entries, changes: Sequence[Entries]) -> Entries:
    merged = reduce(or_, changes, entries)
    return {name: entry for name, entry in merged.items() if entry is not None}


def replay(calls: Sequence[Call]) -> Folder:
    """Return the root folder, which is durable itself, after calls."""
    root = Folder()
    for call in calls:
        parent, _, name = call.path.rpartition("/")
        entry = root.find(call.path)
        if call.error:
            continue
        if call.is_sync:
            entry.sync()
        elif names := _renamed(call, name, entry):
            root.find(parent).change(names)
        elif isinstance(entry, File):
            entry.changes += [(call.new_size, None)] if call.new_size >= 0 else []
            entry.changes += [(call.offset, call.data)] if call.data else []
    return root


def _renamed(call: Call, name: str, entry: Any) -> Entries:
    """Return the names in a folder that a call changes."""
    if call.name in {"rename", "link"}:
        folder, _, other = call.other.rpartition("/")
        if f"{folder}/{name}" != call.path:
            raise ValueError(f"expected a {call.name} within {folder}, got {call.path}")
        return {other: entry} if call.name == "link" else {name: None, other: entry}
    if call.name in {"unlink", "rmdir"}:
        return {name: None}
    if call.name == "mkdir":
        return {name: Folder()}
    return {name: File()} if call.name == "open" and entry is None else {}
