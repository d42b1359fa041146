"""Images of a record: PNG files with safe names, written in the background."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.events import parse_events
from samestep.storage import make_folder, sync, write_atomically

FOLDER: Final = "images"
MODES: Final = {(): "L", (1,): "L", (3,): "RGB"}
MAX_NAME_LENGTH: Final = 80
MAX_BYTES: Final = 64 * 2**20  # of queued pixels; a single image may be larger


@dataclass(frozen=True)
class Picture:
    """A copy of an image's pixels, row by row. `mode` is Pillow's: L or RGB."""

    step: int
    name: str
    mode: str
    width: int
    height: int
    data: bytes

    @property
    def path(self) -> str:
        """The path of its file, relative to the run's directory."""
        return f"{FOLDER}/{safe_name(self.name)}-{self.step:08d}.png"


def copy_picture(step: int, name: str, pixels: Any) -> Picture:
    """Copy `pixels`, a uint8 array [H, W], [H, W, 1] or [H, W, 3] (RGB).

    Raises `RecordError` for anything else, and if Pillow is missing.
    """
    expected = f"image {name!r} must be a uint8 array [H, W], [H, W, 1] or [H, W, 3]"
    try:
        view = memoryview(pixels)
    except TypeError as error:
        raise RecordError(f"{expected}, got {type(pixels).__name__}") from error
    shape = view.shape or ()
    if view.format != "B" or len(shape) < 2 or 0 in shape or shape[2:] not in MODES:
        raise RecordError(f"{expected}, got shape {list(shape)} of item format {view.format!r}")
    if find_spec("PIL") is None:
        raise RecordError(
            f'image {name!r} cannot be written without Pillow: pip install "samestep[images]"'
        )
    height, width = shape[:2]
    return Picture(step, name, MODES[shape[2:]], width, height, view.tobytes())


def write_picture(directory: Path, picture: Picture) -> int:
    """Write a PNG file below `directory`; return its size in bytes. Raises `RecordError`."""
    from PIL import Image

    file, png = directory / picture.path, BytesIO()
    size = picture.width, picture.height
    Image.frombytes(picture.mode, size, picture.data).save(png, format="png")
    try:
        make_folder(file.parent)
        sync(directory)  # the folder's name, too, survives a power loss
        write_atomically(file, png.getvalue())
    except OSError as error:
        raise RecordError(f"{file} cannot be written: {error.strerror}") from error
    return len(png.getvalue())


def image_paths(lines: bytes) -> list[str]:
    """Return the paths of the images named in lines of events; they are not checked."""
    events = parse_events(line for line in lines.split(b"\n") if b'"image"' in line)
    return [str(event.get("path")) for event in events if event.get("event") == "image"]


def safe_name(name: str) -> str:
    """Return a file name for `name`; different names get different file names."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:MAX_NAME_LENGTH]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


class AsyncImageWriter:
    """Calls `write` for each image in a thread, and drops images while the queue is full.

    The next call of `add` or `flush` raises a `RecordError` of `write`.
    """

    def __init__(self, write: Callable[[Picture, bool], None], max_bytes: int = MAX_BYTES) -> None:
        self._write, self._max_bytes = write, max_bytes
        self._executor = ThreadPoolExecutor(1, "write images")
        self._queue: deque[tuple[Future[None], int]] = deque()  # with the bytes of each
        self._bytes = 0

    def add(self, picture: Picture, *, between: bool) -> bool:
        """Queue an image; return false if it was dropped."""
        self._pop_written()
        nbytes = len(picture.data)
        if self._queue and self._bytes + nbytes > self._max_bytes:
            return False
        future = self._executor.submit(self._write, picture, between)
        self._queue.append((future, nbytes))
        self._bytes += nbytes
        return True

    def wait_for_queued(self) -> None:
        """Wait until the images added so far are written; from any thread."""
        wait([future for future, _ in tuple(self._queue)])

    def flush(self) -> None:
        """Wait until all queued images are written."""
        self.wait_for_queued()
        self._pop_written()

    def close(self) -> None:
        """Write all queued images, and end the thread."""
        self._executor.shutdown()

    def _pop_written(self) -> None:
        while self._queue and self._queue[0][0].done():
            future, nbytes = self._queue.popleft()
            self._bytes -= nbytes
            future.result()  # raises an error of the thread
