"""One worker's part of a snapshot: the pieces of tensors that it writes, and their data file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import DataFile, checksum, write_durably
from samestep.snapshot.manifest import TensorSpec
from samestep.snapshot.state import Plain, States, Tensors, canonical, flatten, merge
from samestep.step.layout import TensorSlice, flattened, storage_order

SEGMENT_BYTES: Final = 2**22  # with one checksum; several readers divide a file by segments
HEADER_ALIGNMENT: Final = 64  # bytes; readers may map the first tensor of a file into memory
SHARE_ALIGNMENT: Final = 64  # elements; two workers share no cache line or vector of a tensor
# Other dtypes are stored as bytes: not every reader of safetensors knows them, and the manifest
# names them.
_DTYPE_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


# Others have neither infinities nor NaNs, or no kernel that finds them.
_SUMMED: Final = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
}  # fmt: skip


@dataclass(frozen=True)
class LocalPiece:
    """Elements [start, stop) of a tensor that this worker writes.

    `repeated` if other workers may write the same elements.
    """

    tensor: str
    start: int
    stop: int
    dtype: torch.dtype
    repeated: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class Contribution:
    """The state that a worker writes: JSON, and pieces of tensors with their specifications."""

    state: Plain
    specs: Mapping[str, TensorSpec]
    pieces: Sequence[LocalPiece]

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def header(self) -> bytes:
        """The header of a safetensors file; the bytes of all pieces follow.

        Source: https://github.com/huggingface/safetensors#format
        """
        # A worker writes at most one range of each tensor, so the names are unique. Tools that read
        # safetensors can look into the file; samestep itself uses the manifest.
        entries: dict[str, Plain] = {}
        for piece, (start, stop) in zip(self.pieces, self.ranges(self.nbytes), strict=True):
            dtype = _DTYPE_NAMES.get(piece.dtype)
            entries[f"{piece.tensor}[{piece.start}:{piece.stop}]"] = {
                "dtype": dtype or "U8",
                "shape": [piece.stop - piece.start if dtype else piece.nbytes],
                "data_offsets": [start, stop],
            }
        text = canonical(entries).encode()
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)  # the format allows spaces after JSON
        return len(text).to_bytes(8, "little") + text

    @property
    def file_bytes(self) -> int:
        """The size of the data file."""
        return len(self.header) + self.nbytes

    def ranges(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield the [start, stop) bytes of the pieces in a file, where the last ends at `end`."""
        sizes = (piece.nbytes for piece in self.pieces)
        return pairwise(accumulate(sizes, initial=end - self.nbytes))


