"""Images that wait to be written: a thread encodes them beside training, in the order in which they were logged."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from samestep.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable

    from samestep.record.images import Picture

MOST_BYTES: Final = 64 * 2**20  # of pixels; one image may be larger


class WaitingImages:
    """Has each image written by `write` in a thread of its own; what comes while too many bytes wait is dropped.

    What `write` raises is raised by the next call of `add` or `flush`.
    """

    def __init__(
        self, write: Callable[[Picture, bool], None], most_bytes: int = MOST_BYTES
    ) -> None:
        self._write, self._most_bytes = write, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Picture, bool]] = deque()  # the first one is being written
        self._bytes = 0
        self._error: RecordError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, picture: Picture, *, between: bool) -> bool:
        """Take an image; return false where it was dropped."""
        self._raise()
        with self._changed:
            if self._waiting and self._bytes + len(picture.data) > self._most_bytes:
                return False
            self._waiting.append((picture, between))
            self._bytes += len(picture.data)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="write images", daemon=True)
            self._thread.start()
        return True

    def flush(self) -> None:
        """Return when all that were taken are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
        self._raise()

    def close(self) -> None:
        """Write those that wait, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                picture, between = self._waiting[0]
            try:
                self._write(picture, between)
            except RecordError as error:
                self._error = error
            with self._changed:
                self._waiting.popleft()
                self._bytes -= len(picture.data)
                self._changed.notify_all()
