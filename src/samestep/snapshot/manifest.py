"""The manifest of a snapshot: what it holds, where in which files, with their sizes and checksums. No manifest, no snapshot.

Its bytes are the canonical JSON of its content and of that content's checksum, so a file in which
any byte was changed, added or lost is not a manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import checksum
from samestep.snapshot.layout import Extent, tiling_fault
from samestep.snapshot.state import DTYPES, Plain, canonical, flatten_plain, no_tensor, restore

FORMAT: Final = 2
NAME: Final = "manifest.json"
LARGEST_BYTES: Final = 2**28
MOST_DIMS: Final = 64
LARGEST_SEGMENT_BYTES: Final = 2**28
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DataFile:
    """A safetensors file of the snapshot: its plain name, its bytes, and the checksums of its segments of `segment_bytes`."""

    name: str
    size: int
    segment_bytes: int
    checksums: tuple[str, ...]

    def segments(self) -> Iterator[tuple[int, int, str]]:
        """Yield (first byte, byte after the last, checksum) of each segment; the last one may be shorter."""
        for number, expected in enumerate(self.checksums):
            start = number * self.segment_bytes
            yield start, min(start + self.segment_bytes, self.size), expected

    def to_json(self) -> list[Any]:
        """Return the description as JSON; `from_json` is the inverse."""
        return [self.name, self.size, self.segment_bytes, list(self.checksums)]

    @classmethod
    def from_json(cls, plain: Any) -> DataFile:
        """Read a description. Raises `ValueError` or `TypeError` for anything else."""
        name, size, segment_bytes, checksums = plain
        if not _FILE_NAME.fullmatch(_typed(name, str)):
            raise ValueError(f"{name!r} is no plain file name")
        if not 0 < _typed(segment_bytes, int) <= LARGEST_SEGMENT_BYTES:
            raise ValueError(f"segments of {segment_bytes} bytes are not read")
        if len(checksums) != -(-_typed(size, int) // segment_bytes):
            raise ValueError(f"{name} has {size} bytes and {len(checksums)} checksums")
        return cls(name, size, segment_bytes, tuple(_typed(one, str) for one in checksums))


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor looks like. `order` lists its dims from the slowest to the fastest in storage, as pieces count elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        """The tensor's size."""
        return Extent(math.prod(self.shape), self.dtype.itemsize)

    def to_json(self) -> list[Any]:
        """Return the form as JSON; `from_json` is the inverse."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), list(self.order)]

    @classmethod
    def from_json(cls, plain: Any) -> TensorSpec:
        """Read a form. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        dtype, shape, order = plain
        if (
            not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape)
            or len(shape) > MOST_DIMS
        ):
            raise ValueError(f"{shape} is no shape")
        if any(type(dim) is not int for dim in order) or sorted(order) != list(range(len(shape))):
            raise ValueError(f"{order} is no order of {len(shape)} dims")
        return cls(DTYPES[dtype], tuple(shape), tuple(order))


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, in the data file of that index from byte `offset` on."""

    file: int
    start: int
    stop: int
    offset: int

    def to_json(self) -> list[Any]:
        """Return the piece as JSON; `from_json` is the inverse."""
        return [self.file, self.start, self.stop, self.offset]

    @classmethod
    def from_json(cls, plain: Any) -> Piece:
        """Read a piece. Raises `TypeError` for anything else."""
        return cls(*(_typed(number, int) for number in plain))


@dataclass(frozen=True)
class Manifest:
    """What a snapshot holds. `created` is in seconds since 1970; `state` is for `samestep.snapshot.state.restore`."""

    step: int
    attempt: str
    created: float
    workers: int
    torch: str
    score: float | None
    info: Mapping[str, Any]
    state: Any
    forms: Mapping[str, TensorSpec]
    pieces: Mapping[str, tuple[Piece, ...]]
    files: tuple[DataFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json. Raises `SnapshotError` if it would be too large to read, or describes no snapshot."""
        self.validate()
        body: dict[str, Plain] = {
            "format": FORMAT,
            "step": self.step,
            "attempt": self.attempt,
            "created": self.created,
            "workers": self.workers,
            "torch": self.torch,
            "score": flatten_plain(self.score, "score"),
            "info": flatten_plain(dict(self.info), "info"),
            "state": self.state,
            "tensors": {
                name: [form.to_json(), [piece.to_json() for piece in self.pieces[name]]]
                for name, form in self.forms.items()
            },
            "files": [file.to_json() for file in self.files],
        }
        data = canonical({**body, "checksum": _checksum(body)}).encode()
        if len(data) > LARGEST_BYTES:
            raise SnapshotError(
                f"the plain state takes {len(data)} bytes; expected at most {LARGEST_BYTES}: keep large data in tensors"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content of manifest.json. Raises `SnapshotError` that says what is wrong with it."""
        body = _parsed(data)
        try:
            manifest = cls._from_body(body)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"{NAME} does not describe a snapshot ({type(error).__name__}: {error})"
            ) from error
        manifest.validate()
        return manifest

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        return cls(
            step=_typed(body["step"], int),
            attempt=_typed(body["attempt"], str),
            created=float(_typed(body["created"], float)),
            workers=_typed(body["workers"], int),
            torch=_typed(body["torch"], str),
            score=_score(restore(body["score"], no_tensor)),
            info=_typed(restore(body["info"], no_tensor), dict),
            state=body["state"],
            forms={name: TensorSpec.from_json(form) for name, (form, _) in body["tensors"].items()},
            pieces={
                name: tuple(map(Piece.from_json, pieces))
                for name, (_, pieces) in body["tensors"].items()
            },
            files=tuple(map(DataFile.from_json, body["files"])),
        )

    def validate(self) -> None:
        """Raise `SnapshotError` unless the pieces make up each tensor exactly, and lie in their files one beside the other."""
        held: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for name, form in self.forms.items():
            pieces = self.pieces[name]
            if fault := tiling_fault(
                [(piece.start, piece.stop) for piece in pieces], form.extent.elements
            ):
                raise SnapshotError(f"tensor {name} is not whole: {fault}")
            for piece in pieces:
                if not 0 <= piece.file < len(held):
                    raise SnapshotError(f"tensor {name} is in file {piece.file} of {len(held)}")
                held[piece.file].append(
                    (piece.offset, piece.offset + (piece.stop - piece.start) * form.dtype.itemsize)
                )
        for file, places in zip(self.files, held, strict=True):
            if any(start < 0 or stop > file.size for start, stop in places):
                raise SnapshotError(
                    f"{file.name} has {file.size} bytes and is said to hold pieces outside of them"
                )
            if any(before > after for (_, before), (after, _) in pairwise(sorted(places))):
                raise SnapshotError(f"{file.name} is said to hold pieces of tensors that overlap")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(data)
        if canonical(body).encode() != data:
            raise SnapshotError(
                f"{NAME} is damaged: its bytes are not those that its content is written as"
            )
        if body["format"] != FORMAT:
            raise SnapshotError(
                f"{NAME} is of format {body['format']!r}; expected {FORMAT}: read it with the samestep that wrote it"
            )
        told = body.pop("checksum")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"{NAME} is damaged: {error}") from error
    if told != _checksum(body):
        raise SnapshotError(f"{NAME} is damaged: its checksum is not that of its content")
    return body


def _checksum(body: Mapping[str, Any]) -> str:
    return checksum(canonical(dict(body)).encode())


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _score(value: Any) -> float | None:
    return None if value is None else float(_typed(value, float))
