"""Random state as a function of what is being done: no generator's state is ever saved to disk.

A key is a hash of (seed, scope, numbers); `keyed` sets every generator that user code may draw from
(Python's `random`, NumPy's legacy one, torch's on CPU and the current GPU) for the length of a block.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def key(seed: int, scope: str, *numbers: int) -> int:
    """Return 63 bits that depend on all arguments (BLAKE2b)."""
    text = ",".join([str(seed), scope, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def set_generators(value: int) -> None:
    """Seed every generator with `value`, as `random.seed`, `np.random.seed` (its low 32 bits) and `torch.manual_seed` do."""
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  user code may draw from NumPy's global generator
    for generator in _torch_generators():
        generator.manual_seed(value)


@contextmanager
def keyed(value: int) -> Iterator[None]:
    """Seed every generator for a block, and put their states back after it."""
    generators = _torch_generators()
    states = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]  # noqa: NPY002
    set_generators(value)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for generator, state in zip(generators, states[2], strict=True):
            generator.set_state(state)


def _torch_generators() -> list[torch.Generator]:
    # torch.manual_seed would queue a call for every GPU library that is not initialised, each time.
    if torch.cuda.is_initialized():
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
    return [torch.default_generator]
