from __future__ import annotations

import time
from functools import reduce
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.step import across_hosts
from samestep.step.across_hosts import UncopiedSwapExchange, choose_exchange
from samestep.step.exchange import ExchangeSpec, gather
from samestep.step.gradients import add_gradients
from samestep.step.layout import ALIGNMENT, Assignment, flattened, lanes_of, subtrees, tree_sum
from tests.bits import bits
from tests.worlds import in_processes, in_threads, on_hosts

LANES = 8


def parameters_of(dtype):
    """Return parameters of all shapes and storage orders; no number of workers divides them."""
    tensors = [
        torch.zeros(3, 7),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(64),
        torch.zeros(2, 5, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.zeros(9, 5).T,
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(333),
        torch.zeros(1),
    ]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def exchange_of(parameters, lanes, world, *arguments, **options):
    assignment = Assignment(world.size, lanes)
    return choose_exchange(ExchangeSpec(parameters, assignment, world, *arguments, **options))


def lane_gradients(parameters, lane, seed):
    """Return gradients whose sum depends on the order; some are missing or -0.0."""
    generator = torch.Generator().manual_seed(1000 * seed + lane)
    gradients = []
    for parameter in parameters:
        scale = 10.0 ** torch.randint(-3, 4, parameter.shape, generator=generator)
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        gradient[torch.rand(parameter.shape, generator=generator) < 0.1] = -0.0
        present = torch.rand((), generator=generator) < 0.7
        gradients.append(gradient.to(parameter.dtype) if present else None)
    return gradients


def subtree_sums(parameters, own_lanes, lanes, seed):
    def leaf(span):
        return lane_gradients(parameters, span[0], seed) if span[1] - span[0] == 1 else None

    return [tree_sum(span, leaf, add_gradients) for span in subtrees(own_lanes, lanes)]


def exchanged(world, lanes, dtypes, seeds, across="host", owner_step=None):
    """Return the bits of every gradient for each dtype and seed, from one exchange per dtype.

    With an `owner_step`, slices cut no parameter: with 0, the first worker owns all of them.
    """
    gathered = []
    for dtype in dtypes:
        parameters = parameters_of(dtype)
        owners = None
        if owner_step is not None:
            owners = tuple(sorted(owner_step * n % world.size for n in range(len(parameters))))
        exchange = exchange_of(parameters, lanes, world, across=across, owners=owners)
        for seed in seeds:
            exchange.put(
                subtree_sums(parameters, lanes_of(world.rank, world.size, lanes), lanes, seed)
            )
            world.barrier("exchanging losses")
            exchange.sum()
            total = gather([exchange])[0]
            for gradient, parameter in zip(total, parameters, strict=True):
                assert gradient.shape == parameter.shape
                assert (
                    gradient.numel() < 2
                    or gradient.stride() == torch.empty_like(parameter).stride()
                )
            gathered.append([bits(gradient) for gradient in total])
    return gathered


def expected_of(lanes, dtypes, seeds):
    """Return the expected result of `exchanged`, with zeros for a parameter that no lane used."""
    expected = []
    for dtype in dtypes:
        parameters = parameters_of(dtype)
        for seed in seeds:
            (total,) = subtree_sums(parameters, range(lanes), lanes, seed)
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for gradient, parameter in zip(total, parameters, strict=True)
            ]
            expected.append([bits(gradient) for gradient in gradients])
    return expected


OWNERS = st.none() | st.integers(0, 2)


@given(
    workers=st.integers(1, 7),
    more_lanes=st.integers(0, 9),
    seed=st.integers(0, 1000),
    owner_step=OWNERS,
)
def test_the_exchange_is_the_local_tree_sum(workers, more_lanes, seed, owner_step):
    arguments = (workers + more_lanes, [torch.float32], [seed, seed + 1])
    expected = expected_of(*arguments)
    gathered = in_threads(workers, exchanged, *arguments, "host", owner_step)
    assert gathered == [expected] * workers


def divided(world, sizes, *arguments):
    """Run `exchanged` on hosts with `sizes` workers, which share memory only within a host."""
    ends = list(accumulate(sizes))
    world.hosts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    shared = world.shared
    world.shared = lambda nbytes: shared(nbytes)[world.host.start : world.host.stop]
    return exchanged(world, *arguments)


