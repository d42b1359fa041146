"""Image files: which files of a folder are images, what their headers say, and their pixels.

All image recipes read through `read_image`: turned as the EXIF orientation says, with transparent
pixels on a background, and with 16-bit pixels scaled to 8 bits.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.settings import SettingsError, setting

ENDINGS = {
    *(".avif", ".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
}
NO_DATA = {"__MACOSX", "__pycache__", "@eaDir"}  # folders that other programs leave in a data set
EXPECTED_NAME = "expected a name in UTF-8, of one line"
ORIENTATION, PHOTOMETRIC = 274, 262  # tags of EXIF and TIFF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = 5  # from this orientation on, width and height are exchanged
PNG_TAIL = 2**16  # bytes at the end of a PNG file in which EXIF may follow the pixels

# `most_pixels` is the limit, with its own message; Pillow's is a constant of the process.
Image.MAX_IMAGE_PIXELS = None


class ImageError(SettingsError):
    """Images are missing, cannot be read, or do not fit the settings."""


@dataclass(frozen=True)
class ImageFileSettings:
    """How image files are checked and read; the data settings of the image recipes extend it."""

    check: Literal["headers", "full", "none"] = setting(
        "headers", "image files are checked before the first step: headers, or full: every pixel"
    )
    broken: Literal["error", "skip"] = setting(
        "error", "skip: train without the image files that are broken or missing"
    )
    broken_limit: float = setting(
        0.1,
        "skip: an error if more than this fraction of a part's files is broken",
        least=0,
        most=1,
    )
    leave_out: Path | None = setting(
        None, "list of image files that are not used, as recipes/check.py writes it"
    )
    background: Literal["white", "black"] = setting("white", "color under transparent pixels")
    bits: int = setting(
        16, "bits of gray images in 16-bit files, such as 12 of many microscopes", least=8, most=16
    )
    most_pixels: int = setting(178_956_970, "images with more pixels are broken", least=1)
    loader_workers: int = setting(0, "processes that load images, per worker", least=0)


def printable(path: Path | str) -> str:
    """Return a path as a line of text, even if its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace").replace("\n", "\\n")


# Files of a folder


@dataclass
class Listing:
    """The image files of a folder by name, its folders, and what is no image by kind."""

    files: list[Path] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)  # by name, in composed Unicode
    ignored: Counter[str] = field(default_factory=Counter)


def data_folder(path: Path | None, expected: str) -> Path:
    """Return `data.path`. Raises `ImageError` if it is not set or does not exist."""
    folder = None if path is None else listed_path(Path(), path)
    if folder is None or not folder.exists():
        got = "none" if path is None else f"{printable(path)}, which does not exist"
        raise ImageError(f"data.path must be {expected}, got {got}")
    if printable(folder) != os.fspath(folder):
        raise ImageError(f"{printable(folder)}: {EXPECTED_NAME}; rename the folder")
    return folder


def find_images(folder: Path) -> Listing:
    """Return the image files and folders of a folder, without hidden ones. Raises `ImageError`."""
    listing = Listing()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
    except FileNotFoundError:
        return listing
    except OSError as error:
        raise ImageError(f"{printable(folder)} cannot be read: {error.strerror}") from error
    for entry in entries:
        path, ending = folder / entry.name, Path(entry.name).suffix.lower()
        if entry.name.startswith(".") or entry.name in NO_DATA:
            listing.ignored["hidden"] += 1
        elif entry.is_dir():
            name = composed(entry.name)
            if printable(name) != name:
                raise ImageError(f"{printable(path)}: {EXPECTED_NAME}; rename the folder")
            if name in listing.folders:
                names = f"{printable(listing.folders[name])} and {printable(path)}"
                raise ImageError(f"{names} have the same name in Unicode; merge them")
            listing.folders[name] = path
        elif ending in ENDINGS:
            listing.files.append(path)
        else:
            listing.ignored[f"*{ending}" if ending else "without an ending"] += 1
    return listing


def describe_ignored(ignored: Counter[str]) -> str:
    """Return what was ignored as the end of a line, empty for nothing."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ignored.items()) if count)
    return f"; ignored: {kinds}" if kinds else ""


def composed(name: str) -> str:
    """Return a name in composed Unicode (NFC); files from macOS may have the other form."""
    return unicodedata.normalize("NFC", name)


def listed_path(folder: Path, name: str | Path) -> Path:
    """Return the path of a name in a list, which may be from Windows or macOS."""
    path = folder / name
    if path.exists():
        return path
    name = os.fspath(name).replace("\\", "/")
    forms = [name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))]
    return next((folder / form for form in forms if (folder / form).exists()), path)


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a text file in UTF-8, with or without a byte-order mark. Raises `ImageError`."""
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{printable(path)} cannot be read as UTF-8 text: {error}") from error


# One file


class Facts(NamedTuple):
    """What is known of an image file without its pixels, and with `full` also from them."""

    width: int = 0  # as displayed
    height: int = 0
    mode: str = ""
    turned: bool = False
    transparent: bool = False
    frames: bool = False  # more than the one that is read
    digest: str = ""  # of the file's bytes; full only
    fault: str = ""  # why the image cannot be used
    kind: Literal["", "broken", "missing", "unreadable"] = ""


