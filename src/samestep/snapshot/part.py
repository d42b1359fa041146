"""What one worker contributes to a snapshot: a data file with its pieces of tensors, and a table of what these are."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import CHUNK_BYTES
from samestep.snapshot.layout import share
from samestep.snapshot.manifest import DataFile, Form, piece_key
from samestep.snapshot.state import canonical, flatten, merge
from samestep.step.slices import TensorSlice, flattened, storage_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from samestep.snapshot.state import Plain, Tensors

# Other dtypes are stored as bytes: not every safetensors reader knows them, and the manifest tells what they are.
_STORED = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class OwnPiece:
    """Elements of a tensor that this worker writes, 1-D in storage order. `repeated` where other workers may write them too."""

    tensor: str
    start: int
    values: torch.Tensor
    repeated: bool = False

    @property
    def stop(self) -> int:
        """Where the elements end."""
        return self.start + self.values.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class Contribution:
    """A worker's part of the state: JSON, the forms of the tensors it knows, and its pieces of them."""

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
        return canonical({
            "state": self.state,
            "forms": {name: form.to_json() for name, form in self.forms.items()},
            "pieces": [list(piece) for piece in self.pieces],
            "file": [self.file.name, self.file.size, self.file.sha256],
        }).encode()

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


def contribution(shared: Mapping[str, Any], own: Mapping[str, Any], rank: int, workers: int) -> Contribution:
    """Return what a worker contributes: its share of the tensors that all hold alike, and all that it alone holds.

    Nothing is copied. Raises `SnapshotError` with the path of what cannot be held.
    """
    shared_state, whole = flatten(dict(shared))
    own_state, held = flatten(dict(own))
    if both := sorted(whole.keys() & held.keys()):
        raise SnapshotError(f"tensor {both[0]} was given as shared by all workers and as this worker's own; expected one of the two")
    forms = {name: _form(tensor) for name, tensor in sorted({**whole, **held}.items())}
    ranges = share([forms[name].extent for name in sorted(whole)], rank, workers)
    pieces = [
        OwnPiece(name, elements.start, flattened(whole[name])[elements.start : elements.stop])
        for name, elements in zip(sorted(whole), ranges, strict=True)
        if elements
    ]
    pieces += _held_pieces(held)
    # Descending: every piece lies at a multiple of its element size, and there are no gaps, as safetensors wants it.
    pieces.sort(key=lambda piece: -piece.values.element_size())
    return Contribution(merge(shared_state, own_state) if rank == 0 else own_state, forms, pieces)


def _form(tensor: torch.Tensor | TensorSlice) -> Form:
    if isinstance(tensor, TensorSlice):
        return Form(tensor.values.dtype, tuple(tensor.shape), tuple(tensor.order))
    return Form(tensor.dtype, tuple(tensor.shape), storage_order(tensor))


def _held_pieces(held: Tensors) -> list[OwnPiece]:
    pieces = [
        OwnPiece(name, tensor.start, tensor.values)
        if isinstance(tensor, TensorSlice)
        else OwnPiece(name, 0, flattened(tensor), repeated=True)
        for name, tensor in held.items()
    ]
    return [piece for piece in pieces if piece.nbytes]


class Staging:
    """Host memory that the pieces of each save are copied to. It is kept: fresh pages cost far more time than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[OwnPiece]) -> memoryview:
        """Return the bytes of all pieces one after the other, until the next call."""
        size = sum(piece.nbytes for piece in pieces)
        devices = {piece.values.device for piece in pieces if piece.values.is_cuda}
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        offset = 0
        for piece in pieces:
            self._memory[offset : offset + piece.nbytes].copy_(piece.values.contiguous().view(torch.uint8), non_blocking=True)
            offset += piece.nbytes
        for device in devices:
            torch.cuda.synchronize(device)
        return memoryview(self._memory.numpy())[:size]


def write_part(path: Path, mine: Contribution, data: memoryview, go_on: Callable[[], None]) -> Part:
    """Write the data file at `path`, durably, and return the part that tells of it. `go_on` may raise between chunks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for chunk in (_header(mine.pieces), *(data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))):
            go_on()
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Part(mine.state, mine.forms, _table(mine.pieces, data), DataFile(path.name, size, digest.hexdigest()))


def _header(pieces: Sequence[OwnPiece]) -> bytes:
    """Return the header of a safetensors file; its data is the bytes of all pieces one after the other.

    Source: https://github.com/huggingface/safetensors#format. The library would hold Python's lock while it writes,
    and training with it.
    """
    entries: dict[str, Plain] = {}
    offset = 0
    for piece in pieces:
        dtype = _STORED.get(piece.values.dtype)
        count = piece.values.numel() if dtype else piece.nbytes
        offsets: list[Plain] = [offset, offset + piece.nbytes]
        entries[piece_key(piece.tensor, piece.start, piece.stop)] = {"dtype": dtype or "U8", "shape": [count], "data_offsets": offsets}
        offset += piece.nbytes
    text = canonical(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _table(pieces: Sequence[OwnPiece], data: memoryview) -> list[tuple[str, int, int, str | None]]:
    table = []
    offset = 0
    for piece in pieces:
        content = data[offset : offset + piece.nbytes]
        table.append((piece.tensor, piece.start, piece.stop, hashlib.sha256(content).hexdigest() if piece.repeated else None))
        offset += piece.nbytes
    return table
