"""Images of a record: PNG files with names that stay inside their folder."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import RecordError

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "images"
MODES: Final = {(): "L", (1,): "L", (3,): "RGB"}
LONGEST_NAME: Final = 80


def write_image(directory: Path, step: int, name: str, pixels: Any) -> tuple[str, int, int]:
    """Write `pixels` as a PNG under `directory`; return its path relative to `directory`, its width and height.

    `pixels` is a uint8 array [H, W], [H, W, 1] or [H, W, 3] (RGB). Raises `RecordError`.
    """
    mode, width, height, data = _as_bytes(name, pixels)
    try:
        from PIL import Image  # noqa: PLC0415  only who logs images needs Pillow
    except ImportError as error:
        raise RecordError(f'image {name!r} cannot be written without Pillow: pip install "samestep[images]"') from error
    path = f"{FOLDER}/{safe_name(name)}-{step:08d}.png"
    unfinished = directory / f"{path}.unfinished"
    try:
        unfinished.parent.mkdir(exist_ok=True)
        Image.frombytes(mode, (width, height), data).save(unfinished, format="png")
        unfinished.replace(directory / path)  # a reader never meets half an image
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise RecordError(f"{directory / path} cannot be written: {error.strerror}") from error
    return path, width, height


def safe_name(name: str) -> str:
    """Return a file name for `name`; names that differ get file names that differ."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:LONGEST_NAME]
    if safe == name and name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _as_bytes(name: str, pixels: Any) -> tuple[str, int, int, bytes]:
    try:
        view = memoryview(pixels)
    except TypeError as error:
        raise RecordError(f"image {name!r} is a {type(pixels).__name__}; expected a uint8 array [H, W], [H, W, 1] or [H, W, 3]") from error
    shape = view.shape or ()
    if view.format != "B" or len(shape) < 2 or 0 in shape or shape[2:] not in MODES:  # noqa: PLR2004  height and width
        raise RecordError(
            f"image {name!r} has shape {list(shape)} and item format {view.format!r}; expected uint8 ('B') [H, W], [H, W, 1] or [H, W, 3]",
        )
    height, width = shape[:2]
    return MODES[shape[2:]], width, height, view.tobytes()
