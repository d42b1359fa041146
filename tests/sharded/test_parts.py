from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.sharded.parts import extended, rows_of
from samestep.step.layout import ALIGNMENT

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@given(SHAPES, st.integers(1, 9))
def test_each_element_has_one_owner(shape, workers):
    rows = rows_of(shape, workers)
    assert len(rows) == workers
    assert rows[0][0] == 0
    assert rows[-1][1] == torch.Size(shape).numel()
    assert all(left[1] == right[0] for left, right in pairwise(rows))


@given(SHAPES, st.integers(1, 9))
def test_owners_have_the_rows_that_torch_chunk_gives_them(shape, workers):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = [chunk.reshape(-1).tolist() for chunk in tensor.chunk(workers)]
    rows = [list(range(*elements)) for elements in rows_of(shape, workers)]
    assert [row for row in rows if row] == chunks


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 200))
def test_elements_are_extended_to_whole_vectors(start, size, after):
    numel = start + size + after
    low, high = extended((start, start + size), numel)
    if size == 0:
        assert (low, high) == (0, 0)
        return
    assert low <= start
    assert start + size <= high <= numel
    assert low % ALIGNMENT == 0
    assert high % ALIGNMENT == 0 or high == numel
    assert start - low < ALIGNMENT
    assert high - start - size < ALIGNMENT
