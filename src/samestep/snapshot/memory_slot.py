"""A worker's part of the state in an anonymous file: whole or not there, at whatever moment its writer was killed.

    from byte 0       a header, zeros while the part is being written: where the text lies, and its
    checksum from byte START   the bytes of the worker's pieces of tensors, one after the other then
    the text: a line of JSON, the label, and the `Part`, which has the checksums of those bytes

The header is blanked first and written last, and a killed process has done all that it did before
it was killed. So a part that was being written has no header, and what has a header that fits was
whole once; checksums say whether it still is.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import checksum
from samestep.snapshot.manifest import DataFile
from samestep.snapshot.part import Contribution, Part, part_of
from samestep.snapshot.state import canonical

START: Final = mmap.PAGESIZE
SEGMENT_BYTES: Final = 2**20
_HEADER: Final = struct.Struct("<8sQQ32s")  # a mark, the text's first byte, its bytes, its checksum
_MARK: Final = b"samestep"


@dataclass(frozen=True)
class Held:
    """What a slot holds in its first `nbytes` bytes. The data file that `part` names is the slot's from byte START on."""

    label: Mapping[str, Any]
    part: Part
    nbytes: int


class MemorySlot:
    """A slot that a worker writes to."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have room for `nbytes` bytes of tensors: fresh pages cost far more time than a copy. Raises `OSError` where there is none."""
        size = START + nbytes
        if len(self._memory) < size:
            # memory that is not there would end a process that writes to it
            os.posix_fallocate(self._file, 0, size)
            self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)

    def missing_bytes(self, nbytes: int) -> int:
        """Return how much memory more it needs for `nbytes` bytes of tensors."""
        return max(0, START + nbytes - os.fstat(self._file).st_size)

    def write(
        self, label: Mapping[str, Any], mine: Contribution, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Put a worker's part, with the values of its pieces, in the place of what is there."""
        nbytes = sum(piece.nbytes for piece in mine.pieces)
        self.reserve(nbytes)
        _put(self._file, bytes(_HEADER.size), 0)
        contents = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        checksums = _copy(contents, self._memory[START : START + nbytes])
        digests = [
            checksum(content.cpu().numpy().data) if piece.repeated else None
            for piece, content in zip(mine.pieces, contents, strict=True)
        ]
        part = part_of(mine, digests, DataFile("slot", nbytes, SEGMENT_BYTES, tuple(checksums)))
        text = canonical(dict(label)).encode() + b"\n" + part.to_bytes()
        _put(self._file, text, START + nbytes)
        _put(self._file, _HEADER.pack(_MARK, START + nbytes, len(text), checksum(text).encode()), 0)


def read(file: int) -> Held | None:
    """Return what a slot holds, None where that was never finished. Raises `SnapshotError` where it is damaged.

    The bytes of tensors are compared with their checksums by whoever reads them.
    """
    header = os.pread(file, _HEADER.size, 0)
    if not any(header):
        return None
    mark, start, length, expected = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    whole = mark == _MARK and start + length <= os.fstat(file).st_size
    text = os.pread(file, length, start) if whole else b""
    if not whole or checksum(text).encode() != expected:
        raise SnapshotError("a slot is damaged: what it says of itself does not have its checksum")
    label, _, body = text.partition(b"\n")
    part = Part.from_bytes(body)
    return Held(
        json.loads(label), replace(part, file=replace(part.file, name=str(file))), start + length
    )


def _copy(contents: Sequence[torch.Tensor], memory: torch.Tensor) -> list[str]:
    """Copy bytes one after the other and return the checksums of their segments, each taken while it is in the processor's cache."""
    checksums, data, copied = [], memory.numpy().data, 0
    for content in contents:
        for chunk in content.split(SEGMENT_BYTES):
            before, copied = copied, copied + len(chunk)
            memory[before:copied].copy_(chunk)
            if before // SEGMENT_BYTES < copied // SEGMENT_BYTES:
                stop = copied // SEGMENT_BYTES * SEGMENT_BYTES
                checksums.append(checksum(data[stop - SEGMENT_BYTES : stop]))
    if copied % SEGMENT_BYTES:
        checksums.append(checksum(data[copied // SEGMENT_BYTES * SEGMENT_BYTES :]))
    return checksums


def _put(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count
