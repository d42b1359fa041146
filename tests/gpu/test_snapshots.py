"""Copies of the state of GPUs to host memory: one wait, no waste, and the same bytes."""

from __future__ import annotations

import os

import pytest
import torch

from samestep.snapshot import memory_slot
from samestep.snapshot.memory_slot import MemorySlot
from samestep.snapshot.part import StagingBuffer, contribution_of


def state(device):
    values = torch.arange(300_000, dtype=torch.float32)
    return {"model": {"a": values.to(device), "b": values[:7].double().to(device)}}


def copied(refuses_pinning):
    """Return what a data file and a slot hold, the waits for the device, and pinned bytes."""
    from tests.gpu.simulated import device

    device.refuses_pinning = refuses_pinning
    buffer = StagingBuffer()
    file = os.memfd_create("test")
    slot = MemorySlot(file)
    copies = []
    for place in ("cuda:1", "cpu"):
        contributed, tensors = contribution_of(state(place), {"own": state(place)}, 0, 2)
        buffer.reserve(contributed.file_bytes, tensors[0].device if place != "cpu" else None)
        with device.counted() as waits:
            data = bytes(buffer.copy(contributed, tensors))
            slot.write({}, contributed, tensors)
            tensors[0] + 1  # not affected if the system refused
        content = memory_slot.read(file)
        copies.append((data, os.pread(file, memory_slot.START + content.part.file.size, 0)))
        if place != "cpu":
            gpu_waits = waits
    return copies[0] == copies[1], gpu_waits, device.LIBRARY.sim_pinned_bytes()


def test_state_is_copied_with_one_wait_in_memory_of_its_size(gpus):
    assert gpus.call(copied, refuses_pinning=False) == (True, ["synchronize on cuda:1"] * 2, 0)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(gpus):
    is_equal, waits, pinned_bytes = gpus.call(copied, refuses_pinning=True)
    assert is_equal
    assert pinned_bytes == 0
    assert len(waits) > 2  # one for each tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_parameters_are_aligned_as_an_allocator_aligns_them(dtype, gpus):
    for addresses in gpus.workers(2, addresses_of, dtype):
        assert [address % 512 for address in addresses] == [0] * len(addresses)


def addresses_of(dtype):
    import samestep as ss

    with ss.init(lanes=2, timeout=60) as run:
        layers = [torch.nn.Linear(65, 65) for _ in range(3)]
        model = run.replicate(torch.nn.Sequential(*layers).to(dtype))
        run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        segments = [segment for group in run._lanes.shards[0].contents.updated for segment in group]
        return [tensor.data_ptr() for tensor in [*model.parameters(), *segments]]
