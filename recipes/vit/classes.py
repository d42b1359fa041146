"""Names of classes: those of folders and lists, and of the files in which ImageNet has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.image_files import ImageError, composed, printable, read_text

WNID = re.compile(r"(n\d{8})(?:\s+\d+)?(?:\s+(.*))?")  # of WordNet, a number, names
EXPECTED = "a name per line, lines such as 'n01440764 tench', or JSON of names by index"


@dataclass
class Classes:
    """The names of each class, in the order of classes, and the class of each name."""

    names: list[tuple[str, ...]]
    labels: dict[str, int] = field(init=False)
    ambiguous: set[str] = field(init=False)  # such as ImageNet's two cranes

    def __post_init__(self) -> None:
        self.labels, self.ambiguous = {}, set()
        for label, names in enumerate(self.names):
            for name in map(composed, names):
                if self.labels.setdefault(name, label) != label:
                    self.ambiguous.add(name)

    def label(self, name: str) -> int | None:
        """Return the class with a name, None if there is none. Raises `ImageError` if two have."""
        if name in self.ambiguous:
            first = self.names[self.labels[name]][0]
            raise ImageError(f"{name} is the name of several classes, such as {first}; use others")
        return self.labels.get(name)

    def used(self, folders: Iterable[str]) -> tuple[str, ...]:
        """Return one name of each class, that of its folder if it has one."""
        found = {label: name for name in folders if (label := self.label(name)) is not None}
        return tuple(found.get(label, names[0]) for label, names in enumerate(self.names))

    def shown(self, used: Sequence[str] | None) -> list[str]:
        """Return the name of each class for people: the used one, and another one if it has any."""
        shown = []
        for names, name in zip(self.names, used or self.used(()), strict=True):
            others = [other for other in names if other != name]
            shown.append(f"{name} ({others[0]})" if others else name)
        return shown


def find_classes(given: Sequence[str] | None, folders: Sequence[str]) -> Classes:
    """Return the classes that are given by names or by a file of them; without any, the folders.

    Folders that are all named by WordNet, as ImageNet's are, may be given as many other names: both
    are in the same order. Raises `ImageError` for a file that cannot be read.
    """
    if not given:
        return Classes([(name,) for name in folders])
    is_file = len(given) == 1 and Path(given[0]).suffix in {".csv", ".json", ".tsv", ".txt"}
    classes = Classes(read_classes(Path(given[0])) if is_file else [(name,) for name in given])
    are_wnids = len(folders) == len(classes.names) and all(map(WNID.fullmatch, folders))
    if are_wnids and not any(name in classes.labels for name in folders):
        pairs = zip(sorted(folders), classes.names, strict=True)
        return Classes([(wnid, *names) for wnid, names in pairs])
    return classes


def read_classes(path: Path) -> list[tuple[str, ...]]:
    """Read a file of classes, such as LOC_synset_mapping.txt or class_index.json."""
    text, entries = read_text(path), list[Any]()
    if path.suffix == ".json":
        try:
            entries = _in_order(json.loads(text))
        except (RecursionError, ValueError) as error:
            raise ImageError(f"{printable(path)}: expected {EXPECTED}: {error}") from None
    else:
        entries = [line.strip() for line in text.split("\n") if line.strip()]
    names = [_names(entry) for entry in entries]
    if not names or not all(names):
        raise ImageError(f"{printable(path)}: expected {EXPECTED}, got {text[:80]!r}")
    return names


def _in_order(content: Any) -> list[Any]:
    """Return the classes of JSON: a list, names by index, or indices by name."""
    if not isinstance(content, dict):
        return content if isinstance(content, list) else []
    pairs = list(content.items())
    if all(type(value) is int for value in content.values()):
        pairs = [(str(index), name) for name, index in pairs]
    expected = list(map(str, range(len(pairs))))
    if sorted(index for index, _ in pairs) != sorted(expected):
        raise ValueError(f"indices must be 0 to {len(pairs) - 1}, each once")
    by_index = dict(pairs)
    return [by_index[index] for index in expected]


def _names(entry: Any) -> tuple[str, ...]:
    """Return the names of a class: of WordNet, all as they are written, and each of them."""
    if isinstance(entry, list) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    if not isinstance(entry, str):
        return ()
    match = WNID.fullmatch(entry)
    wnid, written = (match[1], match[2] or "") if match else ("", entry)
    return tuple(dict.fromkeys(filter(None, (wnid, written, *written.split(", ")))))