def inspect(path: Path, settings: ImageFileSettings, *, full: bool) -> Facts:
    """Return the facts of a file; never raises for one that cannot be read."""
    try:
        if printable(path) != os.fspath(path):  # lists and the record have names in UTF-8
            fault = f"{printable(path)}: {EXPECTED_NAME}; rename the file"
            return Facts(fault=fault, kind="broken")
        with _opened(path, settings) as file:
            facts = Facts(*_displayed_size(file), file.mode, _orientation(file) != 1)
            # the other frames of a camera's MPO are previews
            frames = file.format != "MPO" and getattr(file, "is_animated", False)
            facts = facts._replace(transparent=file.has_transparency_data, frames=frames)
            _check_mode(file.mode)
        if full:
            read_image(path, "RGB", settings)
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            facts = facts._replace(digest=digest)
    except ImageError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            return Facts(fault=f"{printable(path)} does not exist", kind="missing")
        of_system = isinstance(cause, OSError) and cause.errno is not None
        return Facts(fault=str(error), kind="unreadable" if of_system else "broken")
    return facts


def read_image(path: Path, mode: Literal["L", "RGB"], settings: ImageFileSettings) -> Image.Image:
    """Read an image as it is displayed, gray ("L") or in color. Raises `ImageError`.

    Several frames: the first. A transparent pixel has the color of the background.
    """
    finds = "; data.check=full finds such files before the first step"
    with _opened(path, settings, finds * (settings.check == "headers")) as file:
        file.load()
        turn = TURNS.get(_orientation(file, is_loaded=True))
        image = _eight_bits(file, settings) if file.mode.startswith("I") else file
        _check_mode(image.mode)
        if image.has_transparency_data:
            base = Image.new("RGBA", image.size, settings.background)
            base.alpha_composite(image.convert("RGBA"))
            image = base.convert("RGB")
        image = image.convert(mode)
        return image if turn is None else image.transpose(turn)


@contextmanager
def _opened(path: Path, settings: ImageFileSettings, hint: str = "") -> Iterator[Image.Image]:
    """Open a file, and raise all errors of the block as `ImageError` with its name."""
    try:
        with Image.open(path) as file:
            _check_size(file.size, settings)
            yield file
    except Exception as error:  # Pillow's decoders raise errors of many types
        reason = str(error) or type(error).__name__
        raise ImageError(f"{printable(path)} cannot be read as an image: {reason}{hint}") from error


def _check_size(size: tuple[int, int], settings: ImageFileSettings) -> None:
    if (pixels := size[0] * size[1]) > settings.most_pixels:
        limit = f"data.most_pixels={settings.most_pixels}"
        hint = f"set it to {pixels}, or cut the image into tiles"
        raise ValueError(f"it has {size[0]} x {size[1]} pixels, more than {limit}; {hint}")


def _check_mode(mode: str) -> None:
    if mode == "F":
        raise ValueError("its pixels are floats of an unknown range; save it with 8 or 16 bits")


def _displayed_size(file: Image.Image) -> tuple[int, int]:
    width, height = file.size
    if file.format == "TIFF":  # Pillow exchanges the sides itself, but not in all versions
        width, height = file.tag_v2[256], file.tag_v2[257]
    return (height, width) if _orientation(file) >= SIDEWAYS else (width, height)


def _orientation(file: Image.Image, *, is_loaded: bool = False) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none or if it is broken."""
    if file.format == "PNG" and not (is_loaded or "exif" in file.info or _has_late_exif(file)):
        return 1  # to look behind the pixels, Pillow would decode them
    try:
        orientation = file.getexif().get(ORIENTATION, 1)
    except Exception:  # noqa: BLE001  of many types, in a part that does not affect pixels
        return 1
    return orientation if orientation in TURNS else 1


def _has_late_exif(file: Any) -> bool:
    with open(file.filename, "rb") as png:  # noqa: PTH123  a path or text
        png.seek(max(0, os.fstat(png.fileno()).st_size - PNG_TAIL))
        tail = png.read()
    return b"eXIf" in tail or b"Raw profile type exif" in tail


def _eight_bits(file: Any, settings: ImageFileSettings) -> Image.Image:
    """Scale gray pixels of `settings.bits` bits to 8 bits, rounded. Raises `ValueError`."""
    pixels, largest = np.asarray(file), 2**settings.bits - 1  # [height, width]
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > largest:
        allowed = f"0 to {largest} (data.bits={settings.bits})"
        raise ValueError(f"expected pixels from {allowed}, got {low} to {high}")
    if file.format == "TIFF" and file.tag_v2.get(PHOTOMETRIC) == 0:  # 0 is white
        pixels = largest - pixels.astype(np.uint32)
    scaled = (pixels.astype(np.uint32) * 255 + largest // 2) // largest
    gray = Image.fromarray(scaled.astype(np.uint8))
    if isinstance(key := file.info.get("transparency"), int):
        mask = Image.fromarray(np.asarray(file) == key)
        gray.paste(settings.background, mask=mask)
    return gray


def largest_value(path: Path) -> int:
    """Return the largest pixel of an image that `read_image` scales to 8 bits."""
    with Image.open(path) as file:
        values: NDArray[Any] = np.asarray(file)
        return int(values.max())
