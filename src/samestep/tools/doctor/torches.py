"""What torch is built for, and which GPUs it sees: for the process that has imported it."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BACKENDS = ("gloo", "nccl", "mpi", "ucc")
CUDA_SECONDS = 8.0  # for a driver to answer


def describe() -> dict[str, Any]:
    """Return what torch says of itself; no GPU is asked for."""
    distributed = torch.distributed
    backends = [
        name
        for name in BACKENDS
        if distributed.is_available() and getattr(distributed, f"is_{name}_available", bool)()
    ]
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "backends": backends,
        "threads": torch.get_num_threads(),
    }


def cuda_in_child() -> dict[str, Any] | None:
    """Return which GPUs torch sees, asked in a process of its own, since whoever has used CUDA can fork no workers. None: no answer."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_tell_cuda, args=(theirs,), daemon=True
    )
    process.start()
    theirs.close()
    try:
        told: dict[str, Any] | None = ours.recv() if ours.poll(CUDA_SECONDS) else None
    except EOFError:  # it died of what it asked for
        told = None
    process.kill()
    process.join()
    return told


def _tell_cuda(connection: Connection) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    told = {
        "devices": [
            {"name": device.name, "memory_bytes": device.total_memory} for device in properties
        ],
        "peers": [
            [
                one == other or torch.cuda.can_device_access_peer(one, other)
                for other in range(count)
            ]
            for one in range(count)
        ],
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if count and torch.distributed.is_nccl_available()
        else None,
    }
    connection.send(told)
