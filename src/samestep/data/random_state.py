"""Random state as a function of what is being done: no generator's state is ever saved to disk.

A key is a hash of (seed, scope, numbers); `keyed` sets every generator that user code may draw from
(Python's `random`, NumPy's legacy one, torch's on CPU and the current GPU) for the length of a
block. Saving the states costs three times what seeding does. So what is done in several parts, such
as the lanes of a step, saves them once and seeds before each part:

    with generators_kept():
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

_SPARE: Final[list[np.random.MT19937]] = []  # bit generators that no block uses now
_STATE_BYTES: Final = 4 * (624 + 1)  # of MT19937, which NumPy keeps as 624 words and a position


def key(seed: int, scope: str, *numbers: int) -> int:
    """Return 63 bits that depend on all arguments (BLAKE2b)."""
    text = ",".join([str(seed), scope, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def set_generators(value: int) -> None:
    """Seed every generator with `value`, as `random.seed`, `np.random.seed` (its low 32 bits) and `torch.manual_seed` do."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)
    # torch.manual_seed would queue a call for every GPU library that is not initialised, each time
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


@contextmanager
def keyed(value: int) -> Iterator[None]:
    """Seed every generator for a block, and put their states back after it."""
    with generators_kept():
        set_generators(value)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put every generator's state back after a block; what the block draws is defined from its first `set_generators` on."""
    generators = [
        torch.default_generator,
        *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    ]
    states = [generator.get_state() for generator in generators]
    state = random.getstate()
    with _numpy_kept():
        try:
            yield
        finally:
            random.setstate(state)
            for generator, own in zip(generators, states, strict=True):
                generator.set_state(own)


@contextmanager
def _numpy_kept() -> Iterator[None]:
    """Lend NumPy's global generator other bits for a block: getting its own back is nearly free, setting its state is not."""
    bits, lent = mtrand.get_bit_generator(), _SPARE.pop() if _SPARE else np.random.MT19937(0)
    waiting = _take_waiting_normal(bits)
    mtrand.set_bit_generator(lent)
    try:
        yield
    finally:
        mtrand.set_bit_generator(bits)
        _SPARE.append(lent)
        if waiting is not None:
            np.random.set_state(
                {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": waiting}
            )


def _take_waiting_normal(bits: np.random.BitGenerator) -> float | None:
    """Return the second of two normal variables made at once, if NumPy's global generator has it: it forgets it with other bits.

    Drawing tells, for only the second one takes no bits; asking for the state takes thirty times as
    long.
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
