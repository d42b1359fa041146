"""Memory that all workers of a host see, so that what they exchange passes no socket."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from samestep.errors import WorldError

if TYPE_CHECKING:
    from samestep.world.mesh import Mesh


def share(mesh: Mesh, nbytes: int, what: str = "sharing memory") -> list[torch.Tensor]:
    """Return a buffer of every worker of the mesh by rank, uint8 [nbytes], zeros, each seen by all. Collective.

    Buffers are anonymous files without a place in any directory, so the kernel frees them however
    workers end.
    """
    with ExitStack() as exits:
        own = os.memfd_create("samestep")
        exits.callback(os.close, own)
        os.ftruncate(own, max(1, nbytes))  # an empty file cannot be mapped
        files = {mesh.rank: own, **mesh.exchange_files(own, what)}
        for rank, file in files.items():
            if rank != mesh.rank:
                exits.callback(os.close, file)
        return [_map(files[rank], nbytes, rank) for rank in mesh.ranks]


def _map(file: int, nbytes: int, rank: int) -> torch.Tensor:
    size = max(1, nbytes)
    if os.fstat(file).st_size != size:
        raise WorldError(
            f"a buffer of {nbytes} bytes was asked for and worker {rank} asked for another size; expected the same of all"
        )
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)[:nbytes]
