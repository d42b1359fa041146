"""Images of a record: PNG files with names that stay inside their folder."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.events import parse_events

FOLDER: Final = "images"
MODES: Final = {(): "L", (1,): "L", (3,): "RGB"}
LONGEST_NAME: Final = 80


@dataclass(frozen=True)
class Picture:
    """An image that is to be written: a copy of its pixels, row by row. `mode` is Pillow's, L or RGB."""

    step: int
    name: str
    mode: str
    width: int
    height: int
    data: bytes

    @property
    def path(self) -> str:
        """Where its file is to be, relative to the run's directory."""
        return f"{FOLDER}/{safe_name(self.name)}-{self.step:08d}.png"


def copy_picture(step: int, name: str, pixels: Any) -> Picture:
    """Return a copy of `pixels`, a uint8 array [H, W], [H, W, 1] or [H, W, 3] (RGB). Raises `RecordError` on anything else."""
    try:
        view = memoryview(pixels)
    except TypeError as error:
        raise RecordError(
            f"image {name!r} is a {type(pixels).__name__}; expected a uint8 array [H, W], [H, W, 1] or [H, W, 3]"
        ) from error
    shape = view.shape or ()
    # height and width
    if view.format != "B" or len(shape) < 2 or 0 in shape or shape[2:] not in MODES:
        raise RecordError(
            f"image {name!r} has shape {list(shape)} and item format {view.format!r}; expected uint8 ('B') [H, W], [H, W, 1] or [H, W, 3]",
        )
    if find_spec("PIL") is None:
        raise RecordError(
            f'image {name!r} cannot be written without Pillow: pip install "samestep[images]"'
        )
    height, width = shape[:2]
    return Picture(step, name, MODES[shape[2:]], width, height, view.tobytes())


def write_picture(directory: Path, picture: Picture) -> int:
    """Write a PNG file under `directory`; return its bytes. Raises `RecordError`."""
    from PIL import Image

    file = directory / picture.path
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        unfinished.parent.mkdir(exist_ok=True)
        Image.frombytes(picture.mode, (picture.width, picture.height), picture.data).save(
            unfinished, format="png"
        )
        nbytes = unfinished.stat().st_size
        unfinished.replace(file)  # a reader never meets half an image
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise RecordError(f"{file} cannot be written: {error.strerror}") from error
    return nbytes


def paths_in(lines: bytes) -> list[str]:
    """Return the paths of the images that a record's lines tell of; whoever opens them must not trust them."""
    events = parse_events(line for line in lines.split(b"\n") if b'"image"' in line)
    return [str(event.get("path")) for event in events if event.get("event") == "image"]


def safe_name(name: str) -> str:
    """Return a file name for `name`; names that differ get file names that differ."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:LONGEST_NAME]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


MOST_BYTES: Final = 64 * 2**20  # of pixels; one image may be larger


class AsyncImageWriter:
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
