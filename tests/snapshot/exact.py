"""Exact comparison of values, and states to test with."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from samestep.snapshot.state import DTYPES

INFINITE = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -0.0,
    5e-324,
    struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0],
]


def exact(value: Any) -> Any:
    """Return an object that is equal for two values if types, order and bits are equal."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", value.dtype, tuple(value.shape), dense.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, np.shape(value), value.tobytes()
    if isinstance(value, dict):
        pairs = [(exact(key), exact(item)) for key, item in value.items()]
        return kind, pairs, exact(getattr(value, "_metadata", None))
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, map(exact, value)))
    if isinstance(value, (list, tuple)):
        return kind, [exact(item) for item in value]
    return kind, struct.pack(">dd", value.real, value.imag) if kind in {float, complex} else value


def in_storage_orders(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Return strategies for a tensor's values in any dense memory order."""
    dims = range(tensor.ndim)
    return st.permutations(dims).map(
        lambda order: tensor.permute(order).contiguous().permute([order.index(dim) for dim in dims])
    )


@st.composite
def tensors(draw: st.DrawFn, max_elements_a_dim: int = 9) -> torch.Tensor:
    # torch warns at every use of complex32
    dtype = draw(st.sampled_from(sorted(set(DTYPES) - {"complex32"})))
    shape = draw(st.lists(st.integers(0, max_elements_a_dim), max_size=4))
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    content = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
        0, 2 if dtype == "bool" else 256, size, dtype=np.uint8
    )
    # empty tensors from NumPy have stride 0
    flat = torch.zeros(size, dtype=torch.uint8).copy_(torch.from_numpy(content))
    return draw(in_storage_orders(flat.view(DTYPES[dtype]).view(shape)))


names = st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
keys = names | st.tuples(st.integers(), st.text()) | st.binary()
scalars = st.one_of(
    keys,
    st.floats(),
    st.sampled_from(INFINITE),
    st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**400]),
    st.complex_numbers(),
    st.sampled_from(["\ud800", "\ud83d\ude00", "\0", "__metadata__", "a/b"]),
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    st.lists(st.integers(0, 2**62)).map(torch.Size),
    arrays.scalar_dtypes().flatmap(arrays.from_dtype),
    st.sets(keys),
    st.frozensets(st.one_of(keys, st.frozensets(keys))),
    st.dictionaries(keys, st.integers()).map(Counter),
)
numpy_arrays = arrays.arrays(
    arrays.scalar_dtypes() | st.just(np.dtype("<U3")),
    arrays.array_shapes(min_dims=0, min_side=0, max_dims=3),
)
states = st.recursive(
    scalars | tensors() | numpy_arrays,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(OrderedDict),
    ),
    max_leaves=12,
)
