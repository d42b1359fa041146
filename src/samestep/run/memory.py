"""When the C library keeps memory that was freed, for the next step, and when it gives it back."""

from __future__ import annotations

import ctypes
from typing import Final

TRIM_THRESHOLD: Final = -1  # mallopt's parameters, from <malloc.h>
MMAP_MAX: Final = -4
# glibc's defaults: bytes, and mappings
USUAL: Final = {TRIM_THRESHOLD: 128 * 1024, MMAP_MAX: 65536}
KEPT: Final = {TRIM_THRESHOLD: 1 << 30, MMAP_MAX: 0}  # up to 1 GiB a worker


def keep_freed_memory() -> None:
    """Let `free` keep what a step freed, and `malloc` reuse it, until `keep_no_more`.

    Large tensors would otherwise be mapped afresh in every step, and the kernel clears each of
    their pages: for a network of 25 million parameters that takes longer than its forward pass.
    Only glibc has these settings, and only its main heap keeps tensors above 64 MiB: nothing
    changes elsewhere, nor for a run that trains in another thread than the first.
    """
    _set(KEPT)


def return_freed_memory() -> None:
    """Give the kernel what is free now, such as memory that parameters have moved out of."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def keep_no_more() -> None:
    """Put the C library back as it was, and give the kernel what is free."""
    _set(USUAL)
    return_freed_memory()


def _set(values: dict[int, int]) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, value in values.items():
            library.mallopt(parameter, value)
