"""What one worker contributes to a snapshot: a data file with its pieces of tensors, and a table of what these are."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import CHUNK_BYTES
from samestep.snapshot.layout import share
from samestep.snapshot.manifest import DataFile, Form, piece_key
from samestep.snapshot.state import canonical, flatten, merge
from samestep.step.slices import TensorSlice, flattened, storage_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from samestep.snapshot.state import Plain, Tensors

# Other dtypes are stored as bytes: not every safetensors reader knows them, and the manifest tells what they are.
_STORED: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class OwnPiece:
    """Elements [start, stop) of a tensor that this worker writes. `repeated` where other workers may write the same."""

    tensor: str
    start: int
    stop: int
    dtype: torch.dtype
    repeated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class Contribution:
    """A worker's part of the state: JSON, the forms of the tensors it tells of, and its pieces of them."""

    state: Plain
    forms: Mapping[str, Form]
    pieces: Sequence[OwnPiece]


@dataclass(frozen=True)
class Part:
    """A worker's part as the others see it. Pieces are (tensor, start, stop, SHA-256 where others may hold the same)."""

    state: Plain
    forms: Mapping[str, Form]
    pieces: Sequence[tuple[str, int, int, str | None]]
    file: DataFile

    def to_bytes(self) -> bytes:
        """Return the content of a part file."""
        return canonical(
            {
                "state": self.state,
                "forms": {name: form.to_json() for name, form in self.forms.items()},
                "pieces": [list(piece) for piece in self.pieces],
                "file": [self.file.name, self.file.size, self.file.sha256],
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Read the content of a part file."""
        body: dict[str, Any] = json.loads(data)
        return cls(
            state=body["state"],
            forms={name: Form.from_json(form) for name, form in body["forms"].items()},
            pieces=[(name, start, stop, digest) for name, start, stop, digest in body["pieces"]],
            file=DataFile(*body["file"]),
        )


def contribution(shared: Mapping[str, Any], own: Mapping[str, Any], rank: int, workers: int) -> tuple[Contribution, list[torch.Tensor]]:
    """Return what a worker contributes, and the values of its pieces: 1-D, in storage order, not copied.

    That is its share of the tensors that all workers hold alike, and all that is its own.
    Raises `SnapshotError` with the path of what cannot be held.
    """
    shared_state, shared_tensors = flatten(dict(shared))
    own_state, held = flatten(dict(own))
    whole = {name: _whole(name, tensor) for name, tensor in shared_tensors.items()}
    if both := sorted(whole.keys() & held.keys()):
        raise SnapshotError(f"tensor {both[0]} was given as shared by all workers and as this worker's own; expected one of the two")
    pairs = sorted([*_shared_pieces(whole, rank, workers), *_held_pieces(held)], key=_descending_element_size)
    pieces = [piece for piece, _ in pairs]
    told = whole.keys() if rank == 0 else whole.keys() & {piece.tensor for piece in pieces}
    forms = {name: _form(tensor) for name, tensor in {**whole, **held}.items() if name in told or name in held}
    return Contribution(merge(shared_state, own_state) if rank == 0 else own_state, forms, pieces), [values for _, values in pairs]


def _whole(name: str, tensor: torch.Tensor | TensorSlice) -> torch.Tensor:
    if isinstance(tensor, TensorSlice):
        raise SnapshotError(f"tensor {name} was given as shared by all workers and is a slice; expected it among this worker's own")
    return tensor


def _shared_pieces(whole: Mapping[str, torch.Tensor], rank: int, workers: int) -> Iterator[tuple[OwnPiece, torch.Tensor]]:
    tensors = sorted(whole.items())
    ranges = share([_form(tensor).extent for _, tensor in tensors], rank, workers)
    for (name, tensor), elements in zip(tensors, ranges, strict=True):
        if elements:
            values = flattened(tensor)[elements.start : elements.stop]
            yield OwnPiece(name, elements.start, elements.stop, values.dtype), values


def _held_pieces(held: Tensors) -> Iterator[tuple[OwnPiece, torch.Tensor]]:
    for name, tensor in held.items():
        start, values = (tensor.start, tensor.values) if isinstance(tensor, TensorSlice) else (0, flattened(tensor))
        if values.numel():
            repeated = not isinstance(tensor, TensorSlice)
            yield OwnPiece(name, start, start + values.numel(), values.dtype, repeated), values


def _descending_element_size(pair: tuple[OwnPiece, torch.Tensor]) -> int:
    """Order pieces so that each lies at a multiple of its element size without gaps, as safetensors wants it."""
    return -pair[0].dtype.itemsize


def _form(tensor: torch.Tensor | TensorSlice) -> Form:
    if isinstance(tensor, TensorSlice):
        return Form(tensor.values.dtype, tuple(tensor.shape), tuple(tensor.order))
    return Form(tensor.dtype, tuple(tensor.shape), storage_order(tensor))


class Staging:
    """Host memory that the pieces of each save are copied to. It is kept: fresh pages cost far more time than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> memoryview:
        """Return the bytes of 1-D tensors one after the other; they stay until the next call."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(devices))
        for tensor, place in zip(tensors, self._memory[: sum(sizes)].split(sizes), strict=True):
            place.copy_(tensor.contiguous().view(torch.uint8), non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return self._memory.numpy().data[: sum(sizes)]


def write_part(path: Path, mine: Contribution, data: memoryview, go_on: Callable[[], None]) -> Part:
    """Write the data file at `path`, durably, and return the part that tells of it. `go_on` may raise between chunks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for chunk in _chunks(_header(mine.pieces), data):
            go_on()
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Part(mine.state, mine.forms, _table(mine.pieces, data), DataFile(path.name, size, digest.hexdigest()))


def _chunks(header: bytes, data: memoryview) -> Iterator[bytes | memoryview]:
    yield header
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _header(pieces: Sequence[OwnPiece]) -> bytes:
    """Return the header of a safetensors file; its data is the bytes of all pieces one after the other.

    Source: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, Plain] = {}
    for piece, (start, stop) in zip(pieces, _places(pieces), strict=True):
        dtype = _STORED.get(piece.dtype)
        count = piece.stop - piece.start if dtype else piece.nbytes
        key = piece_key(piece.tensor, piece.start, piece.stop)
        entries[key] = {"dtype": dtype or "U8", "shape": [count], "data_offsets": [start, stop]}
    text = canonical(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _table(pieces: Sequence[OwnPiece], data: memoryview) -> list[tuple[str, int, int, str | None]]:
    return [
        (piece.tensor, piece.start, piece.stop, hashlib.sha256(data[start:stop]).hexdigest() if piece.repeated else None)
        for piece, (start, stop) in zip(pieces, _places(pieces), strict=True)
    ]


def _places(pieces: Sequence[OwnPiece]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate((piece.nbytes for piece in pieces), initial=0))
