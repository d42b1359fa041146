"""Random state as a function of the work being done: no generator's state is ever saved to disk.

A key is a hash of (seed, scope, numbers). `keyed` seeds every generator that user code may draw
from (Python's `random`, NumPy's legacy generator, torch's on the CPU and the current GPU) for the
length of a block. Saving their states takes three times as long as seeding, so work with several
parts, such as the lanes of a step, saves them once and seeds before each part:

    with generators_restored():
        for lane in lanes:
            set_generators(key(seed, "lane", step, lane))
            ...
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.random import mtrand

_UNUSED: Final[list[np.random.MT19937]] = []  # bit generators that no block uses now
_STATE_BYTES: Final = 4 * (624 + 1)  # of MT19937 in NumPy: 624 words and a position


def key(seed: int, scope: str, *numbers: int) -> int:
    """Return 63 bits that depend on all arguments (BLAKE2b)."""
    text = ",".join([str(seed), scope, *map(str, numbers)]).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def set_generators(value: int) -> None:
    """Seed every generator with `value` (NumPy's with its low 32 bits)."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)
    # torch.manual_seed would queue one call per uninitialized GPU library, each time
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


@contextmanager
def keyed(value: int) -> Iterator[None]:
    """Seed every generator for a block, and restore their states after it."""
    with generators_restored():
        set_generators(value)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore every generator's state after a block, which must call `set_generators` first."""
    generators = [
        torch.default_generator,
        *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    ]
    states = [generator.get_state() for generator in generators]
    state = random.getstate()
    with _numpy_restored():
        try:
            yield
        finally:
            random.setstate(state)
            for generator, own in zip(generators, states, strict=True):
                generator.set_state(own)


@contextmanager
def _numpy_restored() -> Iterator[None]:
    """Replace the bits of NumPy's global generator, which is far faster than setting its state."""
    bits, temporary = mtrand.get_bit_generator(), _UNUSED.pop() if _UNUSED else np.random.MT19937(0)
    cached = _take_cached_normal(bits)
    mtrand.set_bit_generator(temporary)
    try:
        yield
    finally:
        mtrand.set_bit_generator(bits)
        _UNUSED.append(temporary)
        if cached is not None:
            state = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": cached})


def _take_cached_normal(bits: np.random.BitGenerator) -> float | None:
    """Return the second of a pair of normal variates, if NumPy's global generator has cached it.

    Replacing the bits would discard it. Drawing shows whether there is one, because only a cached
    variate uses no bits; reading the state takes thirty times as long.
    """
    if not isinstance(bits, np.random.MT19937):
        state = np.random.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    address = bits.ctypes.state_address
    before = ctypes.string_at(address, _STATE_BYTES)
    drawn = np.random.standard_normal()
    if ctypes.string_at(address, _STATE_BYTES) == before:
        return drawn
    ctypes.memmove(address, before, _STATE_BYTES)
    return None
