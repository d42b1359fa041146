"""What one worker contributes to a snapshot: a data file with its pieces of tensors, and a table of what these are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import checksum, write_durably
from samestep.snapshot.layout import Extent, share
from samestep.snapshot.manifest import DataFile, TensorSpec
from samestep.snapshot.state import Plain, Tensors, canonical, flatten, merge
from samestep.step.layout import TensorSlice, flattened, storage_order

SEGMENT_BYTES: Final = 2**22
ALIGNMENT: Final = 64  # bytes; of the first tensor in its file, for those who map it into memory
# Other dtypes are stored as bytes: not every safetensors reader knows them, and the manifest tells
# what they are.
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

    @property
    def key(self) -> str:
        """The name of the piece in its data file."""
        return f"{self.tensor}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Contribution:
    """A worker's part of the state: JSON, the forms of the tensors it tells of, and its pieces of them."""

    state: Plain
    forms: Mapping[str, TensorSpec]
    pieces: Sequence[OwnPiece]


@dataclass(frozen=True)
class Part:
    """A worker's part as the others see it.

    Pieces are (tensor, start, stop, offset in the file, checksum where others may hold the same).
    """

    state: Plain
    forms: Mapping[str, TensorSpec]
    pieces: Sequence[tuple[str, int, int, int, str | None]]
    file: DataFile

    def to_bytes(self) -> bytes:
        """Return the content of a part file."""
        return canonical(
            {
                "state": self.state,
                "forms": {name: form.to_json() for name, form in self.forms.items()},
                "pieces": [list(piece) for piece in self.pieces],
                "file": self.file.to_json(),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Read the content of a part file."""
        body: dict[str, Any] = json.loads(data)
        return cls(
            state=body["state"],
            forms={name: TensorSpec.from_json(form) for name, form in body["forms"].items()},
            pieces=[
                (name, start, stop, offset, digest)
                for name, start, stop, offset, digest in body["pieces"]
            ],
            file=DataFile.from_json(body["file"]),
        )


def contribution(
    shared: Mapping[str, Any], own: Mapping[str, Any], rank: int, workers: int
) -> tuple[Contribution, list[torch.Tensor]]:
    """Return what a worker contributes, and the values of its pieces: 1-D, in storage order, not copied.

    That is its share of the tensors that all workers hold alike, and all that is its own.
    Raises `SnapshotError` with the path of what cannot be held.
    """
    shared_state, shared_tensors = flatten(dict(shared))
    own_state, held = flatten(dict(own))
    whole = {name: _whole(name, tensor) for name, tensor in shared_tensors.items()}
    if both := sorted(whole.keys() & held.keys()):
        raise SnapshotError(
            f"tensor {both[0]} was given as shared by all workers and as this worker's own; expected one of the two"
        )
    pairs = sorted(
        [*_shared_pieces(whole, rank, workers), *_held_pieces(held)], key=_descending_element_size
    )
    pieces = [piece for piece, _ in pairs]
    told = whole.keys() if rank == 0 else whole.keys() & {piece.tensor for piece in pieces}
    forms = {
        name: _form(tensor)
        for name, tensor in {**whole, **held}.items()
        if name in told or name in held
    }
    return Contribution(
        merge(shared_state, own_state) if rank == 0 else own_state, forms, pieces
    ), [values for _, values in pairs]


def _whole(name: str, tensor: torch.Tensor | TensorSlice) -> torch.Tensor:
    if isinstance(tensor, TensorSlice):
        raise SnapshotError(
            f"tensor {name} was given as shared by all workers and is a slice; expected it among this worker's own"
        )
    return tensor


def _shared_pieces(
    whole: Mapping[str, torch.Tensor], rank: int, workers: int
) -> Iterator[tuple[OwnPiece, torch.Tensor]]:
    tensors = sorted(whole.items())
    ranges = share(
        [Extent(tensor.numel(), tensor.element_size()) for _, tensor in tensors], rank, workers
    )
    for (name, tensor), elements in zip(tensors, ranges, strict=True):
        if elements:
            values = flattened(tensor)[elements.start : elements.stop]
            yield OwnPiece(name, elements.start, elements.stop, values.dtype), values


def _held_pieces(held: Tensors) -> Iterator[tuple[OwnPiece, torch.Tensor]]:
    for name, tensor in held.items():
        start, values = (
            (tensor.start, tensor.values)
            if isinstance(tensor, TensorSlice)
            else (0, flattened(tensor))
        )
        if values.numel():
            repeated = not isinstance(tensor, TensorSlice)
            yield OwnPiece(name, start, start + values.numel(), values.dtype, repeated), values


def _descending_element_size(pair: tuple[OwnPiece, torch.Tensor]) -> int:
    """Order pieces so that each lies at a multiple of its element size without gaps, as safetensors wants it."""
    return -pair[0].dtype.itemsize


def _form(tensor: torch.Tensor | TensorSlice) -> TensorSpec:
    if isinstance(tensor, TensorSlice):
        return TensorSpec(tensor.values.dtype, tuple(tensor.shape), tuple(tensor.order))
    return TensorSpec(tensor.dtype, tuple(tensor.shape), storage_order(tensor))


class Staging:
    """Host memory in which the data file of each save is put together. It is kept: fresh pages cost far more time than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Have `nbytes` of memory that starts at a page and was touched."""
        if self._memory.numel() < nbytes:
            # first: the old need not stay beside the new
            self._memory = torch.empty(0, dtype=torch.uint8)
            room = torch.empty(nbytes + PAGESIZE, dtype=torch.uint8, pin_memory=pinned)
            self._memory = room[-room.data_ptr() % PAGESIZE :].zero_()

    def copy(self, pieces: Sequence[OwnPiece], tensors: Sequence[torch.Tensor]) -> memoryview:
        """Return the content of a data file that holds 1-D tensors as these pieces; it stays until the next call."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        header = torch.frombuffer(bytearray(_header(pieces)), dtype=torch.uint8)
        parts = [header, *(tensor.contiguous().view(torch.uint8) for tensor in tensors)]
        sizes = [part.numel() for part in parts]
        self.reserve(sum(sizes), pinned=bool(devices))
        for part, place in zip(parts, self._memory[: sum(sizes)].split(sizes), strict=True):
            place.copy_(part, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return self._memory.numpy().data[: sum(sizes)]


def write_part(path: Path, mine: Contribution, data: memoryview, go_on: Callable[[], None]) -> Part:
    """Write the data file at `path`, durably, and return the part that tells of it. `go_on` may raise between segments."""
    checksums = write_durably(path, data, SEGMENT_BYTES, go_on)
    places = _places(mine.pieces, len(data))
    digests = [
        checksum(data[start:stop]) if piece.repeated else None
        for piece, (start, stop) in zip(mine.pieces, places, strict=True)
    ]
    return part_of(mine, digests, DataFile(path.name, len(data), SEGMENT_BYTES, checksums))


def part_of(mine: Contribution, digests: Sequence[str | None], file: DataFile) -> Part:
    """Return the part that tells of a data file with the pieces at its end; `digests` are the checksums of the repeated ones."""
    table = [
        (piece.tensor, piece.start, piece.stop, start, digest)
        for piece, (start, _), digest in zip(
            mine.pieces, _places(mine.pieces, file.size), digests, strict=True
        )
    ]
    return Part(mine.state, mine.forms, table, file)


def _header(pieces: Sequence[OwnPiece]) -> bytes:
    """Return the header of a safetensors file; its data is the bytes of all pieces one after the other.

    Source: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, Plain] = {}
    for piece, (start, stop) in zip(
        pieces, _places(pieces, sum(piece.nbytes for piece in pieces)), strict=True
    ):
        dtype = _STORED.get(piece.dtype)
        count = piece.stop - piece.start if dtype else piece.nbytes
        entries[piece.key] = {
            "dtype": dtype or "U8",
            "shape": [count],
            "data_offsets": [start, stop],
        }
    text = canonical(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def data_bytes(pieces: Sequence[OwnPiece]) -> int:
    """Return the size of a data file that holds these pieces."""
    return len(_header(pieces)) + sum(piece.nbytes for piece in pieces)


def _places(pieces: Sequence[OwnPiece], end: int) -> Iterator[tuple[int, int]]:
    """Yield the (first byte, byte after the last) of pieces that lie one after the other up to `end`."""
    start = end - sum(piece.nbytes for piece in pieces)
    return pairwise(accumulate((piece.nbytes for piece in pieces), initial=start))
