from __future__ import annotations

import pytest
import torch

from samestep.errors import LossError
from samestep.step.gradients import add_gradients, take_gradients
from tests.bits import bits


def test_missing_gradients_count_as_zeros():
    ones, zeros = torch.ones(2), torch.tensor([-0.0, 0.0])
    assert add_gradients([None, None], [None, None]) == [None, None]
    left, right, both = add_gradients(
        [ones.clone(), None, ones.clone()], [None, zeros.clone(), ones.clone()]
    )
    assert bits(left) == bits(ones)
    assert bits(right) == bits(torch.zeros(2))
    assert bits(both) == bits(2 * ones)


def test_gradients_are_taken_and_none_is_left():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    (3 * parameters[0]).sum().backward()
    taken = take_gradients(parameters)
    assert taken[0].tolist() == [3, 3]
    assert taken[1] is None
    assert parameters[0].grad is None
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        LossError, match=r"a parameter of shape \(4, 2\) has a sparse gradient; expected dense ones"
    ):
        take_gradients([embedding.weight])
