"""Memory that all workers of one host see, so that what they exchange is copied once and passes no socket."""

from __future__ import annotations

import mmap
import os
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from samestep.world.base import World


def map_shared(world: World, nbytes: int) -> list[torch.Tensor] | None:
    """Return a buffer of every worker by rank, uint8 [nbytes], each seen by all; None where they do not share memory. Collective.

    Buffers are anonymous files without a place in any directory, so the kernel frees them however workers end.
    """
    with ExitStack() as exits:
        name, own = f"samestep-{uuid.uuid4().hex}", -1
        if hasattr(os, "memfd_create"):
            own = os.memfd_create(name)
            exits.callback(os.close, own)
            os.ftruncate(own, max(1, nbytes))
        offers = world.all_gather_json({"pid": os.getpid(), "fd": own, "name": name}, "sharing memory")
        try:
            buffers = [_open(offer, nbytes) for offer in offers]
        except OSError:  # another host, another container, or a system without such files
            buffers = None
        everywhere = all(world.all_gather_json(buffers is not None, "sharing memory"))
    return buffers if everywhere else None


def _open(offer: dict[str, Any], nbytes: int) -> torch.Tensor:
    path = Path(f"/proc/{offer['pid']}/fd/{offer['fd']}")
    if not str(path.readlink()).startswith(f"/memfd:{offer['name']}"):
        raise OSError(f"{path} is a file of another process")
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), max(1, nbytes)), dtype=torch.uint8)[:nbytes]