@dataclass(frozen=True)
class Part:
    """The description of what one worker wrote, for the worker that commits the snapshot.

    Each piece is (tensor, start, stop, offset in the file, checksum or None). Only pieces that
    other workers may also have written have a checksum. `nonfinite` names the tensors whose pieces
    have infinities or NaNs.
    """

    state: Plain
    specs: Mapping[str, TensorSpec]
    pieces: Sequence[tuple[str, int, int, int, str | None]]
    file: DataFile
    nonfinite: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """Return the content of a part file."""
        return canonical(
            {
                "state": self.state,
                "specs": {name: spec.to_json() for name, spec in self.specs.items()},
                "pieces": [list(piece) for piece in self.pieces],
                "file": self.file.to_json(),
                "nonfinite": list(self.nonfinite),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Read the content of a part file."""
        body: dict[str, Any] = json.loads(data)
        return cls(
            state=body["state"],
            specs={name: TensorSpec.from_json(spec) for name, spec in body["specs"].items()},
            pieces=[tuple(piece) for piece in body["pieces"]],
            file=DataFile.from_json(body["file"]),
            nonfinite=body["nonfinite"],
        )


def contribution_of(
    shared: States, own_states: States, rank: int, workers: int
) -> tuple[Contribution, list[torch.Tensor]]:
    """Return what a worker writes, and the values of its pieces: 1-D, in storage order, not copied.

    A worker writes its share of the tensors that are equal on all workers, and all of its own
    state. Raises `SnapshotError` with the path of an unsupported value.
    """
    # tensors by path, not copied
    shared_state, shared_tensors = flatten(dict(shared))
    own_state, own_tensors = flatten(dict(own_states))
    if both := sorted(shared_tensors.keys() & own_tensors.keys()):
        raise SnapshotError(
            f"tensor {both[0]} must be either shared by all workers or this worker's own, got both"
        )
    # Shared tensors are divided by bytes, so that all disks and hosts have equal work. What a
    # worker has of its own, it writes itself.
    pairs = [*_shared_pieces(shared_tensors, rank, workers), *_own_pieces(own_tensors)]
    # safetensors requires each piece at a multiple of its element size, without gaps
    pairs.sort(key=lambda pair: -pair[0].dtype.itemsize)
    pieces = [piece for piece, _ in pairs]
    # Rank 0 also describes tensors without elements, of which nobody writes a piece. The others
    # leave out what they do not write, which keeps the parts of many workers small.
    described = {piece.tensor for piece in pieces} if rank else shared_tensors.keys()
    tensors = {name: tensor for name, tensor in shared_tensors.items() if name in described}
    specs = {name: _spec(tensor) for name, tensor in (tensors | own_tensors).items()}
    state = merge(shared_state, own_state) if rank == 0 else own_state  # plain values once
    return Contribution(state, specs, pieces), [values for _, values in pairs]


def share(sizes: Sequence[tuple[int, int]], rank: int, workers: int) -> list[range]:
    """Return the elements of each tensor that worker `rank` writes.

    `sizes` are (elements, bytes per element). The concatenated bytes of all tensors are cut evenly,
    and each cut moves down to a multiple of 64 elements of its tensor. The ranges of all workers
    hold every element exactly once.
    """
    # bytes, [tensors + 1]
    offsets = list(accumulate((count * nbytes for count, nbytes in sizes), initial=0))
    # This worker has the bytes [low, high) of all tensors in a row.
    low, high = (offsets[-1] * worker // workers for worker in (rank, rank + 1))

    def element(byte: int, count: int, nbytes: int) -> int:
        if byte >= count * nbytes:
            return count
        # The worker that ends at a cut and the one that begins there compute the same element.
        return max(byte, 0) // (nbytes * SHARE_ALIGNMENT) * SHARE_ALIGNMENT

    return [
        range(element(low - offset, *size), element(high - offset, *size))
        for offset, size in zip(offsets[:-1], sizes, strict=True)
    ]


def _shared_pieces(
    tensors: Tensors, rank: int, workers: int
) -> Iterator[tuple[LocalPiece, torch.Tensor]]:
    complete: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted(tensors.items()):  # the same order on all workers
        if isinstance(tensor, TensorSlice):
            raise SnapshotError(
                f"tensor {name} must be complete to be shared by all workers, got a slice; "
                "pass it as this worker's own"
            )
        complete.append((name, tensor))
    sizes = [(tensor.numel(), tensor.element_size()) for _, tensor in complete]
    for (name, tensor), elements in zip(complete, share(sizes, rank, workers), strict=True):
        if elements:
            values = flattened(tensor)[elements.start : elements.stop]  # 1-D, [stop - start]
            yield LocalPiece(name, elements.start, elements.stop, values.dtype), values


def _own_pieces(tensors: Tensors) -> Iterator[tuple[LocalPiece, torch.Tensor]]:
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorSlice):
            # A slice of a sharded optimizer: no other worker has these elements.
            start, values, repeated = tensor.start, tensor.values, False
        else:
            # A complete tensor, which other workers may have as well. All of them write it, and the
            # commit keeps one copy after comparing the digests.
            start, values, repeated = 0, flattened(tensor), True
        if count := values.numel():
            yield LocalPiece(name, start, start + count, values.dtype, repeated), values


def _spec(tensor: torch.Tensor | TensorSlice) -> TensorSpec:
    if isinstance(tensor, TensorSlice):
        return TensorSpec(tensor.values.dtype, tuple(tensor.shape), tuple(tensor.order))
    return TensorSpec(tensor.dtype, tuple(tensor.shape), storage_order(tensor))


class Pin:
    """Pins memory that exists, as long as this object does, so that copies from GPUs need no steps.

    Unlike torch's own pinned memory, it is not rounded up to a power of two. If the system refuses,
    the memory stays as it is, and copies are slower.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory = memory

        def register() -> bool:
            torch.cuda.set_device(device)  # a new thread is on the first GPU
            cudart = torch.cuda.cudart()
            return int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

        # a refusal would fail the next kernel of the same thread
        with ThreadPoolExecutor(1) as thread:
            self._is_pinned = thread.submit(register).result()

    def __del__(self) -> None:
        if self._is_pinned and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def gpu_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the GPU of the first tensor that is on one."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def copy_together(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors of equal sizes to host memory, with one wait per GPU."""
    for source, target in zip(sources, targets, strict=True):
        # copies from a GPU to pinned memory are only queued here
        target.copy_(source, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.synchronize(device)


class StagingBuffer:
    """Host memory that holds the content of a data file.

    Each save uses the same memory, since new pages take far more time than the copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pin: Pin | None = None

    def reserve(self, nbytes: int, device: torch.device | None = None) -> None:
        """Allocate at least `nbytes` of memory that starts at a page, and touch its pages.

        It is pinned for copies from `device`.
        """
        if self._memory.numel() < nbytes:
            # free the old memory before the new is allocated
            self._pin = None
            self._memory = torch.empty(0, dtype=torch.uint8)
            room = torch.empty(nbytes + PAGESIZE, dtype=torch.uint8)
            # Writes that bypass the page cache must start at a page. Zeroing allocates the pages
            # now.
            self._memory = room[-room.data_ptr() % PAGESIZE :].zero_()
        if device is not None and self._pin is None:
            self._pin = Pin(self._memory, device)

    def copy(self, contribution: Contribution, tensors: Sequence[torch.Tensor]) -> memoryview:
        """Return the content of a data file with the 1-D tensors, valid until the next call."""
        head = torch.frombuffer(bytearray(contribution.header), dtype=torch.uint8)
        # Each is uint8 [nbytes]; the file holds them in this order, without gaps.
        sources = [head, *(tensor.contiguous().view(torch.uint8) for tensor in tensors)]
        sizes = [source.numel() for source in sources]
        self.reserve(sum(sizes), gpu_of(tensors))
        copy_together(sources, self._memory[: sum(sizes)].split(sizes))
        return self._memory.numpy().data[: sum(sizes)]


def write_part(
    path: Path,
    contribution: Contribution,
    data: memoryview,
    before_segment: Callable[[], None],
    earlier: DataFile | None = None,
) -> Part:
    """Write the data file durably and return its description; `before_segment` may raise.

    If an `earlier` file beside it has the same data, that one is described instead.
    """
    if earlier is not None and earlier.holds(data) and path.with_name(earlier.name).exists():
        file = earlier
    else:
        checksums = write_durably(path, data, SEGMENT_BYTES, before_segment)
        file = DataFile(path.name, len(data), SEGMENT_BYTES, checksums)
    # Checksums of segments cannot be compared: segments differ between the workers' files.
    digests = [
        checksum(data[start:stop]) if piece.repeated else None
        for piece, (start, stop) in zip(
            contribution.pieces, contribution.ranges(len(data)), strict=True
        )
    ]
    return replace(describe(contribution, digests, file), nonfinite=_nonfinite(contribution, data))


def _nonfinite(contribution: Contribution, data: memoryview) -> list[str]:
    """Return the names of tensors that have infinities or NaNs in the pieces of a data file."""
    return [
        piece.tensor
        for piece, (start, _) in zip(
            contribution.pieces, contribution.ranges(len(data)), strict=True
        )
        if piece.dtype in _SUMMED
        and not _is_finite(
            torch.frombuffer(data, dtype=piece.dtype, count=piece.stop - piece.start, offset=start)
        )
    ]


def _is_finite(values: torch.Tensor) -> bool:
    # the sum takes no memory; that of finite values may overflow
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def describe(contribution: Contribution, digests: Sequence[str | None], file: DataFile) -> Part:
    """Return the description of a data file that ends with the pieces of a contribution.

    `digests` are the checksums of repeated pieces.
    """
    pieces = zip(contribution.pieces, contribution.ranges(file.size), digests, strict=True)
    # offsets are bytes from the start of the file, header included
    table = [
        (piece.tensor, piece.start, piece.stop, first, digest)
        for piece, (first, _), digest in pieces
    ]
    return Part(contribution.state, contribution.specs, table, file)
