from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.step.across_hosts import choose_exchange
from samestep.step.exchange import ExchangeSpec
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.gradients import copy_gradients
from samestep.step.guards import Contents
from samestep.step.layout import Assignment
from samestep.step.scaling import gradient_norm, scale_gradients
from tests.bits import bits
from tests.worlds import in_processes, in_threads, on_hosts

LANES = 8
SHAPES = [(3, 7), (64,), (2, 5, 4, 4), (129,), (), (1000,), (0,), (65, 2), (5,)]


def parameters_with_gradients(seed, dtype=torch.float32):
    """Return parameters of several shapes, some without a gradient."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in SHAPES:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        if len(shape) == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if torch.rand((), generator=generator) < 0.8:
            scale = 10.0 ** torch.randint(-3, 3, shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(
                torch.randn(shape, generator=generator) * scale
            )
        parameters.append(parameter)
    return parameters


def clipped(
    world, seed, max_norm, sharded, chosen, dtype=torch.float32, *, across="world", are_whole=False
):
    """Return the bits of the norm of `chosen` parameters, and of all gradients after clipping.

    The gradients of `sharded` parameters are in slices, which cut none of them if they `are_whole`.
    """
    parameters = parameters_with_gradients(seed, dtype)
    flat_buffer = None
    if sharded:
        in_buffer = [parameters[number] for number in sharded]
        present = [parameter.grad is not None for parameter in in_buffer]
        gradients = [parameter.grad for parameter in in_buffer]
        optimizer = torch.optim.SGD(in_buffer, lr=0.1)
        owners = tuple(sorted(number % world.size for number in sharded)) if are_whole else None
        assignment = Assignment(world.size, LANES)
        spec = ExchangeSpec(in_buffer, assignment, world, across=across, owners=owners)
        exchange = choose_exchange(spec)
        flat_buffer = FlatBuffer(exchange, Contents(optimizer))
        flat = flat_buffer.own.new_zeros(flat_buffer.exchange.layout.flat_size)
        copy_gradients(flat_buffer.exchange.views(flat), gradients)
        flat_buffer.set_gradients(lambda: exchange.slices(flat, exchange.held), present)
        flat_buffer.complete()
        for parameter in in_buffer:
            parameter.grad = None
    selected = [parameters[number] for number in chosen]
    flat_buffers = [] if flat_buffer is None else [flat_buffer]
    norm = gradient_norm(selected, flat_buffers)
    full_gradients = [parameter.grad for parameter in selected if parameter.grad is not None]
    scale_gradients(
        [
            *full_gradients,
            *(
                part
                for buffer in flat_buffers
                for part in buffer.gradients_of(set(map(id, selected)))
            ),
        ],
        norm,
        max_norm,
    )
    if flat_buffer is not None:
        most = max(map(exchange.size_of, range(world.size)))
        by_rank = flat.new_empty(world.size, most)
        own = exchange.slice_of(flat, world.rank)
        sent = torch.nn.functional.pad(own, (0, most - len(own)))
        world.all_gather(by_rank.view(-1), sent, "gathering gradients")
        flat.copy_(exchange.joined(by_rank))
        for parameter, view, is_present in zip(
            in_buffer, flat_buffer.exchange.views(flat), present, strict=True
        ):
            parameter.grad = view if is_present else None
    return bits(norm), [
        None if parameter.grad is None else bits(parameter.grad) for parameter in parameters
    ]


@given(st.data(), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e4, 1e9]))
def test_complete_and_sharded_gradients_are_clipped_to_the_same_bits(data, workers, seed, max_norm):
    numbers = st.sets(st.integers(0, len(SHAPES) - 1)).map(sorted)
    sharded, chosen = data.draw(numbers), data.draw(numbers.filter(bool))
    are_whole = data.draw(st.booleans())
    expected = clipped(in_threads(1, lambda world: world)[0], seed, max_norm, [], chosen)
    clip = partial(clipped, are_whole=are_whole)
    assert in_threads(workers, clip, seed, max_norm, sharded, chosen) == [expected] * workers


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.long),
        3,
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_processes_clip_to_the_same_bits(workers):
    def body(world):
        everything = range(len(SHAPES))
        return [
            [
                clipped(world, seed, 1.0, sharded, everything, dtype)
                for sharded in ([], everything, everything[::2])
            ]
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
            for seed in range(5)
        ]

    for worker in in_processes(workers, body):
        assert worker == [[results[0]] * 3 for results in in_processes(1, body)[0]]


@pytest.mark.parametrize("across", ["host", "world"])
def test_hosts_clip_to_the_same_bits(across):
    def body(world, across):
        everything = range(len(SHAPES))
        arguments = (1.0, everything[::2], everything)
        return [
            clipped(world, seed, *arguments, across=across, are_whole=are_whole)
            for seed in range(5)
            for are_whole in (False, True)
        ]

    assert on_hosts(2, 4, body, across) == in_processes(1, body, across) * 4


@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-3, 1.0, 1e9]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_clipping_agrees_with_torch(seed, max_norm, dtype):
    ours, theirs = (parameters_with_gradients(seed, dtype) for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = gradient_norm(ours, [])
    scale_gradients(
        [parameter.grad for parameter in ours if parameter.grad is not None], norm, max_norm
    )
    torch.testing.assert_close(norm.to(dtype), expected)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.grad is None) == (their.grad is None)
        torch.testing.assert_close(our.grad, their.grad)


@pytest.mark.parametrize(
    ("value", "norm"),
    [(math.inf, math.inf), (math.nan, math.nan), (0.0, 0.0), (3e-20, 3e-19), (1e18, 1e19)],
)
def test_special_gradients(value, norm):
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = torch.full((100,), value)
    computed = gradient_norm([parameter], [])
    assert computed.dtype == torch.float64
    torch.testing.assert_close(computed, torch.tensor(norm, dtype=torch.float64), equal_nan=True)
    scale_gradients([parameter.grad], torch.tensor(5.0, dtype=torch.float64), max_norm=10.0)
    assert bits(parameter.grad) == bits(torch.full((100,), value))
