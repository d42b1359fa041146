from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.sharded.carry import Carry
from samestep.step.layout import tree_sum

SIZE = 5


def pieces_of(lanes, cuts):
    """Return what a carry gets of some lanes, [lanes, SIZE], cut into pieces."""
    ends = sorted({0, SIZE, *cuts})
    return [(start, stop, [lane[start:stop] for lane in lanes]) for start, stop in pairwise(ends)]


def added(values, turns, cuts):
    """Return a carry after turns of some lanes each."""
    carry, start = Carry(), 0
    while start < len(values):
        stop = start + turns.pop(0) if turns else len(values)
        carry.add(SIZE, pieces_of(values[start:stop], cuts))
        start = stop
    return carry


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 9), max_size=12),
    st.sets(st.integers(1, SIZE - 1)),
    st.integers(0, 2**32 - 1),
)
def test_a_carry_adds_along_the_tree(lanes, turns, cuts, seed):
    values = torch.randn(lanes, SIZE, generator=torch.Generator().manual_seed(seed)) * 1e3

    def value_of(span):
        return values[span[0]].clone() if span[1] - span[0] == 1 else None

    expected, before = tree_sum((0, lanes), value_of, torch.Tensor.add_), values.clone()
    assert torch.equal(added(values, turns, cuts).total(), expected)
    assert torch.equal(values, before)  # what arrives is the memory of other workers


@given(st.integers(1, 300), st.integers(1, 9))
def test_a_carry_keeps_few_sums(lanes, turn):
    carry = Carry()
    for start in range(0, lanes, turn):
        done = min(lanes, start + turn)
        carry.add(SIZE, pieces_of(torch.ones(done - start, SIZE), ()))
        assert len(carry._sums) == done.bit_count()
    assert carry.total().tolist() == [lanes] * SIZE


def test_a_carry_begins_anew():
    carry = Carry()
    assert carry.total() is None
    carry.add(SIZE, pieces_of(torch.ones(1, SIZE), ()))
    assert carry.total().tolist() == [1] * SIZE
    assert carry.total() is None
    carry.add(0, [])
    assert carry.total() is None