def on_machines(world, sizes, owner_step, *arguments):
    """Run `exchanged` without shared memory, on machines with `sizes` workers."""
    ends = list(accumulate(sizes))
    world.machines = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return divided(world, [1] * world.size, *arguments, "world", owner_step)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    more_lanes=st.integers(0, 9),
    seed=st.integers(0, 1000),
    owner_step=OWNERS,
)
def test_machines_of_any_sizes_exchange_the_local_tree_sum(sizes, more_lanes, seed, owner_step):
    workers = sum(sizes)
    arguments = (workers + more_lanes, [torch.float32], [seed, seed + 1])
    gathered = in_threads(workers, on_machines, sizes, owner_step, *arguments)
    assert gathered == [expected_of(*arguments)] * workers


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    more_lanes=st.integers(0, 9),
    seed=st.integers(0, 1000),
    across=st.sampled_from(["host", "world"]),
    owner_step=OWNERS,
)
@example(sizes=[2, 2], more_lanes=0, seed=0, across="host", owner_step=0)
def test_hosts_of_any_sizes_exchange_the_local_tree_sum(
    sizes, more_lanes, seed, across, owner_step
):
    workers = sum(sizes)
    arguments = (workers + more_lanes, [torch.float32], [seed, seed + 1])
    gathered = in_threads(workers, divided, sizes, *arguments, across, owner_step)
    assert gathered == [expected_of(*arguments)] * workers


@pytest.mark.parametrize(
    ("hosts", "workers", "across"),
    [
        (2, 4, "host"),
        pytest.param(2, 4, "world", marks=pytest.mark.long),
        pytest.param(3, 3, "host", marks=pytest.mark.long),
        pytest.param(3, 3, "world", marks=pytest.mark.long),
        (4, 4, "host"),
    ],
)
@pytest.mark.parametrize(
    "most_bytes", [64, pytest.param(1 << 20, marks=pytest.mark.long)]
)  # of the first part
def test_the_exchange_over_a_network_is_the_local_tree_sum(hosts, workers, across, most_bytes):
    """With these numbers of lanes, hosts have one sum each, or some have several."""
    everything = [(lanes, [torch.float32, torch.bfloat16], range(2)) for lanes in (8, 12, 13)]

    def body(world):
        across_hosts.CHUNK_BYTES = most_bytes
        assert world.partners is not None
        return [
            exchanged(world, *arguments, across, owner_step)
            for arguments in everything
            for owner_step in (None, 0)
        ]

    expected = [expected_of(*arguments) for arguments in everything for _ in range(2)]
    assert on_hosts(hosts, workers, body) == [expected] * workers


@pytest.mark.parametrize(
    ("hosts", "workers", "lanes", "across", "expected"),
    [
        (1, 2, 8, "host", "HostExchange"),
        (2, 2, 8, "host", "UncopiedSwapExchange"),
        (2, 4, 8, "host", "SwapExchange"),
        (2, 2, 13, "host", "ShareExchange"),  # the second host has several sums
        (3, 3, 8, "host", "ShareExchange"),
        (2, 2, 8, "world", "OwnerExchange"),
    ],
)
def test_the_way_to_exchange_depends_on_hosts_and_sums(hosts, workers, lanes, across, expected):
    def body(world):
        exchange = exchange_of([torch.nn.Parameter(torch.zeros(64))], lanes, world, across=across)
        return type(exchange).__name__

    assert on_hosts(hosts, workers, body) == [expected] * workers


def test_shares_are_added_and_sent_on_before_anyone_waits_for_them():
    hosts = 3

    def body(world):
        parameter = torch.nn.Parameter(torch.zeros(640))
        exchange = exchange_of([parameter], hosts, world, across="host")
        exchange.receive()
        exchange.put([[torch.full([640], world.rank + 1.0)]])
        exchange.start()
        deadline = time.monotonic() + 60
        while not exchange._started[0].is_there():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return exchange.own_views[0][0].unique().tolist()

    assert on_hosts(hosts, hosts, body) == [[6.0]] * hosts


