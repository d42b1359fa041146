from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.step.layout import flattened, storage_order


@given(st.lists(st.integers(0, 4), max_size=5), st.randoms(use_true_random=False))
def test_a_dense_tensor_is_flattened_in_storage_order_without_a_copy(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    storage = torch.arange(torch.Size(shape).numel())
    tensor = storage.view([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    assert list(tensor.shape) == shape
    found = storage_order(tensor)
    assert sorted(found) == list(range(len(shape)))
    assert torch.equal(flattened(tensor), storage)
    assert flattened(tensor).data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor.permute(found).reshape(-1), storage)


def test_the_usual_formats():
    image = torch.rand(2, 3, 4, 5)
    assert storage_order(image) == (0, 1, 2, 3)
    assert storage_order(image.contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert storage_order(torch.rand(3, 4).T) == (1, 0)
    assert storage_order(torch.tensor(1.0)) == ()


def test_what_is_not_dense_is_copied_in_plain_order():
    whole = torch.arange(24).view(4, 6)
    for tensor in (whole[:, ::2], whole[0].expand(3, 6), whole.T[1:3, 1:]):
        assert storage_order(tensor) == (0, 1)
        assert torch.equal(flattened(tensor), tensor.contiguous().view(-1))
        assert flattened(tensor).data_ptr() != tensor.data_ptr()
