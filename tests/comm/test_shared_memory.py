from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.comm import shared_memory
from samestep.comm.shared_memory import INLINE_BYTES
from samestep.errors import WorldError
from tests.worlds import in_processes

WORKERS = 3
BOX_BYTES = 20_000  # small, so that data of some sizes takes one box, and of others several
SIZES = st.one_of(
    st.integers(0, 5 * BOX_BYTES),
    st.sampled_from([INLINE_BYTES, INLINE_BYTES + 1, BOX_BYTES, BOX_BYTES + 1, 2 * BOX_BYTES]),
)


def bytes_of(rank, size):
    return np.random.default_rng([rank, size]).bytes(size)


def numbers(rank, size):
    return (
        torch.frombuffer(bytearray(bytes_of(rank, size)), dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8)
    )


# Each example starts three processes, which then go through a list of cases.
@settings(max_examples=4)
@given(st.lists(st.lists(SIZES, min_size=WORKERS, max_size=WORKERS), min_size=8, max_size=16))
def test_all_receive_what_each_sends(cases):
    def body(world):
        ranks = range(world.size)
        for sizes in cases:
            own_size = sizes[world.rank]
            assert world.all_gather_bytes(bytes_of(world.rank, own_size), "gathering") == [
                bytes_of(rank, sizes[rank]) for rank in ranks
            ]
            gathered = world.gather_bytes(bytes_of(world.rank, own_size), "gathering")
            assert gathered == (
                [bytes_of(rank, sizes[rank]) for rank in ranks] if world.rank == 0 else None
            )

            # Rank r sends sizes[(r + s) % n] bytes to rank s.
            sent = [
                numbers(world.rank + 10 * rank, sizes[(world.rank + rank) % world.size])
                for rank in ranks
            ]
            expected = [
                numbers(rank + 10 * world.rank, sizes[(world.rank + rank) % world.size])
                for rank in ranks
            ]
            out = torch.empty(sum(map(len, expected)), dtype=torch.uint8)
            world.all_to_all(
                out, list(map(len, expected)), torch.cat(sent), list(map(len, sent)), "exchanging"
            )
            assert torch.equal(out, torch.cat(expected))

            tensor = numbers(world.rank, sizes[0])
            world.broadcast(tensor, "copying")
            assert torch.equal(tensor, numbers(0, sizes[0]))

            gathered_rows = torch.full((world.size, sizes[0]), 7, dtype=torch.uint8)
            gathered_rows[world.rank] = numbers(world.rank, sizes[0])
            world.all_gather(gathered_rows, gathered_rows[world.rank], "gathering in place")
            assert torch.equal(
                gathered_rows, torch.stack([numbers(rank, sizes[0]) for rank in ranks])
            )
        return len(cases)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "BOX_BYTES", BOX_BYTES)
        assert in_processes(WORKERS, body) == [len(cases)] * WORKERS


def test_a_box_is_not_filled_again_before_all_have_read_it():
    """Rank 1 begins to read when rank 0 has long been free to write the next part."""

    def body(world):
        take = world._take

        def take_late(*args):
            torch.rand(300, 300).matmul(torch.rand(300, 300))
            take(*args)

        if world.rank == 1:
            world._take = take_late
        size = 10 * BOX_BYTES + 1
        tensor = numbers(world.rank, size)
        world.broadcast(tensor, "copying")
        assert torch.equal(tensor, numbers(0, size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "BOX_BYTES", BOX_BYTES)
        in_processes(2, body)


def test_a_tensor_of_another_size_than_expected_is_an_error():
    def body(world):
        tensor = torch.zeros(4 + world.rank)
        if world.rank == 0:
            world.broadcast(tensor, "copying")
        else:
            with pytest.raises(
                WorldError, match="worker 1 expected 20 bytes from worker 0 while copying, got 16"
            ):
                world.broadcast(tensor, "copying")

    in_processes(2, body)


def test_buffers_of_different_sizes_are_refused():
    def body(world):
        with pytest.raises(
            WorldError,
            match=f"got {world.rank + 5} bytes here and {6 - world.rank} on worker",
        ):
            world.shared(world.rank + 5)

    in_processes(2, body)
