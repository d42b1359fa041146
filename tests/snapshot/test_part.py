from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from samestep.snapshot.manifest import tiling_fault
from samestep.snapshot.part import SHARE_ALIGNMENT, share

tensor_sizes = st.lists(
    st.tuples(st.integers(0, 2000), st.sampled_from([1, 2, 4, 8, 16])), max_size=12
)


@given(tensor_sizes, st.integers(1, 9))
def test_workers_share_every_element_once(sizes, workers):
    shares = [share(sizes, rank, workers) for rank in range(workers)]
    for index, (count, _) in enumerate(sizes):
        assert [element for ranges in shares for element in ranges[index]] == list(range(count))


@given(tensor_sizes, st.integers(1, 9))
def test_cuts_are_at_multiples_of_64_elements(sizes, workers):
    for rank in range(workers):
        for (count, _), elements in zip(sizes, share(sizes, rank, workers), strict=True):
            assert elements.start % SHARE_ALIGNMENT == 0 or elements.start == count
            assert elements.stop % SHARE_ALIGNMENT == 0 or elements.stop == count


@given(tensor_sizes, st.integers(1, 9))
def test_shares_are_even_to_one_cut(sizes, workers):
    total = sum(count * nbytes for count, nbytes in sizes)
    coarsest = SHARE_ALIGNMENT * max((nbytes for _, nbytes in sizes), default=0)
    for rank in range(workers):
        own_bytes = sum(
            len(elements) * nbytes
            for (_, nbytes), elements in zip(sizes, share(sizes, rank, workers), strict=True)
        )
        assert abs(own_bytes - total / workers) <= coarsest + 1


@given(
    st.lists(st.integers(0, 50), unique=True, min_size=2).map(sorted),
    st.randoms(use_true_random=False),
)
def test_ranges_tile_unless_one_is_lost_or_doubled(cuts, random):
    cuts[0] = 0
    ranges = list(pairwise(cuts))
    random.shuffle(ranges)
    assert tiling_fault(ranges, cuts[-1]) is None
    lost = ranges.pop()
    assert (
        tiling_fault(ranges, cuts[-1])
        == f"elements {lost[0]} to {lost[1]} of {cuts[-1]} are missing"
    )
    assert (
        tiling_fault([*ranges, lost, lost], cuts[-1])
        == f"elements {lost[0]} to {lost[1]} of {cuts[-1]} are duplicates"
    )


def test_ranges_outside_the_tensor_are_faults():
    assert tiling_fault([(0, 5)], 4) == "0 to 5 is not a range of its 4 elements"
    assert tiling_fault([(-1, 4)], 4) == "-1 to 4 is not a range of its 4 elements"
    assert tiling_fault([(0, 4), (4, 4)], 4) == "4 to 4 is not a range of its 4 elements"
    assert tiling_fault([], 0) is None
