"""Data files with checksums: their description, and how to write, read and send them.

A checksum is XXH3 of 128 bits. It detects damage at the speed of memory, but not forgery: a
snapshot can hold wrong values, but never code.
Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from xxhash import xxh3_128

from samestep.comm.base import World
from samestep.errors import SnapshotError
from samestep.storage import open_regular

Destination = tuple[int, memoryview]  # the offset in a file, and the memory for the bytes there
Segment = tuple[int, int, int, str]  # a data file's index, and its bytes [start, stop)'s checksum

READING: Final = "reading a snapshot"
TRANSFER_BYTES: Final = 2**28  # that a host receives at a time
# threads: one copies and compares while the other waits for the disk or for new pages
READERS: Final = 2
LARGEST_SEGMENT_BYTES: Final = 2**28
READ_BYTES: Final = 2**18  # at a time, so that the checksum finds them in the CPU cache
UNCACHED: Final = getattr(os, "O_DIRECT", 0)
# no path: a manifest must not name files elsewhere
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DataFile:
    """A safetensors file of a snapshot: its name, bytes and the checksum of each segment."""

    name: str
    size: int
    segment_bytes: int
    # of consecutive segments, so that several workers can check one file
    checksums: tuple[str, ...]

    def segments(self) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, checksum) of each segment; the last one may be shorter."""
        for number, expected in enumerate(self.checksums):
            start = number * self.segment_bytes
            yield start, min(start + self.segment_bytes, self.size), expected

    def holds(self, data: memoryview) -> bool:
        """Return whether the file was written with these bytes."""
        return self.size == len(data) and all(
            checksum(data[start:stop]) == expected for start, stop, expected in self.segments()
        )

    def to_json(self) -> list[Any]:
        """Return the description as JSON; `from_json` is the inverse."""
        return [self.name, self.size, self.segment_bytes, list(self.checksums)]

    @classmethod
    def from_json(cls, plain: Any) -> DataFile:
        """Read a description. Raises `ValueError` or `TypeError` if it is invalid."""
        name, size, segment_bytes, checksums = plain
        if not _FILE_NAME.fullmatch(typed(name, str)):
            raise ValueError(f"expected a plain file name, got {name!r}")
        if not 0 < typed(segment_bytes, int) <= LARGEST_SEGMENT_BYTES:
            raise ValueError(
                f"segments must have 1 to {LARGEST_SEGMENT_BYTES} bytes, got {segment_bytes}"
            )
        if len(checksums) != (count := -(-typed(size, int) // segment_bytes)):
            raise ValueError(f"expected {count} checksums for {name}, got {len(checksums)}")
        return cls(name, size, segment_bytes, tuple(typed(digest, str) for digest in checksums))


def typed(value: Any, kind: type) -> Any:
    """Return `value`. Raises `TypeError` unless its type is exactly `kind`."""
    if type(value) is not kind:  # a bool is an instance of int
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def file_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises `OSError` for others, such as links and pipes."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def opened_size(path: Path) -> int:
    """Return the bytes of a file as `file_size` does, but ask a file server rather than its cache.

    What another host has just written is certain only for a file that is opened.
    """
    descriptor = open_regular(path)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def checksum(data: bytes | memoryview) -> str:
    """Return the hexadecimal checksum of `data`."""
    return xxh3_128(data).hexdigest()


def damage(name: str, start: int, stop: int) -> SnapshotError:
    """Return the error for bytes [start, stop) of a file that differ from their checksum."""
    return SnapshotError(f"{name} is damaged: bytes {start} to {stop} do not match their checksum")


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset` of a file."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)  # perhaps fewer bytes than asked
        rest, offset = rest[count:], offset + count


def write_durably(
    path: Path, data: memoryview, segment_bytes: int, before_segment: Callable[[], None]
) -> tuple[str, ...]:
    """Write a file durably and return the checksums of its segments.

    The data bypasses the page cache if the file system allows that and `data` starts at a page:
    no copy, no new pages, and the data that training reads stays cached. `before_segment` is called
    before each segment and may raise to stop.
    """
    checksums = []
    with path.open("wb", buffering=0) as file:
        _set_uncached(file.fileno(), uncached=True)  # refused by some file systems
        for start in range(0, len(data), segment_bytes):
            before_segment()  # a write cannot be interrupted, the loop can
            segment = data[start : start + segment_bytes]
            # Of memory, before the write, so that checks also find what the disk and its driver
            # did.
            checksums.append(checksum(segment))
            while segment:  # a write may take fewer bytes
                segment = segment[_write(file.fileno(), segment) :]
        # What vouches for this data is written only after this call.
        os.fsync(file.fileno())
    return tuple(checksums)


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except OSError as error:
        # Only complete blocks bypass the cache. The end of a file does not, and neither does any
        # other data if blocks are larger than pages.
        if error.errno != errno.EINVAL or not _set_uncached(descriptor, uncached=False):
            raise
        return os.write(descriptor, data)


def _set_uncached(descriptor: int, *, uncached: bool) -> bool:
    """Return whether this changed the mode; a file system may refuse."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | UNCACHED if uncached else flags & ~UNCACHED
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) != flags


def read_into(descriptor: int, offset: int, buffers: Iterable[memoryview]) -> str:
    """Fill buffers with the bytes from `offset` and return their checksum.

    Raises `OSError` if the file ends early.
    """
    digest = xxh3_128()
    for buffer in buffers:
        rest = buffer
        while rest:
            count = os.preadv(descriptor, [rest[:READ_BYTES]], offset)
            if not count:
                raise OSError(errno.EIO, "the file ends early")
            digest.update(rest[:count])  # still in the CPU's cache
            rest, offset = rest[count:], offset + count
    return digest.hexdigest()


def read_data_file(
    directory: Path,
    file: DataFile,
    destinations: Sequence[Destination] = (),
    first_byte: int = 0,
    part: tuple[int, int] = (0, 1),
    *,
    only_destinations: bool = False,
) -> None:
    """Read and check a data file that begins at `first_byte`, filling sorted `destinations`.

    `part` (k, n) reads only the k-th of n parts: several readers have one each. Segments without
    destinations are checked as well, unless `only_destinations`. Raises `SnapshotError` if a
    checksum differs.
    """

    def read(segments: Sequence[tuple[int, int, str]]) -> None:
        # Bytes that nobody needs are read as well, since the checksum is that of a segment. Every
        # thread has its own room for them.
        spare = memoryview(bytearray(min(file.segment_bytes, file.size)))
        descriptor = open_regular(directory / file.name, follows_links=True)  # memory of a process
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            for start, stop, expected in segments:
                buffers = buffers_of(start, stop, destinations, spare)
                if read_into(opened.fileno(), first_byte + start, buffers) != expected:
                    raise damage(file.name, start, stop)

    def is_used(start: int, stop: int, _: str) -> bool:
        # the last destination that begins before the segment ends
        last = bisect_left(destinations, stop, key=itemgetter(0)) - 1
        return last >= 0 and destinations[last][0] + len(destinations[last][1]) > start

    segments = [
        segment for segment in file.segments() if not only_destinations or is_used(*segment)
    ]
    # Consecutive segments for each reader and thread, so that each reads in the order of the file.
    number, parts = part
    segments = segments[len(segments) * number // parts : len(segments) * (number + 1) // parts]
    threads = READERS if parts == 1 else 1  # several workers of a host already read together
    share = max(-(-len(segments) // threads), 1)
    shares = [segments[start : start + share] for start in range(0, len(segments), share)]
    with ThreadPoolExecutor(threads) as readers:
        list(readers.map(read, shares))  # raises the first error


def buffers_of(
    start: int, stop: int, destinations: Sequence[Destination], spare: memoryview
) -> Iterator[memoryview]:
    """Yield the memory for bytes [start, stop) of a file, parts of `spare` between destinations."""
    # the last destination that begins at `start` or before, or the first one
    first = max(bisect_right(destinations, start, key=itemgetter(0)) - 1, 0)
    for offset, memory in destinations[first:]:
        if offset >= stop:
            break
        low, high = max(offset, start), min(offset + len(memory), stop)
        if low < high:
            if start < low:
                yield spare[: low - start]
            yield memory[low - offset : high - offset]
            start = high
    if start < stop:
        yield spare[: stop - start]


class Holders:
    """The workers that can read data files, and those that send and receive them. Pure: ranks only.

    `readable` has the indices of files that each worker can read, None for all `count` files. Each
    of `hosts` has the ranks that share memory; the first of them receives what its host lacks.
    """

    def __init__(
        self, readable: Sequence[Collection[int] | None], hosts: Sequence[Sequence[int]], count: int
    ) -> None:
        self._readable = readable
        self._lacking: dict[int, set[int]] = {}  # by receiver
        # All workers compute the same assignment from the same answers, without further messages. A
        # host with a worker that reads all files lacks nothing.
        for host in hosts:
            if all(readable[rank] is not None for rank in host):
                present = set().union(*(readable[rank] or () for rank in host))
                self._lacking[host[0]] = set(range(count)) - present
        self._sent: dict[int, list[int]] = {}  # by sender
        # The first worker that has a file sends it to all hosts that lack it.
        for index in sorted(set().union(*self._lacking.values())):
            sender = next(rank for rank in range(len(readable)) if self.can_read(rank, index))
            self._sent.setdefault(sender, []).append(index)

    def can_read(self, rank: int, index: int) -> bool:
        """Return whether a worker can read a data file."""
        files = self._readable[rank]
        return files is None or index in files

    def receivers(self, sender: int) -> list[int]:
        """Return the workers that receive everything that `sender` sends."""
        files = self._sent[sender]
        return [rank for rank, lacking in self._lacking.items() if not lacking.isdisjoint(files)]

    def rounds(self, files: Sequence[DataFile]) -> Iterator[dict[int, list[Segment]]]:
        """Yield what each worker sends at the same time; a worker receives `TRANSFER_BYTES`."""
        # a worker may receive from all senders at once
        limit = TRANSFER_BYTES // max(len(self._sent), 1)
        left = {
            sender: deque(
                (index, *segment) for index in sent for segment in files[index].segments()
            )
            for sender, sent in self._sent.items()
        }
        while any(left.values()):
            sent_now: dict[int, list[Segment]] = {}
            for sender, segments in left.items():
                size = 0
                # at least one segment, whatever its size
                while segments and (not size or size + _length(segments[0]) <= limit):
                    size += _length(segments[0])
                    sent_now.setdefault(sender, []).append(segments.popleft())
            yield sent_now


def _length(segment: Segment) -> int:
    _, start, stop, _ = segment
    return stop - start


def transfer(
    world: World,
    segments: Mapping[int, Sequence[Segment]],
    holders: Holders,
    read: Callable[[Segment, memoryview], object],
    write: Callable[[Segment, memoryview], object],
) -> None:
    """Send and receive one round of segments by sender; collective.

    `read` fills what this worker sends, and `write` gets what it receives; neither may raise.
    """

    def split(sender: int, data: Tensor) -> Iterator[tuple[Segment, memoryview]]:
        first = 0
        for segment in segments[sender]:
            yield segment, data.numpy().data[first : first + _length(segment)]
            first += _length(segment)

    # bytes of this round; both sides know them
    sizes = {sender: sum(map(_length, sent_segments)) for sender, sent_segments in segments.items()}
    sent: dict[int, Tensor] = {}
    if world.rank in segments:
        outgoing = torch.empty(sizes[world.rank], dtype=torch.uint8)  # [bytes]
        for segment, part in split(world.rank, outgoing):
            read(segment, part)
        sent = dict.fromkeys(holders.receivers(world.rank), outgoing)
    senders = [sender for sender in segments if world.rank in holders.receivers(sender)]
    # [bytes] by sender; each holds the sender's segments in a row
    received = {sender: torch.empty(sizes[sender], dtype=torch.uint8) for sender in senders}
    world.transfer(sent, received, READING)  # collective, even for workers without a share
    for sender, data in received.items():
        for segment, part in split(sender, data):
            write(segment, part)
