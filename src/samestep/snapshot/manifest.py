"""The manifest of a snapshot: what it holds, in which files, with their sizes and checksums. No manifest, no snapshot.

Its bytes are the canonical JSON of its content and of that content's SHA-256, so a file in which any byte was changed,
added or lost is not a manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import SnapshotError
from samestep.snapshot.layout import Extent, tiling_fault
from samestep.snapshot.state import DTYPES, canonical, flatten_plain, no_tensor, restore

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from samestep.snapshot.state import Plain

FORMAT: Final = 1
NAME: Final = "manifest.json"
LARGEST_BYTES: Final = 2**28
MOST_DIMS: Final = 64
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DataFile:
    """A safetensors file of the snapshot: its plain name, bytes, and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Form:
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
    def from_json(cls, plain: Any) -> Form:
        """Read a form. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        dtype, shape, order = plain
        if not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape) or len(shape) > MOST_DIMS:
            raise ValueError(f"{shape} is no shape")
        if any(type(dim) is not int for dim in order) or sorted(order) != list(range(len(shape))):
            raise ValueError(f"{order} is no order of {len(shape)} dims")
        return cls(DTYPES[dtype], tuple(shape), tuple(order))


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, in the data file of that index."""

    file: int
    start: int
    stop: int


def piece_key(tensor: str, start: int, stop: int) -> str:
    """Return the name of a piece in its data file."""
    return f"{tensor}[{start}:{stop}]"


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
    forms: Mapping[str, Form]
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
                name: [form.to_json(), [[piece.file, piece.start, piece.stop] for piece in self.pieces[name]]]
                for name, form in self.forms.items()
            },
            "files": [[file.name, file.size, file.sha256] for file in self.files],
        }
        data = canonical({**body, "sha256": _checksum(body)}).encode()
        if len(data) > LARGEST_BYTES:
            raise SnapshotError(f"the plain state takes {len(data)} bytes; expected at most {LARGEST_BYTES}: keep large data in tensors")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content of manifest.json. Raises `SnapshotError` that says what is wrong with it."""
        body = _parsed(data)
        if body.get("format") != FORMAT:
            raise SnapshotError(f"{NAME} is of format {body.get('format')!r}; expected {FORMAT}: read it with the samestep that wrote it")
        try:
            manifest = cls._from_body(body)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise SnapshotError(f"{NAME} does not describe a snapshot ({type(error).__name__}: {error})") from error
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
            forms={name: Form.from_json(form) for name, (form, _) in body["tensors"].items()},
            pieces={
                name: tuple(Piece(*(_typed(number, int) for number in piece)) for piece in pieces)
                for name, (_, pieces) in body["tensors"].items()
            },
            files=tuple(DataFile(_file_name(name), _typed(size, int), _typed(sha256, str)) for name, size, sha256 in body["files"]),
        )

    def validate(self) -> None:
        """Raise `SnapshotError` unless the pieces make up each tensor exactly, and fit into their files."""
        held = [0] * len(self.files)
        for name, form in self.forms.items():
            pieces = self.pieces[name]
            if fault := tiling_fault([(piece.start, piece.stop) for piece in pieces], form.extent.elements):
                raise SnapshotError(f"tensor {name} is not whole: {fault}")
            for piece in pieces:
                if not 0 <= piece.file < len(held):
                    raise SnapshotError(f"tensor {name} is in file {piece.file} of {len(held)}")
                held[piece.file] += (piece.stop - piece.start) * form.dtype.itemsize
        for file, size in zip(self.files, held, strict=True):
            if size > file.size:
                raise SnapshotError(f"{file.name} has {file.size} bytes and is said to hold {size}")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(data)
        if canonical(body).encode() != data:
            raise SnapshotError(f"{NAME} is damaged: its bytes are not those that its content is written as")
        checksum = body.pop("sha256")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"{NAME} is damaged: {error}") from error
    if checksum != _checksum(body):
        raise SnapshotError(f"{NAME} is damaged: its checksum is not that of its content")
    return body


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(dict(body)).encode()).hexdigest()


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _score(value: Any) -> float | None:
    return None if value is None else float(_typed(value, float))


def _file_name(value: Any) -> str:
    if not _FILE_NAME.fullmatch(_typed(value, str)):
        raise ValueError(f"{value!r} is no plain file name")
    return str(value)
