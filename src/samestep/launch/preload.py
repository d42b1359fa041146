"""Import what training needs once, in the process that workers are forked from, and not once in each of them."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# By name, because `run` stands below `launch` in the reading order. torch's optimizers import
# torch._dynamo when they are made: 800 modules, which each worker would wait for, and hold in 60 MB
# of its own.
NEEDED: Final = ("samestep.run", "torch._dynamo")


def preload(needed: Iterable[str] = NEEDED) -> None:
    """Import what workers need: by default, to train. No torch operation runs and no GPU is asked for: a fork would break either."""
    # collecting among so many new objects, of which none is garbage, takes a quarter of the time
    with no_collection():
        for name in needed:
            import_module(name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep garbage where it is for a block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
