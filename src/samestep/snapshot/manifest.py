"""The manifest of a snapshot: its content, and the files that hold it. It commits the snapshot.

A manifest is canonical JSON with a checksum, so that any damaged byte makes it invalid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from samestep.errors import SnapshotError
from samestep.record.events import samestep_version
from samestep.snapshot.files import DataFile, checksum, typed
from samestep.snapshot.state import DTYPES, Plain, canonical, flatten_plain, no_tensor, restore

FORMAT: Final = 2  # it grows when older versions of samestep can no longer read a snapshot
NAME: Final = "manifest.json"  # a directory without it is not a snapshot
LARGEST_BYTES: Final = 2**28  # readers load it completely
MOST_DIMS: Final = 64
LARGEST_ATTEMPT: Final = 2**12  # bytes, with its key
_BEGINNING: Final = re.compile(rb'\{"attempt":"([A-Za-z0-9._-]+)",')


@dataclass(frozen=True)
class TensorSpec:
    """The dtype, shape and memory order of a tensor.

    `order` lists its dims from the slowest to the fastest in storage. Elements are counted in that
    order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.elements * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """Return the specification as JSON; `from_json` is the inverse."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), list(self.order)]

    @classmethod
    def from_json(cls, plain: Any) -> TensorSpec:
        """Read a specification. Raises `ValueError`, `TypeError` or `KeyError` if it is invalid."""
        dtype, shape, order = plain
        are_sizes = all(type(size) is int and 0 <= size < 2**63 for size in shape)
        if not are_sizes or len(shape) > MOST_DIMS:
            raise ValueError(f"expected a shape of at most {MOST_DIMS} dims, got {shape}")
        if any(type(dim) is not int for dim in order) or sorted(order) != list(range(len(shape))):
            raise ValueError(f"expected an order of {len(shape)} dims, got {order}")
        return cls(DTYPES[dtype], tuple(shape), tuple(order))


class StoredPiece(NamedTuple):
    """Elements [start, stop) of a tensor, at byte `offset` of the data file with index `file`."""

    file: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Manifest:
    """The content of a snapshot.

    `created` is in seconds since 1970; `samestep.snapshot.state.restore` reads `state`.
    """

    step: int
    attempt: str
    created: float
    workers: int
    torch: str
    score: float | None
    info: Mapping[str, Any]
    state: Any
    specs: Mapping[str, TensorSpec]
    pieces: Mapping[str, tuple[StoredPiece, ...]]
    files: tuple[DataFile, ...]

    @property
    def size(self) -> int:
        """The bytes of all data files."""
        return sum(file.size for file in self.files)

    @property
    def nonfinite(self) -> list[str]:
        """The names of some tensors with infinities or NaNs, empty if there are none."""
        names = self.info.get("nonfinite")
        return [str(name) for name in names] if isinstance(names, list) else []

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json. Raises `SnapshotError` if invalid or too large."""
        self.validate()  # what is written can be read
        body: dict[str, Plain] = {
            "format": FORMAT,
            "samestep": samestep_version(),
            "step": self.step,
            "attempt": self.attempt,
            "created": self.created,
            "workers": self.workers,
            "torch": self.torch,
            "score": flatten_plain(self.score, "score"),
            "info": flatten_plain(dict(self.info), "info"),
            "state": self.state,
            "tensors": {
                name: [spec.to_json(), [list(piece) for piece in self.pieces[name]]]
                for name, spec in self.specs.items()
            },
            "files": [file.to_json() for file in self.files],
        }
        # The checksum covers the text without it, which a reader restores by removing the entry.
        data = canonical({**body, "checksum": _checksum(body)}).encode()
        if len(data) > LARGEST_BYTES:
            raise SnapshotError(
                f"the plain state must take at most {LARGEST_BYTES} bytes, got {len(data)}; "
                "store large data in tensors"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content of manifest.json. Raises `SnapshotError` if it is invalid."""
        body = _parse(data)
        try:
            manifest = cls._from_body(body)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"{NAME} does not describe a snapshot ({type(error).__name__}: {error})"
            ) from error
        manifest.validate()  # the numbers may be wrong in spite of a valid checksum
        return manifest

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        score = restore(body["score"], no_tensor)
        return cls(
            step=typed(body["step"], int),
            attempt=typed(body["attempt"], str),
            created=float(typed(body["created"], float)),
            workers=typed(body["workers"], int),
            torch=typed(body["torch"], str),
            score=None if score is None else float(typed(score, float)),
            info=typed(restore(body["info"], no_tensor), dict),
            state=body["state"],
            specs={name: TensorSpec.from_json(spec) for name, (spec, _) in body["tensors"].items()},
            pieces={
                name: tuple(
                    StoredPiece(*(typed(number, int) for number in piece)) for piece in pieces
                )
                for name, (_, pieces) in body["tensors"].items()
            },
            files=tuple(map(DataFile.from_json, body["files"])),
        )

    def validate(self) -> None:
        """Raise `SnapshotError` unless pieces cover each tensor once, without overlap in files."""
        stored: list[list[tuple[int, int]]] = [[] for _ in self.files]  # bytes in use, by file
        for name, spec in self.specs.items():
            pieces = self.pieces[name]
            ranges = [(piece.start, piece.stop) for piece in pieces]
            if fault := tiling_fault(ranges, spec.elements):
                raise SnapshotError(f"tensor {name} is incomplete: {fault}")
            for piece in pieces:
                if not 0 <= piece.file < len(stored):
                    raise SnapshotError(
                        f"tensor {name}: file must be below {len(stored)}, got {piece.file}"
                    )
                nbytes = (piece.stop - piece.start) * spec.dtype.itemsize
                stored[piece.file].append((piece.offset, piece.offset + nbytes))
        for file, extents in zip(self.files, stored, strict=True):
            if any(start < 0 or stop > file.size for start, stop in extents):
                raise SnapshotError(
                    f"{NAME} places pieces outside of the {file.size} bytes of {file.name}"
                )
            # an overlap would load one tensor's bytes as another's
            if any(before > after for (_, before), (after, _) in pairwise(sorted(extents))):
                raise SnapshotError(f"{NAME} places overlapping pieces of tensors in {file.name}")

    def check_sizes(self, size_of: Callable[[str], int | None]) -> None:
        """Raise `SnapshotError` unless all data files have their full size."""
        for file in self.files:
            if (size := size_of(file.name)) != file.size:
                actual = "no file" if size is None else size
                raise SnapshotError(f"{file.name} must have {file.size} bytes, got {actual}")


def attempt_of(path: Path) -> str | None:
    """Return the attempt in a manifest, without reading all of it; None if there is none."""
    try:
        with path.open("rb") as file:
            # canonical JSON is sorted, so it begins with the attempt
            match = _BEGINNING.match(file.read(LARGEST_ATTEMPT))
    except FileNotFoundError:
        return None
    return match[1].decode() if match else None


def tiling_fault(ranges: Iterable[tuple[int, int]], elements: int) -> str | None:
    """Return why (start, stop) ranges do not hold each of `elements` exactly once, or None."""
    end = 0
    for start, stop in sorted(ranges):  # every gap and overlap then shows between neighbors
        if not 0 <= start < stop <= elements:
            return f"{start} to {stop} is not a range of its {elements} elements"
        if start > end:
            break
        if start < end:
            return f"elements {start} to {min(end, stop)} of {elements} are duplicates"
        end = stop
    else:
        start = elements
    return None if end == elements else f"elements {end} to {start} of {elements} are missing"


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(data)
        # The checksum is that of the values. This also finds changes of bytes that leave them as
        # they are, such as a space.
        if canonical(body).encode() != data:
            raise SnapshotError(f"{NAME} is damaged: it is not canonical JSON")
        if (version := body["format"]) != FORMAT:
            writer = body.get("samestep", "that wrote it")
            raise SnapshotError(
                f"{NAME} must have format {FORMAT}, got {version!r}; install samestep {writer} to "
                "read it"
            )
        expected = body.pop("checksum")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"{NAME} is damaged: {error}") from error
    if expected != _checksum(body):
        raise SnapshotError(f"{NAME} is damaged: its content does not match its checksum")
    return body


def _checksum(body: Mapping[str, Any]) -> str:
    return checksum(canonical(dict(body)).encode())
