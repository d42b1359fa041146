"""A worker's part of an in-memory snapshot in an anonymous file.

The file holds, in this order: a header with the range and checksum of the text; from byte START,
the content of the worker's data file on disk, which may be written from here; then the text: a
line of JSON, the label, and the `Part`, which has the checksums of the pieces.

The header is zeroed first and written last, and the kernel keeps everything that a process wrote
before it was killed. So an incomplete part has no header. Checksums detect later damage.
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
from samestep.snapshot.files import DataFile, checksum, write_at
from samestep.snapshot.part import Contribution, Part, Pin, copy_together, describe, gpu_of
from samestep.snapshot.state import canonical

START: Final = mmap.PAGESIZE
SEGMENT_BYTES: Final = 2**20
_HEADER: Final = struct.Struct("<8sQQ32s")  # magic, the text's first byte, size and checksum
_MAGIC: Final = b"samestep"


@dataclass(frozen=True)
class SlotContent:
    """The content of a slot.

    The data file that `part` names is the slot itself from byte START.
    """

    label: Mapping[str, Any]
    part: Part


class MemorySlot:
    """A slot that a worker writes to."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pin: Pin | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate room for a data file of `nbytes`; new pages take far more time than a copy.

        Raises `OSError` if there is not enough memory.
        """
        size = START + nbytes
        if len(self._memory) < size:
            # writing to memory that cannot be allocated would kill the process
            os.posix_fallocate(self._file, 0, size)
            self._pin = None  # before its memory is freed
            self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)

    def missing_bytes(self, nbytes: int) -> int:
        """Return how many more bytes of memory the slot needs for a data file of `nbytes`."""
        return max(0, START + nbytes - os.fstat(self._file).st_size)

    def write(
        self, label: Mapping[str, Any], contribution: Contribution, tensors: Sequence[torch.Tensor]
    ) -> memoryview:
        """Replace the content by a worker's part, with `tensors` as the values of its pieces.

        Returns the content of the data file, valid until the next call.
        """
        self.reserve(contribution.file_bytes)
        # From here until the last line, the slot holds no part. A kill in between costs only this
        # one.
        write_at(self._file, bytes(_HEADER.size), 0)
        # uint8 [nbytes] each
        contents = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        end = START + contribution.file_bytes
        data = self._memory[START:end]  # uint8 [file_bytes], as in a data file
        head = torch.frombuffer(bytearray(contribution.header), dtype=torch.uint8)
        if (device := gpu_of(contents)) is not None:
            # GPUs copy to their places in the slot, all at once; the checksums follow on the host.
            self._pin = self._pin or Pin(self._memory, device)
            parts = data.split([len(head), *map(len, contents)])[1:]
            copy_together(contents, parts)
            contents = list(parts)
        checksums = _copy([head, *contents], data)
        digests = [
            checksum(content.numpy().data) if piece.repeated else None
            for piece, content in zip(contribution.pieces, contents, strict=True)
        ]
        file = DataFile("slot", contribution.file_bytes, SEGMENT_BYTES, tuple(checksums))
        part = describe(contribution, digests, file)  # the same as a part file on disk
        text = canonical(dict(label)).encode() + b"\n" + part.to_bytes()
        write_at(self._file, text, end)  # before the header that points to it
        write_at(self._file, _HEADER.pack(_MAGIC, end, len(text), checksum(text).encode()), 0)
        return data.numpy().data


def read(file: int) -> SlotContent | None:
    """Return the content of a slot, None if its part is incomplete.

    Raises `SnapshotError` if the header or text is damaged. The checksums of tensors are verified
    when they are read.
    """
    header = os.pread(file, _HEADER.size, 0)
    if not any(header):  # never written, or a save was interrupted
        return None
    magic, start, length, expected = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    is_complete = magic == _MAGIC and start + length <= os.fstat(file).st_size
    text = os.pread(file, length, start) if is_complete else b""
    if not is_complete or checksum(text).encode() != expected:
        raise SnapshotError("a memory slot is damaged: its description does not match its checksum")
    label, _, body = text.partition(b"\n")
    try:
        part, fields = Part.from_bytes(body), dict(json.loads(label))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"a memory slot is damaged: {error!r:.200}") from error
    part = replace(part, file=replace(part.file, name=str(file)))
    return SlotContent(fields, part)


def _copy(contents: Sequence[torch.Tensor], memory: torch.Tensor) -> list[str]:
    """Copy bytes in a row and return the checksums of segments, computed while in CPU caches."""
    checksums, data, copied = [], memory.numpy().data, 0
    address = memory.data_ptr()
    for content in contents:
        for chunk in content.split(SEGMENT_BYTES):  # at most one segment ends in each
            before, copied = copied, copied + chunk.numel()
            if chunk.data_ptr() != address + before:  # a GPU's are there
                memory[before:copied].copy_(chunk)
            if before // SEGMENT_BYTES < copied // SEGMENT_BYTES:  # a segment is complete
                stop = copied // SEGMENT_BYTES * SEGMENT_BYTES
                checksums.append(checksum(data[stop - SEGMENT_BYTES : stop]))
    if copied % SEGMENT_BYTES:
        checksums.append(checksum(data[copied // SEGMENT_BYTES * SEGMENT_BYTES :]))
    return checksums
