"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Write a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
