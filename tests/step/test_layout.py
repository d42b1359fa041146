from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.step.layout import ALIGNMENT, Layout, flattened, storage_order

SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 1000), st.sampled_from([63, 64, 65, 128, 4096])),
    max_size=12,
).map(tuple)


@given(SIZES, st.integers(1, 17))
@example((), 3)
@example((0,), 2)
@example((1,), 17)
def test_fragments_tile_every_tensor_once_on_multiples_of_64(sizes, workers):
    layout = Layout(sizes, workers)
    size = layout.bounds[1]
    assert layout.bounds == tuple(number * size for number in range(workers + 1))
    assert layout.flat_size == size * workers >= layout.offsets[-1]
    assert size % ALIGNMENT == 0
    covered = [[] for _ in sizes]
    for rank in range(workers):
        fragments = layout.fragments(rank)
        assert [fragment.index for fragment in fragments] == sorted(
            {fragment.index for fragment in fragments}
        )
        for fragment in fragments:
            flat_start = rank * size + fragment.offset
            assert flat_start == layout.offsets[fragment.index] + fragment.start
            assert (
                flat_start % ALIGNMENT
                == fragment.start % ALIGNMENT
                == fragment.offset % ALIGNMENT
                == 0
            )
            assert fragment.stop % ALIGNMENT == 0 or fragment.stop == sizes[fragment.index]
            assert 0 <= fragment.start < fragment.stop
            assert fragment.offset + fragment.stop - fragment.start <= size
            covered[fragment.index].append((fragment.start, fragment.stop))
    for elements, parts in zip(sizes, covered, strict=True):
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == elements


@given(SIZES, st.integers(1, 17), st.randoms(use_true_random=False))
def test_a_layout_with_owners_cuts_no_tensor(sizes, workers, random):
    owners = tuple(sorted(random.randrange(workers) for _ in sizes))
    layout = Layout(sizes, workers, ALIGNMENT, owners)
    assert layout.offsets == Layout(sizes, 1).offsets
    assert layout.bounds == tuple(sorted(layout.bounds))
    assert (layout.bounds[0], layout.flat_size) == (0, layout.offsets[-1])
    fragments = [layout.fragments(number) for number in range(workers)]
    for number, of_one in enumerate(fragments):
        assert [(fragment.index, fragment.start, fragment.stop) for fragment in of_one] == [
            (index, 0, size) for index, size in enumerate(sizes) if size and owners[index] == number
        ]
        for fragment in of_one:
            assert layout.bounds[number] + fragment.offset == layout.offsets[fragment.index]
    assert len(layout.fragments(0, workers)) == sum(map(len, fragments))


@given(SIZES, st.integers(1, 17))
def test_offsets_do_not_depend_on_the_number_of_workers(sizes, workers):
    """Snapshots rely on it."""
    offsets = Layout(sizes, workers).offsets
    assert offsets == Layout(sizes, 1).offsets
    assert offsets[0] == 0
    for (start, stop), size in zip(pairwise(offsets), sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert 0 <= stop - start - size < ALIGNMENT


def test_no_worker_gets_more_than_its_share_rounded_up():
    layout = Layout((100, 64, 1, 300), 3)
    assert layout.offsets == (0, 128, 192, 256, 576)
    assert layout.bounds == (0, 192, 384, 576)
    assert [
        [(fragment.index, fragment.start, fragment.stop) for fragment in layout.fragments(rank)]
        for rank in range(3)
    ] == [[(0, 0, 100), (1, 0, 64)], [(2, 0, 1), (3, 0, 128)], [(3, 128, 300)]]


@given(st.lists(st.integers(0, 4), max_size=5), st.randoms(use_true_random=False))
def test_a_dense_tensor_is_flattened_in_storage_order_without_a_copy(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    storage = torch.arange(torch.Size(shape).numel())
    tensor = storage.view([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    assert list(tensor.shape) == shape
    dims = storage_order(tensor)
    assert sorted(dims) == list(range(len(shape)))
    assert torch.equal(flattened(tensor), storage)
    assert flattened(tensor).data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor.permute(dims).reshape(-1), storage)


def test_the_usual_formats():
    image = torch.rand(2, 3, 4, 5)
    assert storage_order(image) == (0, 1, 2, 3)
    assert storage_order(image.contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert storage_order(torch.rand(3, 4).T) == (1, 0)
    assert storage_order(torch.tensor(1.0)) == ()


def test_a_tensor_with_gaps_is_copied_in_plain_order():
    dense = torch.arange(24).view(4, 6)
    for tensor in (dense[:, ::2], dense[0].expand(3, 6), dense.T[1:3, 1:]):
        assert storage_order(tensor) == (0, 1)
        assert torch.equal(flattened(tensor), tensor.contiguous().view(-1))
        assert flattened(tensor).data_ptr() != tensor.data_ptr()
