"""What loader processes do not share with the script: changed attributes, positions of open files.

A loader process is a copy of this process. It does not see what the script changes in a data set
later, and files that were open before have one position in all of these processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from inspect import getattr_static
from io import IOBase
from itertools import islice
from tarfile import TarFile
from typing import Any, Final, NamedTuple
from zipfile import ZipFile

import torch

from samestep.data.search import Reference, own_dict, walk
from samestep.errors import DataError
from samestep.torch_internals import versions_of
from samestep.user_code import is_installed

MOST_OWNERS: Final = 64  # objects whose attributes are compared
MOST_FILES: Final = 64
FEW_ENTRIES: Final = 16  # of a list or dict that is compared
SCALARS: Final = (bool, int, float, complex, str, bytes, type(None), Enum)
MISSING: Final = object()


class AttributeCheck:
    """Compares the plain attributes of what the `roots` hold with those at its creation.

    Plain are numbers, texts, short lists and dicts of them, and tensors. Classes of installed
    packages have caches and counters, so that only their public numbers and texts are compared.
    """

    def __init__(self, **roots: Any) -> None:
        inside = (
            (reference.name, value)
            for reference, value, *_ in walk(**roots)
            if _is_held(reference, roots) and own_dict(value)
        )
        owners = list(islice(inside, MOST_OWNERS))
        self._owners = [
            (name, owner, is_own, plain_attributes(owner, is_own=is_own))
            for name, owner in owners
            for is_own in [not is_installed(type(owner))]
        ]
        self._of_loading: set[str] = set()  # names of attributes that loading a sample changes

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each attribute that has changed, its former and its current value."""
        for name, owner, is_own, before in self._owners:
            after = plain_attributes(owner, is_own=is_own)
            if after == before:
                continue
            for attribute, value in after.items():
                former = before.get(attribute, MISSING)
                if former is MISSING:  # perhaps an attribute of the class until now
                    former = _plain(getattr_static(type(owner), attribute, MISSING), is_own=True)
                if former is not MISSING and former != value:
                    yield f"{name}.{attribute}", former, value

    def refuse_changes(self, load_sample: Callable[[int], object]) -> None:
        """Raise `DataError` if an attribute has changed, other than by loading a sample.

        `load_sample`, of the index 0 or -1, shows which ones these are, such as a count of loads:
        each loader process has its own, and what the body of the loop loads from the data set
        changes that of the script.
        """
        changed = {
            name: (former, value)
            for name, former, value in self.changes()
            if name not in self._of_loading
        }
        if changed:
            self._note_loading(load_sample)
        for name, (former, value) in changed.items():
            if name in self._of_loading:
                continue
            raise DataError(
                f"the attribute {name} changed from {former!s:.80} to {value!s:.80} in the body of"
                " the loop, but loader processes have a copy of the data set from the start of the"
                " loop and would load with the former value. Set it before a loop of one epoch:"
                " for epoch in range(run.epoch, epochs): dataset.set_epoch(epoch), and then for"
                " batch in run.batches(dataset, ...). Or use loader_workers=0"
            )

    def _note_loading(self, load_sample: Callable[[int], object]) -> None:
        """Note which attributes loading a sample changes; numbers and texts are restored."""
        before = [
            (dict(own_dict(owner)), plain_attributes(owner, is_own=is_own))
            for _, owner, is_own, _ in self._owners
        ]
        for index in (0, -1):  # one of them may be the last index that was loaded
            with suppress(Exception):  # a loader process will report it
                load_sample(index)
            for (name, owner, is_own, _), (values, plain) in zip(self._owners, before, strict=True):
                for attribute, value in plain_attributes(owner, is_own=is_own).items():
                    if plain.get(attribute, MISSING) != value:
                        self._of_loading.add(f"{name}.{attribute}")
                        if isinstance(values.get(attribute, MISSING), SCALARS):
                            own_dict(owner)[attribute] = values[attribute]


class OpenFile(NamedTuple):
    """A file that was open when loader processes started, and its position then."""

    name: str
    file: Any  # held, so that its descriptor cannot be that of another file
    position: int

    @property
    def has_moved(self) -> bool:
        """Whether a process that shares the position has read from it, or moved it."""
        return _position(self.file) not in {None, self.position}


def open_files(**roots: Any) -> list[OpenFile]:
    """Return the files that the `roots` reach and that are open for reading."""
    files: dict[int, OpenFile] = {}
    for reference, value, *_ in walk(**roots):
        file = value.fp if isinstance(value, ZipFile) else value
        file = file.fileobj if isinstance(file, TarFile) else file
        if isinstance(file, IOBase) and (position := _position(file)) is not None:
            path = getattr(file, "name", type(file).__name__)
            files.setdefault(id(file), OpenFile(f"{reference.name} ({path})", file, position))
        if len(files) == MOST_FILES:
            break
    return list(files.values())


def refuse_moved(files: Sequence[OpenFile]) -> None:
    """Raise `DataError` if the position of a file that loader processes share has moved.

    `os.pread` and `mmap` do not use it, so that files which are read by them may stay open.
    """
    for file in files:
        if file.has_moved:
            raise DataError(
                f"{file.name} was opened before the loader processes were started, so they share"
                " its position, and each reads where another one has moved it to: samples would be"
                " wrong. Open it in __getitem__ when a process first needs it, read it with"
                " os.pread or mmap, or use loader_workers=0"
            )


def plain_attributes(owner: Any, *, is_own: bool = True) -> dict[str, Any]:
    """Return the attributes of an object that can be compared, as values that do not change.

    Without `is_own`, only public numbers and texts.
    """
    plain = {
        name: _plain(value, is_own=is_own)
        for name, value in list(own_dict(owner).items())
        if is_own or not name.startswith("_")
    }
    return {name: value for name, value in plain.items() if value is not MISSING}


def _plain(value: Any, *, is_own: bool) -> Any:
    """Return a value that equals only what is the same; `MISSING` if it is not compared."""
    if isinstance(value, SCALARS):
        return repr(value) if isinstance(value, (float, complex)) else value  # for NaN and -0.0
    if not is_own:
        return MISSING
    if isinstance(value, torch.Tensor):  # loader processes see what is written to shared memory
        is_shared = value.device.type != "cpu" or value.is_shared()
        return MISSING if is_shared else (value.data_ptr(), *versions_of([value]))
    if type(value) in {list, tuple, dict} and len(value) <= FEW_ENTRIES:
        entries = value.values() if isinstance(value, dict) else value
        if all(isinstance(entry, SCALARS) for entry in entries):
            return repr(value)
    return MISSING


def _is_held(reference: Reference, roots: Mapping[str, Any]) -> bool:
    """Return whether an object is part of a root, and not only used by one of its functions."""
    root = next((name for name in roots if reference.name.startswith(name)), None)
    return (
        root is not None
        and reference.name.removeprefix(root)[:1] in {"", ".", "["}
        and ":" not in reference.name
    )


def _position(file: Any) -> int | None:
    """Return the position of a file in its descriptor; None if it has none to read from."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_CUR) if file.readable() else None
    except (OSError, ValueError, AttributeError):  # closed, a pipe, or in memory
        return None
