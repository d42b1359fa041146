from __future__ import annotations

import functools
import math
import os
import time
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from samestep.comm import distributed, rendezvous
from samestep.comm.base import Share
from samestep.comm.channel import Channel
from samestep.comm.connect import HostMemoryWorld
from samestep.comm.distributed import (
    HEAD_BYTES,
    MESSAGE_BYTES,
    PIECE_BYTES,
    ROW_BYTES,
    Distributed,
)
from samestep.comm.shared_memory import INLINE_BYTES
from samestep.errors import HangError, WorldError
from tests.workers import run_workers, try_workers
from tests.worlds import (
    be_patient,
    distributed_world,
    in_processes,
    in_threads,
    limit_waits,
    on_hosts,
    shared_world,
)

FOREVER = 1e6  # seconds: a wait ends only if what it waits for is noticed to be gone
FIRST_CAPACITY = ROW_BYTES - HEAD_BYTES  # bytes that fit the first row of `Distributed`
LENGTHS = [
    0,
    1,
    FIRST_CAPACITY - 1,
    FIRST_CAPACITY,
    FIRST_CAPACITY + 1,
    INLINE_BYTES,
    INLINE_BYTES + 1,
    3,
    200_000,
    0,
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def conforms(world):
    """Check every method of a world against its docstring."""
    assert 0 <= world.rank < world.size
    for check in CHECKS:
        before = world.barriers
        check(world)
        # these calls need not wait for all workers
        assert world.barriers > before or check in {
            rank_zero_is_copied,
            parts_go_to_their_ranks,
            bytes_are_transferred,
            workers_of_a_host_wait_for_each_other,
        }
    barriers = world.barriers
    world.barrier("waiting")
    assert world.barriers == barriers + 1
    assert set(world.all_gather_json(barriers, "comparing barriers")) == {barriers}
    return world.rank


def bytes_of_any_length(world):
    for length in LENGTHS:
        for nbytes in (length * (world.rank + 1), length if world.rank == world.size - 1 else 2):
            data = bytes([65 + world.rank]) * nbytes
            lengths = world.all_gather_object(nbytes, "gathering lengths")
            expected = [bytes([65 + rank]) * lengths[rank] for rank in range(world.size)]
            assert world.all_gather_bytes(data, "gathering bytes") == expected
            gathered = world.gather_bytes(data, "gathering bytes")
            assert gathered == (expected if world.rank == 0 else None)


def json_keeps_bits(world):
    value = {
        "rank": world.rank,
        "floats": [0.1, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan],
        "text": "\u20ac\x00",
    }
    gathered = world.all_gather_json(value, "gathering JSON")
    assert [repr(other) for other in gathered] == [
        repr({**value, "rank": rank}) for rank in range(world.size)
    ]


def objects(world):
    own_value = {world.rank: (1, {2}, b"3"), "tensor": torch.full((2, 3), world.rank)}
    for gathered in (
        world.all_gather_object(own_value, "gathering objects"),
        world.gather_object(own_value, "gathering objects"),
    ):
        if gathered is None:
            assert world.rank > 0
            continue
        for rank, other in enumerate(gathered):
            assert other[rank] == (1, {2}, b"3")
            assert torch.equal(other["tensor"], torch.full((2, 3), rank))
    assert world.broadcast_object(f"from {world.rank}", "sharing an object") == "from 0"
    assert (
        world.broadcast_object("x" * 5000 if world.rank == 0 else None, "sharing an object")
        == "x" * 5000
    )


def bytes_are_transferred(world):
    """Every worker but the last sends to all higher ranks; the sizes differ."""
    for size in (0, 1, PIECE_BYTES + 1):
        own_bytes = torch.full((size * (world.rank + 1),), world.rank, dtype=torch.uint8)
        received = {
            rank: torch.full((size * (rank + 1),), 77, dtype=torch.uint8)
            for rank in range(world.rank)
        }
        world.transfer(
            dict.fromkeys(range(world.rank + 1, world.size), own_bytes),
            received,
            "transferring bytes",
        )
        for rank, part in received.items():
            assert torch.equal(part, torch.full((size * (rank + 1),), rank, dtype=torch.uint8))


def tensors_are_gathered(world):
    for dtype in DTYPES:
        for size in (0, 1, 1000):
            own_part = torch.full((size,), world.rank % 2, dtype=dtype)
            out = torch.full((world.size * size,), 3, dtype=dtype)
            expected = torch.cat(
                [torch.full((size,), rank % 2, dtype=dtype) for rank in range(world.size)]
            )
            world.all_gather(out, own_part, "gathering tensors")
            assert torch.equal(out, expected)
            out[: world.rank * size], out[(world.rank + 1) * size :] = 3, 3
            world.all_gather(
                out, out[world.rank * size : (world.rank + 1) * size], "gathering tensors in place"
            )
            assert torch.equal(out, expected)


def parts_go_to_their_ranks(world):
    def part(sender, receiver, scale):
        return torch.full((scale * ((sender + 2 * receiver) % 3),), 10.0 * sender + receiver)

    ranks = range(world.size)
    for scale in (0, 1, 700):
        sent = [part(world.rank, rank, scale) for rank in ranks]
        expected = [part(rank, world.rank, scale) for rank in ranks]
        out = torch.empty(sum(map(len, expected)))
        world.all_to_all(
            out, list(map(len, expected)), torch.cat(sent), list(map(len, sent)), "exchanging parts"
        )
        assert torch.equal(out, torch.cat(expected))


def rank_zero_is_copied(world):
    for dtype in DTYPES:
        tensor = torch.full((3, 5), 1 if world.rank == 0 else 0, dtype=dtype)
        world.broadcast(tensor, "copying")
        assert torch.equal(tensor, torch.ones(3, 5, dtype=dtype))


def memory_is_shared_inside_hosts(world):
    assert [rank for host in world.hosts for rank in host] == list(range(world.size))
    assert world.rank in world.host
    assert world.host in world.hosts
    for nbytes in (0, 1, 100_000):
        buffers = world.shared(nbytes)
        own_buffer = buffers[world.host.index(world.rank)]
        assert [(buffer.dtype, buffer.shape, int(buffer.sum())) for buffer in buffers] == [
            (torch.uint8, (nbytes,), 0)
        ] * len(world.host)
        world.barrier("reading zeros")
        own_buffer.fill_(world.rank + 1)
        world.barrier("writing")
        assert [buffer.tolist() for buffer in buffers] == [
            [rank + 1] * nbytes for rank in world.host
        ]
        world.barrier("reading")


def workers_of_a_host_wait_for_each_other(world):
    (seen,) = world.shared(1)[:1]  # the first worker's
    for turn in range(1, 4):
        if world.rank == world.host.start:
            seen.fill_(turn)
        world.barrier_on_host("reading")
        assert seen.item() == turn
        world.barrier_on_host("writing")


CHECKS = (
    bytes_of_any_length,
    json_keeps_bits,
    objects,
    tensors_are_gathered,
    parts_go_to_their_ranks,
    rank_zero_is_copied,
    bytes_are_transferred,
    memory_is_shared_inside_hosts,
    workers_of_a_host_wait_for_each_other,
)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("launch", [in_processes, in_threads])
def test_every_world_conforms(launch, workers):
    assert launch(workers, conforms) == list(range(workers))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_staged_world_conforms(workers):
    ranks = in_processes(workers, lambda world: conforms(HostMemoryWorld(world)))
    assert ranks == list(range(workers))


@pytest.mark.parametrize(
    ("hosts", "workers"),
    [
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
        (2, 4),
        pytest.param(3, 3, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
    ],
)
def test_a_world_of_several_hosts_conforms(hosts, workers):
    def body(world):
        assert len(world.hosts) == hosts
        return conforms(world)

    assert on_hosts(hosts, workers, body) == list(range(workers))


def test_each_host_sends_few_rows_in_few_rounds(monkeypatch):
    sent = []
    begin = Distributed._begin_message
    monkeypatch.setattr(
        Distributed,
        "_begin_message",
        lambda self, rows, *others: (sent.append(len(rows)), begin(self, rows, *others))[1],
    )

    def body(world):
        sent.clear()
        world.barrier("counting messages")
        return sent

    assert on_hosts(2, 4, body) == [[2048], [], [2048], []]
    assert on_hosts(3, 3, body) == [[1024, 1024]] * 3
    assert on_hosts(4, 4, body) == [[1024, 2048]] * 4


def large_exchanges_may_overlap(world):
    """Start exchanges of different sizes, then complete them in reverse order."""
    started = []
    for number in range(3):
        sizes = [PIECE_BYTES // 4 + 7 * rank * number for rank in range(world.size)]
        # values differ between pieces, exchanges and workers
        every = torch.arange(sum(sizes)) // 1000 + 1000.0 * number
        own_values = every + 10_000 * world.rank
        first = sum(sizes[: world.rank])
        part = every[first : first + sizes[world.rank]]
        expected = torch.cat([part + 10_000 * rank for rank in range(world.size)])
        out, out_sizes = torch.empty_like(expected), [len(part)] * world.size
        end = world.begin_all_to_all(out, out_sizes, own_values, sizes, "exchanging much")
        started.append((end, out, expected))
    gathered = torch.empty(world.size, PIECE_BYTES)
    own_values = torch.full((PIECE_BYTES,), float(world.rank))
    world.all_gather(gathered.view(-1), own_values, "gathering much")
    assert torch.equal(gathered, torch.arange(world.size).view(-1, 1).expand_as(gathered).float())
    for end, out, expected in reversed(started):
        end()
        assert torch.equal(out, expected)


def test_large_exchanges_may_overlap():
    on_hosts(3, 3, large_exchanges_may_overlap)


def test_large_messages_are_sent_in_pieces(monkeypatch):
    """One large message in each direction takes gloo twice as long as pieces in flight."""
    monkeypatch.setattr(distributed, "MOST_HOSTS", 1)  # so that no channel replaces gloo
    sent = []
    send = dist.isend
    monkeypatch.setattr(
        dist,
        "isend",
        lambda piece, *args, **kwargs: (sent.append(piece.nbytes), send(piece, *args, **kwargs))[1],
    )

    def body(world):
        sent.clear()
        sizes = [0, 2 * PIECE_BYTES + 4] if world.rank == 0 else [PIECE_BYTES, 0]
        out = torch.empty(PIECE_BYTES if world.rank == 0 else 2 * PIECE_BYTES + 4)
        own_values = torch.ones(sum(sizes))
        world.all_to_all(
            out, [len(out) * (rank != world.rank) for rank in range(2)], own_values, sizes, ""
        )
        world.all_gather(torch.empty(2 * PIECE_BYTES), own_values[:PIECE_BYTES], "gathering")
        return sent

    # a small rest is divided among the pieces
    sizes = [7 * [PIECE_BYTES + 4] + [PIECE_BYTES - 12], 4 * [PIECE_BYTES]]
    assert on_hosts(2, 2, body) == [pieces + 4 * [PIECE_BYTES] for pieces in sizes]


def test_channels_show_their_progress_with_large_tensors_in_pieces(monkeypatch):
    """Otherwise a tensor that takes longer than the timeout would end a run."""
    monkeypatch.setattr(distributed, "CHANNEL_PIECE_BYTES", 1024)

    def body(world):
        send, sent = Channel.send, []
        Channel.send = lambda self, key, part: (sent.append(part.nbytes), send(self, key, part))[1]
        gathered = torch.empty(3 * 1000)
        world.all_gather(gathered, torch.arange(1000.0) + 1000 * world.rank, "gathering")
        assert torch.equal(gathered, torch.arange(3000.0))
        return sent

    assert on_hosts(3, 3, body) == [2 * [1336, 1336, 1328]] * 3


LARGE = 1 << 19  # bytes, more than the kernel takes in


def swapped(world, elements):
    """Begin two swaps with a worker elsewhere, send them later, and complete them in any order."""
    partner = (world.rank + world.size // 2) % world.size

    def values(rank, number):
        return torch.arange(elements) + 1000.0 * number + 10_000 * rank

    received = [[torch.empty(elements) for _ in range(3)] for _ in range(2)]
    sends = [world.begin_swap(partner, tensors, "swapping") for tensors in received]
    world.barrier("sending other messages in between")
    ends = [send([values(world.rank, 3 * n + m) for m in range(3)]) for n, send in enumerate(sends)]
    for end in reversed([*ends[0], *ends[1]]):
        end.wait()
    for n, tensors in enumerate(received):
        for m, tensor in enumerate(tensors):
            assert torch.equal(tensor, values(partner, 3 * n + m))


@pytest.mark.parametrize("run", [in_threads, in_processes, functools.partial(on_hosts, 2)])
@pytest.mark.parametrize("elements", [1, LARGE // 3])
def test_workers_swap_tensors_in_pairs(run, elements):
    run(4, swapped, elements)


@pytest.mark.parametrize("elements", [1, LARGE // 3])
def test_workers_without_an_address_swap_through_the_group(monkeypatch, elements):
    def no_address():
        raise OSError("no address")

    monkeypatch.setattr("samestep.comm.distributed.gloo_address", no_address)
    on_hosts(2, 4, swapped, elements)


def test_a_partner_that_exits_during_a_swap_is_an_error():
    def body():
        world = distributed_world(FOREVER, hosts=2)
        tensor = torch.ones(8 * LARGE // 4)
        begin = world.begin_swap(1 - world.rank, [torch.empty_like(tensor)] * 2, "swapping")
        world.barrier("starting")
        if world.rank == 1:
            os._exit(7)
        messages = []
        for end in begin([tensor] * 2):
            with pytest.raises(WorldError) as caught:
                end.wait()
            messages.append(str(caught.value))
        world.close()
        return messages

    outcome, exited = try_workers(body, 2)
    assert exited.exitcode == 7
    first, second = outcome.value
    assert "swapping" in first
    assert "an earlier call failed, while swapping" in second


def test_a_worker_that_exits_while_sums_are_awaited_is_an_error():
    def body():
        world = distributed_world(FOREVER, hosts=3)
        others = [rank for rank in range(3) if rank != world.rank]
        total = torch.zeros(LARGE)
        received = {rank: [torch.zeros(LARGE)] for rank in others}
        totals = {rank: torch.zeros(LARGE) for rank in others}
        begin = world.partners.begin_sums([Share(received, lambda: None, total, totals)], "adding")
        world.barrier("starting")
        if world.rank == 2:
            os._exit(7)
        (end,) = begin([{rank: [torch.ones(LARGE)] for rank in others}])
        with pytest.raises(WorldError, match="adding"):
            end.wait()
        world.close()

    assert [outcome.exitcode for outcome in try_workers(body, 3)] == [0, 0, 7]


@pytest.mark.long
def test_the_timeout_of_a_swap_counts_from_its_first_message():
    """The program may begin to wait much later."""
    noticed = get_context("fork").Event()

    def body():
        be_patient()
        world = distributed_world(hosts=2)
        tensor = torch.ones(4 * LARGE // 4)
        begin = world.begin_swap(1 - world.rank, [torch.empty_like(tensor)], "swapping")
        world.barrier("starting")
        if world.rank == 1:
            noticed.wait()
            os._exit(0)
        limit_waits(world, 4)
        (end,) = begin([tensor])
        time.sleep(2)  # counts towards the timeout
        with pytest.raises(HangError, match="swapping"):
            end.wait()
        noticed.set()
        return "noticed"

    first, _ = try_workers(body, 2)
    assert first.value == "noticed"


def test_two_hosts_notice_that_rows_of_different_calls_have_different_sizes():
    def body(world):
        world.all_gather_bytes(bytes(MESSAGE_BYTES), "sending much")  # the next row is as long
        with pytest.raises(WorldError, match="sending") as raised:
            world.all_gather_bytes(b"", "sending much" if world.rank else "sending little")
        return str(raised.value)

    first, second = on_hosts(2, 2, body)
    assert f"expected {ROW_BYTES} bytes, got {MESSAGE_BYTES}" in first
    assert f"expected {MESSAGE_BYTES} bytes, got {ROW_BYTES}" in second


def calls(world):
    tensor = torch.zeros(world.size)
    return {
        "all_gather_bytes": functools.partial(world.all_gather_bytes, b"data"),
        "gather_bytes": functools.partial(world.gather_bytes, b"data"),
        "all_gather": functools.partial(world.all_gather, tensor, tensor[:1]),
        "all_to_all": functools.partial(
            world.all_to_all, tensor.clone(), [1] * world.size, tensor, [1] * world.size
        ),
        "broadcast": functools.partial(world.broadcast, tensor),
        "barrier": world.barrier,
        "broadcast_object": functools.partial(world.broadcast_object, None),
    }


@pytest.mark.parametrize(
    ("join", "workers"),
    [(shared_world, 3), (distributed_world, 3), (functools.partial(distributed_world, hosts=2), 4)],
)
def test_a_lost_worker_is_an_error_on_the_others(join, workers):
    """After the first error every further call fails immediately."""

    def body():
        world = join(FOREVER)
        world.barrier("starting")
        if world.rank == 2:
            os._exit(7)
        messages = {}
        for name, call in calls(world).items():
            with pytest.raises(WorldError) as caught:
                call(f"calling {name}")
            messages[name] = str(caught.value)
        world.close()
        return messages

    outcomes = try_workers(body, workers)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, 7, 0][:workers]
    for outcome in outcomes[:2] + outcomes[3:]:
        for name, message in outcome.value.items():
            assert (
                f"worker {outcome.rank} got no response from other workers while calling {name}"
                in message
            )


@pytest.mark.parametrize("join", [shared_world, distributed_world])
def test_a_process_can_form_one_world_after_another(join):
    """Even if rank 0 leaves the first world after another worker has arrived at the second."""
    arrived = get_context("fork").Event()

    def report_and_find(process):
        arrived.set()
        return home(process)

    home = rendezvous.memory_id

    def body():
        world = join()
        world.barrier("starting")  # gloo: a worker may return before the others have connected
        if world.rank == 0:
            arrived.wait()
        rendezvous.memory_id = report_and_find
        world.close()
        second = join()
        total = sum(second.all_gather_object(second.rank, "adding"))
        second.close()
        return total

    assert run_workers(body, 2) == [1, 1]
