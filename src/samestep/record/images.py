"""Images of a record: PNG files with names that stay inside their folder."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import RecordError
from samestep.record.events import parse_events

if TYPE_CHECKING:
    from pathlib import Path

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