@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_gradients_are_sent_to_another_host_while_more_are_copied(round_to):
    def body(world, chunk_bytes):
        across_hosts.CHUNK_BYTES = chunk_bytes
        parameters = parameters_of(torch.float32)
        exchange = exchange_of(parameters, 2, world, round_to)
        empty = []  # number of gradients that are not there yet, whenever a part is sent
        begin_swap = world.begin_swap

        def watched_swap(*arguments):
            send = begin_swap(*arguments)
            return lambda parts: send(counted(part) for part in parts)

        def counted(part):
            empty.append(sum(not view.any() for view in exchange.own_views[0]))
            return part

        world.begin_swap = watched_swap
        gathered = []
        for seed in range(3):
            for view in exchange.own_views[0]:
                view.zero_()
            own_gradients = [lane_gradients(parameters, world.rank, seed)]
            exchange.receive()
            exchange.put(own_gradients)
            exchange.start()
            world.barrier("exchanging losses")
            exchange.sum()
            gathered.append([bits(gradient) for gradient in gather([exchange])[0]])
        return gathered, empty

    (first, empty), (second, _) = on_hosts(2, 2, body, 64)
    assert first == second
    assert empty[0] > empty[len(empty) // 3 - 1]
    (expected, empty), _ = on_hosts(2, 2, body, 1 << 20)
    assert first == expected
    assert len(set(empty[: len(empty) // 3])) == 1


def test_large_gradients_whose_memory_lacks_an_operation_are_copied():
    """Autograd may leave the conjugate bit or the negative bit of a gradient set."""
    values = torch.complex(torch.arange(640.0), torch.ones(640))
    kinds = {
        "conjugate": (torch.complex64, values.conj()),
        "negative": (torch.float32, values.conj().imag),
    }

    def body(world, kind):
        across_hosts.CHUNK_BYTES = 256
        dtype, gradient = kinds[kind]
        exchange = exchange_of([torch.nn.Parameter(torch.zeros(640, dtype=dtype))], 2, world)
        assert isinstance(exchange, UncopiedSwapExchange)
        assert gradient.is_conj() or gradient.is_neg()
        exchange.put([[gradient]])
        world.barrier("exchanging losses")
        exchange.sum()
        return bits(gather([exchange])[0][0])

    for kind, (_, gradient) in kinds.items():
        assert on_hosts(2, 2, body, kind) == [bits(gradient.resolve_conj().resolve_neg() * 2)] * 2


@pytest.mark.parametrize("across", ["host", "world"])
def test_an_exchange_that_was_not_used_ends_before_the_next_one(across):
    """As after a loss that is not finite, in a program that goes on. Messages need the memory."""
    hosts = 3

    def body(world):
        begin, begin_sums = world.begin_all_to_all, world.partners.begin_sums
        underway = []

        def watched(end):
            underway.append(end)
            return lambda: (end(), underway.remove(end) if end in underway else None)

        def watched_sums(*arguments):
            send = begin_sums(*arguments)
            return lambda sums: [
                arrival._replace(wait=watched(arrival.wait)) for arrival in send(sums)
            ]

        world.begin_all_to_all = lambda *arguments: watched(begin(*arguments))
        world.partners.begin_sums = watched_sums
        exchange = exchange_of([torch.nn.Parameter(torch.zeros(640))], hosts, world, across=across)
        totals = []
        for call in range(4):
            exchange.put([[torch.full([640], 10.0**call * (world.rank + 1))]])
            assert not underway
            world.barrier("exchanging losses")
            exchange.start()
            assert underway
            if call % 2:
                exchange.sum()
                (gradient,) = gather([exchange])[0]
                totals.append(gradient.unique().tolist())
        return totals

    assert on_hosts(hosts, hosts, body) == [[[60.0], [6000.0]]] * hosts


@given(slices=st.integers(0, 2_000_000), itemsize=st.sampled_from([2, 4, 8]))
def test_chunks_grow_and_shrink_and_begin_where_vectorized_kernels_do(slices, itemsize):
    sizes = across_hosts.chunks(slices * ALIGNMENT, itemsize)
    assert sum(sizes) == slices * ALIGNMENT
    assert all(size > 0 and size % ALIGNMENT == 0 for size in sizes)
    least = across_hosts.CHUNK_BYTES // itemsize
    largest = across_hosts.MOST_CHUNK_BYTES // itemsize
    assert max(sizes, default=0) <= largest
    assert all(size < least * 1.5 for size in sizes[:1] + sizes[-1:])
    assert all(size >= least // 2 - ALIGNMENT for size in sizes[1:])
    for before, size, after in zip(sizes, sizes[1:], sizes[2:], strict=False):
        assert least <= size <= 2 * before
        # those after it arrive while it is added
        assert size <= 2 * (after + ALIGNMENT) or after == sizes[-1]
    assert len(sizes) <= 10 + 2 * slices * ALIGNMENT // largest


def test_the_workers_of_each_host_hold_all_slices_across_host():
    def body(world):
        held_sums = []
        for across in ("host", "world"):
            exchange = exchange_of(
                [torch.nn.Parameter(torch.zeros(640))], LANES, world, across=across
            )
            exchange.put([[torch.ones(640)] for _ in exchange.own_spans])
            world.barrier("exchanging losses")
            held_sums.append((list(exchange.held), exchange.sum().sum().item()))
        return held_sums

    assert on_hosts(2, 4, body) == [
        [([0, 1], 1536.0), ([0], 768.0)],  # with padding: 4 slices of 192 elements
        [([2, 3], 1024.0), ([2], 768.0)],
        [([0, 1], 1536.0), ([1], 768.0)],
        [([2, 3], 1024.0), ([3], 256.0)],
    ]


def test_gradients_are_overwritten_only_after_a_barrier():
    """Otherwise a fast worker would overwrite gradients that a slow worker still reads."""

    def body(world):
        exchange = exchange_of([torch.nn.Parameter(torch.zeros(64))], world.size, world)
        barrier_on_host, met, before_put = world.barrier_on_host, [], []
        world.barrier_on_host = lambda what: (met.append(what), barrier_on_host(what))
        for step in range(4):
            if step == 2:
                world.barrier("doing something else")
            if step == 3:
                gather([exchange])[0]
            met.clear()
            exchange.put([[torch.full((64,), float(step))]])
            before_put.append(len(met))
            world.barrier("exchanging losses")
            exchange.sum()
        return before_put

    assert in_processes(2, body) == [[0, 1, 0, 0]] * 2
    # across hosts, `gather` ends it, which follows every sum that no optimizer awaits later
    assert on_hosts(2, 4, body) == [[0, 1, 1, 0]] * 4
    assert on_hosts(2, 2, body) == [[0, 0, 0, 0]] * 2  # no other worker reads there


@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_the_exchange_of_processes_is_the_local_tree_sum(workers):
    arguments = (LANES, [torch.float32, torch.float64, torch.bfloat16, torch.float16], range(4))
    expected = expected_of(*arguments)
    assert len({b"".join(total) for total in expected}) == len(expected)
    assert in_processes(workers, exchanged, *arguments) == [expected] * workers


def test_empty_parameters_can_be_exchanged():
    def body(world):
        parameters = [torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(3, 0))]
        exchange = exchange_of(parameters, 4, world)
        own_gradients = [
            [torch.zeros(0), None] for _ in subtrees(lanes_of(world.rank, world.size, 4), 4)
        ]
        exchange.put(own_gradients)
        world.barrier("exchanging losses")
        exchange.sum()
        return [gradient.shape for gradient in gather([exchange])[0]]

    assert in_processes(2, body) == [[(0,), (3, 0)]] * 2
    assert on_hosts(2, 2, body) == [[(0,), (3, 0)]] * 2


def test_the_order_of_additions_changes_these_sums():
    """Otherwise the tests above could not fail."""
    parameters = parameters_of(torch.float32)
    lanes = [lane_gradients(parameters, lane, seed=0)[7] for lane in range(LANES)]
    present = [gradient for gradient in lanes if gradient is not None]
    assert bits(reduce(torch.add, present)) != bits(reduce(torch.add, reversed(present)))


def test_views_of_flat_storage_do_not_overlap():
    parameters = parameters_of(torch.float32)
    exchange = exchange_of(parameters, LANES, in_threads(1, lambda world: world)[0])
    flat = torch.zeros(exchange.layout.flat_size)
    views = exchange.views(flat)
    for number, view in enumerate(views, start=1):
        assert not view.any()
        view.fill_(number)
    for number, (view, parameter) in enumerate(zip(views, parameters, strict=True), start=1):
        assert (view == number).all()
        assert flattened(view).data_ptr() == view.data_ptr()
        assert view.shape == parameter.shape
    assert flat.count_nonzero() == sum(parameter.numel() for parameter in parameters)
