from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from samestep.step.layout import ALIGNMENT, Layout

SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 1000), st.sampled_from([63, 64, 65, 128, 4096])),
    max_size=12,
).map(tuple)


@given(SIZES, st.integers(1, 17))
@example((), 3)
@example((0,), 2)
@example((1,), 17)
def test_pieces_tile_every_tensor_once_on_multiples_of_64(sizes, workers):
    layout = Layout(sizes, workers)
    assert layout.flat_size == layout.slice_size * workers >= layout.offsets[-1]
    assert layout.slice_size % ALIGNMENT == 0
    covered = [[] for _ in sizes]
    for rank in range(workers):
        pieces = layout.pieces(rank)
        assert [piece.index for piece in pieces] == sorted({piece.index for piece in pieces})
        for piece in pieces:
            flat_start = rank * layout.slice_size + piece.offset
            assert flat_start == layout.offsets[piece.index] + piece.start
            assert (
                flat_start % ALIGNMENT == piece.start % ALIGNMENT == piece.offset % ALIGNMENT == 0
            )
            assert piece.stop % ALIGNMENT == 0 or piece.stop == sizes[piece.index]
            assert 0 <= piece.start < piece.stop
            assert piece.offset + piece.stop - piece.start <= layout.slice_size
            covered[piece.index].append((piece.start, piece.stop))
    for size, parts in zip(sizes, covered, strict=True):
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == size


@given(SIZES, st.integers(1, 17))
def test_tensors_lie_one_after_the_other_wherever_they_are_cut(sizes, workers):
    """A snapshot may rely on it: where a tensor lies does not depend on the number of workers."""
    offsets = Layout(sizes, workers).offsets
    assert offsets == Layout(sizes, 1).offsets
    assert offsets[0] == 0
    for (start, stop), size in zip(pairwise(offsets), sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert 0 <= stop - start - size < ALIGNMENT


def test_no_worker_gets_more_than_its_share_rounded_up():
    layout = Layout((100, 64, 1, 300), 3)
    assert layout.offsets == (0, 128, 192, 256, 576)
    assert layout.slice_size == 192
    assert [
        [(piece.index, piece.start, piece.stop) for piece in layout.pieces(rank)]
        for rank in range(3)
    ] == [
        [(0, 0, 100), (1, 0, 64)],
        [(2, 0, 1), (3, 0, 128)],
        [(3, 128, 300)],
    ]
