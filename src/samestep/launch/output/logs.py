"""What a worker prints, kept in a file of the run's directory."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "logs"
_EARLY_BYTES: Final = 256 * 1024


class Log:
    """All that a worker prints in one attempt, as it printed it, after a line that tells attempt and time.

    The directory of a run becomes known when the run begins: what was printed before is held back,
    the last 256 KiB of it.
    """

    def __init__(self, rank: int, attempt: int) -> None:
        self._rank = rank
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._title = f"=== worker {rank}, attempt {attempt}, {now} ===\n".encode()
        self._early = bytearray()
        self._file: int | None = None

    def keep_in(self, directory: Path) -> None:
        """Write to a file under the run's directory from now on. Raises OSError."""
        self.close()
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"worker-{self._rank}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        separator = b"\n" if os.fstat(self._file).st_size else b""
        early, self._early = self._early, bytearray()
        self.write(separator + self._title + early)

    def write(self, data: bytes) -> None:
        """Keep bytes. Raises OSError where the disk is full or the file was removed."""
        if self._file is None:
            self._early += data
            del self._early[:-_EARLY_BYTES]
            return
        while data:
            data = data[os.write(self._file, data) :]
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(f"the log of worker {self._rank} was removed")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
