"""Random state as a function of what is being done: no generator's state is ever saved to disk.

A key is a hash of (seed, scope, numbers); `keyed` sets every generator that user code may draw from
(Python's `random`, NumPy's legacy one, torch's on CPU and the current GPU) for the length of a block.
Saving the states costs ten times what seeding does. So what is done in several parts, such as the lanes
of a step, saves them once and seeds before each part:

    with generators_kept():
        for lane in lanes:
            set_generators(key(seed, "lane", step, lane))
            ...
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.random import mtrand

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPARE: Final[list[np.random.MT19937]] = []  # bit generators that no block uses now


def key(seed: int, scope: str, *numbers: int) -> int:
    """Return 63 bits that depend on all arguments (BLAKE2b)."""
    text = ",".join([str(seed), scope, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def set_generators(value: int) -> None:
    """Seed every generator with `value`, as `random.seed`, `np.random.seed` (its low 32 bits) and `torch.manual_seed` do."""
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  user code may draw from NumPy's global generator
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # torch.manual_seed would queue a call for every GPU library that is not initialised, each time
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
    generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
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
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    bits, lent = mtrand.get_bit_generator(), _SPARE.pop() if _SPARE else np.random.MT19937(0)
    mtrand.set_bit_generator(lent)
    try:
        yield
    finally:
        mtrand.set_bit_generator(bits)
        _SPARE.append(lent)
        if state["has_gauss"]:  # the second of two normal variables made at once, which other bits make NumPy forget
            np.random.set_state(state)  # noqa: NPY002
