"""Images as they are served: only what their first bytes say is one."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNATURES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


def media_type(data: bytes) -> str | None:
    """Return the type of an image by its first bytes: PNG, JPEG, WebP or GIF, and None for all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next(
        (kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None
    )


def recognized(pieces: Iterator[bytes]) -> tuple[str | None, Iterator[bytes]]:
    """Return the type of an image that comes in pieces, and all of its pieces; only the first has been read."""
    first = next(pieces, b"")
    return media_type(first), chain([first], pieces)
