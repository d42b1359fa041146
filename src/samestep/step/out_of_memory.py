"""Say what to do about a lane that does not fit the memory of its device."""

from __future__ import annotations

import re
from typing import Final

import torch

from samestep.errors import OutOfMemoryError

# Of the CPU's allocator and of GPU libraries, which have no exception of their own for it.
_WORDS: Final = re.compile(r"can't allocate memory|not enough memory|out of memory|_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that there is not enough memory, of the host or of a device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(
        _WORDS.search(str(error))
    )


def does_not_fit(lane: int, samples: int, lanes: int, where: str) -> OutOfMemoryError:
    """Return the error of a lane of so many samples for which memory ended, with the number of lanes to use instead."""
    what = f"lane {lane} of {lanes}, with {samples} sample{'s' * (samples != 1)}, does not fit the memory {where}"
    others = "precision='bfloat16', activation checkpointing or a smaller model"
    if samples <= 1:
        return OutOfMemoryError(f"{what}; more lanes would not make it smaller: expected {others}")
    return OutOfMemoryError(
        f"{what}; expected one that does: lanes={2 * lanes} would halve it. The number of lanes belongs to the result, like the batch "
        f"size, and snapshots keep it: start anew with it (resume='never'). What also needs less memory: {others}"
    )
