"""The chain of a run: one row of 64 bytes per step, which fixes everything before it.

The head of a step is the SHA-256 of the head before it, the step's number and the run's seed (each
8 bytes, little endian) and four digests: of its sample indices by lane, of its losses by lane, of
its learning rates, and of the program. So two runs with the same head have made the same steps up
to there, and a reader needs neither torch nor the data to check every link. `plugins/history.py`
says what the digests cover.

The file begins with 64 bytes: `MAGIC`, the format, the first step and the seed (8 bytes each), and
the head before the first step. That is `origin` of a run that begins anew. A run that begins with a
snapshot, even that of another run, continues the chain of that snapshot. Steps are numbered from 0,
as in the record: the head of the state after n steps is that of step n - 1.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from samestep.errors import RecordError
from samestep.record.events import NO_SPACE, cannot_begin, read_events
from samestep.record.source import STARTS, valid_until
from samestep.storage import make_folder, open_regular, sync

FILE: Final = "record/chain.bin"  # in a run's directory
EARLIER: Final = ".earlier"  # is appended to the name of a file that another history replaces
EVENT: Final = "state"  # in the record, of a snapshot: its step, the head before it and its digest
STATE: Final = "chain"  # the head of a run's state in a snapshot, hexadecimal
MAGIC: Final = b"ss-chain"
FORMAT: Final = 1  # grows when older versions can no longer read the file
_HEADER: Final = struct.Struct("<8sQQQ32s")
_LINK: Final = struct.Struct("<QQ")  # the step and the seed
ROW_BYTES: Final = 64
HEAD_BYTES: Final = 32
_READ_ROWS: Final = 4096  # by `check`, at a time
Parts: TypeAlias = tuple[bytes, bytes, bytes, bytes]  # the digests of a row, in its order


class Row(NamedTuple):
    """A step of a chain: its head of 32 bytes, and 8 bytes of each digest that it covers."""

    head: bytes
    samples: bytes
    losses: bytes
    rates: bytes
    program: bytes


def origin(seed: int) -> bytes:
    """Return the head before the first step of a run that begins with no snapshot."""
    return hashlib.sha256(b"samestep chain 1" + seed.to_bytes(8, "little")).digest()


def link(head: bytes, step: int, seed: int, parts: Iterable[bytes]) -> bytes:
    """Return the head of a step, of which `parts` are the four digests in the order of `Row`."""
    return hashlib.sha256(head + _LINK.pack(step, seed) + b"".join(parts)).digest()


def short_digest(content: bytes) -> bytes:
    """Return the 8 bytes of a SHA-256 that a row has of each part."""
    return hashlib.sha256(content).digest()[:8]


class Chain:
    """Reads the chain of a run, which may still write it; a row takes one read.

    Attributes: `first` (int), the step of the first row; `start` (bytes), the head before it, of
    the snapshot from which a run began; `seed` (int).
    """

    def __init__(self, directory: Path, descriptor: int) -> None:
        """Take the open file of a run's `directory`; use `open`."""
        self._directory, self._descriptor = directory, descriptor
        self._path = directory / FILE
        header = os.pread(descriptor, _HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise RecordError(
                f"{self._path} must begin with {_HEADER.size} bytes from {MAGIC!r} on, got"
                f" {header[:8]!r}: no run writes that; copy the file again"
            )
        _, file_format, self.first, self.seed, self.start = _HEADER.unpack(header)
        if file_format != FORMAT:
            raise RecordError(
                f"{self._path} must have format {FORMAT}, got {file_format}; install the version of"
                " samestep that wrote it, or a newer one"
            )
        if max(self.first, self.seed) >= 2**63:
            numbers = f"first step {self.first} and seed {self.seed}"
            raise RecordError(f"{self._path} has the {numbers}: no run writes that; copy it again")

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Chain:
        """Open the chain in a run's directory. Raises `RecordError` if there is none."""
        path = Path(directory) / FILE
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise RecordError(
                f"cannot read a chain at {path}: {error.strerror}; pass the directory of a run that"
                " has made a step with this version of samestep or a newer one"
            ) from error
        try:
            return cls(Path(directory), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close the file; no other call follows."""
        os.close(self._descriptor)

    def __len__(self) -> int:
        """Return the number of complete rows, now."""
        return (os.fstat(self._descriptor).st_size - _HEADER.size) // ROW_BYTES

    def __getitem__(self, step: int) -> Row:
        """Return the row of a step. Raises `IndexError` if the chain does not have it."""
        row = b""
        if step >= self.first:
            row = os.pread(self._descriptor, ROW_BYTES, _place(step, self.first))
        if len(row) < ROW_BYTES:
            steps = f"{self.first} to {self.first + len(self) - 1}" if len(self) else "no step"
            raise IndexError(f"{self._path} has {steps}, not step {step}")
        return _row(row)

    def head_after(self, steps: int) -> bytes:
        """Return the head of the state after so many steps. Raises `IndexError`."""
        return self.start if steps == self.first else self[steps - 1].head

    def check(self) -> None:
        """Verify all links, and the heads that the record has of snapshots.

        Raises `RecordError`, which names the first wrong step.
        """
        head, step = self.start, self.first
        while rows := os.pread(self._descriptor, ROW_BYTES * _READ_ROWS, _place(step, self.first)):
            for at in range(0, len(rows), ROW_BYTES):
                if (size := len(rows) - at) < ROW_BYTES:
                    raise self._wrong(step, f"has {size} of {ROW_BYTES} bytes")
                own, *parts = _row(rows[at : at + ROW_BYTES])
                if own != link(head, step, self.seed, parts):
                    raise self._wrong(step, "does not follow from the head of the step before")
                head, step = own, step + 1
        if self.first == 0 and self.start != origin(self.seed):
            raise self._wrong(0, "does not begin as a run with its seed does")
        self._check_record(step)

    def _check_record(self, end: int) -> None:
        for steps, event in snapshots_of(self._directory).items():
            if steps > end:
                raise self._wrong(end, f"is missing, but the record has a snapshot of step {steps}")
            if steps >= self.first and self.head_after(steps).hex() != event.get("chain"):
                raise self._wrong(steps - 1, "has another head than the record")

    def _wrong(self, step: int, what: str) -> RecordError:
        return RecordError(
            f"{self._path}: step {step} {what}; the file was changed after the run wrote it, or"
            " only a part of it was copied"
        )


def snapshots_of(directory: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Return the newest event `EVENT` of each number of steps, without those that a start replaced.

    It is empty where there is no record, such as beside a copy of the chain alone.
    """
    found: dict[int, dict[str, Any]] = {}
    with suppress(RecordError):
        for event in read_events(directory):
            steps = event.get("step")
            if event.get("event") in STARTS:
                last, _ = valid_until(event)
                found = {steps: event for steps, event in found.items() if steps <= last}
            elif event.get("event") == EVENT and isinstance(steps, int):
                found[steps] = event
    return found


def _place(step: int, first: int) -> int:
    return _HEADER.size + (step - first) * ROW_BYTES


def _row(content: bytes) -> Row:
    return Row(
        content[:HEAD_BYTES], *(content[at : at + 8] for at in range(HEAD_BYTES, ROW_BYTES, 8))
    )


class ChainFile:
    """Writes the chain of a run from a step on, after the `head` of the state that it starts with.

    Rows of later steps, which the run will repeat, are removed, and so is a torn row. If the file
    does not have that head there, as when a run continues a snapshot of another directory, it
    begins with this step, and an earlier file gets the suffix `EARLIER`.
    """

    def __init__(self, directory: Path, step: int, seed: int, head: bytes) -> None:
        """Open the file in `directory`. Raises `RecordError` if it cannot be written."""
        self._path, self._seed = directory / FILE, seed
        self.step, self.head = step, head  # the next step, and the head before it
        self._first = step  # of the file
        try:
            make_folder(self._path.parent, parents=True)
            if self._continues(directory):
                self._descriptor = open_regular(self._path, os.O_RDWR)
                os.ftruncate(self._descriptor, _place(step, self._first))
            else:
                if self._path.exists():
                    self._path.replace(f"{self._path}{EARLIER}")
                self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
                header = _HEADER.pack(MAGIC, FORMAT, step, seed, head)
                os.pwrite(self._descriptor, header, 0)
                sync(self._path.parent)
                sync(directory)
        except OSError as error:
            raise cannot_begin(self._path, error) from error

    def _continues(self, directory: Path) -> bool:
        try:
            with closing(Chain.open(directory)) as chain:
                if chain.seed != self._seed or chain.head_after(self.step) != self.head:
                    return False
                self._first = chain.first
                return True
        except (RecordError, IndexError):
            return False

    def put(self, parts: Parts) -> bytes:
        """Write the row of the next step, with its digests; return its head. Raises `RecordError`.

        It may be written again, until `append` ends it.
        """
        head = link(self.head, self.step, self._seed, parts)
        row = b"".join((head, *parts))
        try:
            written = os.pwrite(self._descriptor, row, _place(self.step, self._first))
        except OSError as error:
            advice = "; free some space and restart" if error.errno in NO_SPACE else ""
            text = f"{self._path} cannot be written: {error.strerror}{advice}"
            raise RecordError(text) from error
        if written < len(row):
            text = f"{self._path}: wrote {written} of {len(row)} bytes; is the disk full?"
            raise RecordError(text)
        return head

    def append(self, parts: Parts) -> None:
        """Write the row of the next step, and go on to the one after it. Raises `RecordError`."""
        self.head = self.put(parts)
        self.step += 1

    def sync(self) -> None:
        """Wait until all rows would survive a power loss; from any thread. Raises `OSError`."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file; no call follows."""
        os.close(self._descriptor)
