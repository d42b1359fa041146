from __future__ import annotations

import functools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.random_state import BLOCK, CACHED_BLOCKS, TABULATED, Permutation, key
from samestep.errors import DataError

# fixed, so that a statistic is the same in every run
KEYS = [key(7, "epoch", epoch) for epoch in range(4000)]
Z = 4.75  # a standard normal variable exceeds this once in a million


def chi_square_bounds(freedom):
    """Return chi-square quantiles, each exceeded once in a million (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * max(0.0, 1 - spread - Z * spread**0.5) ** 3, freedom * (
        1 - spread + Z * spread**0.5
    ) ** 3


def assert_uniform(counts, freedom, variance_factor=1.0):
    """Check that counts of equally likely outcomes vary as chance predicts, and not less."""
    expected = counts.sum() / counts.size
    statistic = variance_factor * float(((counts - expected) ** 2 / expected).sum())
    low, high = chi_square_bounds(freedom)
    assert low <= statistic <= high, (
        f"chi-square {statistic:.1f} is outside {low:.1f} to {high:.1f} with {freedom} degrees"
    )


@functools.cache
def orders(size):
    """Return the complete permutation of each key: [keys, size]."""
    return np.stack(
        [Permutation(size, permutation_key)[np.arange(size)] for permutation_key in KEYS]
    )


def in_bins(values, size, bins):
    return np.asarray(values) * bins // size


def test_every_size_gives_a_bijection():
    for size in range(1, 700):
        assert np.array_equal(np.sort(Permutation(size, size)[np.arange(size)]), np.arange(size))


@given(size=st.integers(1, 100_000), permutation_key=st.integers(0, 2**63 - 1))
def test_any_size_and_key_give_a_bijection(size, permutation_key):
    values = Permutation(size, permutation_key)[np.arange(size)]
    assert values.dtype == np.int64
    assert np.array_equal(np.bincount(values, minlength=size), np.ones(size, dtype=np.int64))
    assert np.array_equal(Permutation(size, permutation_key).inverse(values), np.arange(size))


@given(size=st.integers(1, 2**62), permutation_key=st.integers(0, 2**63 - 1), data=st.data())
def test_the_inverse_of_any_size_finds_a_position(size, permutation_key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
    order = Permutation(size, permutation_key)
    assert order.inverse(order[positions]).tolist() == positions
    assert order[order.inverse(positions)].tolist() == positions
    for outside in (-1, size):
        with pytest.raises(IndexError, match=f"values must be in .0, {size}., got {outside}"):
            order.inverse([outside])


@pytest.mark.parametrize("size", [10**9, 10**12, 2**62])
def test_huge_sizes_are_injective_within_range_and_take_no_memory(size):
    rng = np.random.default_rng(size)
    positions = np.unique(
        np.concatenate(
            [rng.integers(0, size, 50_000), np.arange(1000), np.arange(size - 1000, size)]
        )
    )
    tracemalloc.start()
    values = Permutation(size, 11)[positions]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * 2**20
    assert values.min() >= 0
    assert values.max() < size
    assert len(np.unique(values)) == len(positions)
    assert_uniform(np.bincount(values // -(-size // 64), minlength=64), 63)


@given(size=st.integers(1, 5000), data=st.data())
def test_positions_may_have_any_shape_and_order(size, data):
    permutation = Permutation(size, 3)
    permuted = permutation[np.arange(size)]
    positions = np.asarray(
        data.draw(st.lists(st.integers(0, size - 1), max_size=12)), dtype=np.int64
    )
    shaped = positions[: len(positions) // 2 * 2].reshape(2, -1)
    assert np.array_equal(permutation[positions], permuted[positions])
    assert np.array_equal(permutation[list(positions)], permuted[positions])
    assert np.array_equal(permutation[shaped], permuted[shaped])
    assert permutation[size - 1].shape == ()
    assert int(permutation[size - 1]) == permuted[-1]
    assert len(permutation) == size


SPANNED = st.one_of(
    st.integers(1, 5 * BLOCK),
    st.integers(1, 2**62),
    st.sampled_from([BLOCK, BLOCK + 1, TABULATED, TABULATED + 1, 2**62]),
)


@given(size=SPANNED, permutation_key=st.integers(0, 2**63 - 1), data=st.data())
def test_a_span_equals_its_positions(size, permutation_key, data):
    permutation, single = Permutation(size, permutation_key), Permutation(size, permutation_key)
    for _ in range(4):
        start = data.draw(st.one_of(st.integers(0, size), st.integers(max(0, size - 3), size)))
        stop = min(
            size,
            start
            + data.draw(st.one_of(st.integers(0, 300), st.integers(BLOCK - 1, 2 * BLOCK + 1))),
        )
        values = permutation.span(start, stop)
        assert values.dtype == np.int64
        assert np.array_equal(values, single[np.arange(start, stop)])


def evaluations(monkeypatch):
    """Return a list that records the first position of each evaluation."""
    positions, evaluate = [], Permutation._evaluate
    monkeypatch.setattr(
        Permutation,
        "_evaluate",
        lambda self, x, rounds: positions.append(int(x[0])) or evaluate(self, x, rounds),
    )
    return positions


def test_two_walks_through_one_order_evaluate_each_block_once(monkeypatch):
    """As when loader processes fetch ahead."""
    size, ahead = 20 * BLOCK, (CACHED_BLOCKS - 2) * BLOCK
    permutation, evaluated = Permutation(size, 1), evaluations(monkeypatch)
    for position in range(0, size - 100, 100):
        permutation.span(position, position + 100)
        permutation.span(max(0, position - ahead), max(0, position - ahead) + 100)
    assert evaluated == list(range(0, size, BLOCK))


def test_a_walk_takes_no_memory():
    permutation = Permutation(10**9, 1)
    tracemalloc.start()
    for block in range(3 * CACHED_BLOCKS):
        permutation.span(block * BLOCK, block * BLOCK + 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * 2**20


def test_cached_values_are_read_only():
    for size in (10, 10_000):
        with pytest.raises(ValueError, match="read-only"):
            Permutation(size, 0).span(0, 5)[0] = 1


def test_positions_outside_are_rejected():
    permutation = Permutation(10, 0)
    for outside in (10, -1, [0, 10], [-1, 5], np.uint64(2**63)):
        with pytest.raises(IndexError, match=r"positions must be in \[0, 10\), got"):
            permutation[outside]
    for start, stop in ((-1, 3), (0, 11), (5, 4), (11, 12)):
        with pytest.raises(
            IndexError, match=f"expected 0 <= start <= stop <= 10, got {start} and {stop}"
        ):
            permutation.span(start, stop)
    for size in (0, -1, 2**62 + 1):
        with pytest.raises(DataError, match=rf"must be 1 to 2\*\*62, got {size}"):
            Permutation(size, 0)


def test_every_epoch_has_another_order():
    assert len(np.unique(orders(33), axis=0)) == len(KEYS)


@pytest.mark.parametrize("size", [2, 3, 5, 10, 33])
def test_every_value_is_equally_likely_at_every_position(size):
    """The covariance of a random permutation's matrix leaves (size - 1)² degrees of freedom."""
    counts = np.stack([np.bincount(values, minlength=size) for values in orders(size).T])
    assert_uniform(counts, (size - 1) ** 2, variance_factor=(size - 1) / size)


@pytest.mark.parametrize("size", [3, 5, 10, 33])
def test_every_pair_of_neighbors_is_equally_likely(size):
    for position in {0, (size - 1) // 2, size - 2}:
        first, second = orders(size)[:, position], orders(size)[:, position + 1]
        counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
        assert not np.diag(counts).any()
        assert_uniform(counts[~np.eye(size, dtype=bool)], size * (size - 1) - 1)


@pytest.mark.parametrize(("size", "number_of_orders"), [(2, 2), (3, 6), (4, 24)])
def test_every_order_is_equally_likely(size, number_of_orders):
    _, counts = np.unique(orders(size), axis=0, return_counts=True)
    assert len(counts) == number_of_orders
    assert_uniform(counts, number_of_orders - 1)


@pytest.mark.parametrize(
    "size",
    [
        101,
        1000,
        pytest.param(65_536, marks=pytest.mark.long),
        pytest.param(1_281_167, marks=pytest.mark.long),
    ],
)
def test_large_sizes_are_uniform_over_epochs(size):
    """Values at some positions, and the distances to the next position's values, in 50 bins."""
    positions = [[0, 1], [1, 2], [size // 2, size // 2 + 1], [size - 2, size - 1]]
    values = np.stack([Permutation(size, permutation_key)[positions] for permutation_key in KEYS])
    for first, second in values.transpose(1, 2, 0):
        distances = (second - first) % size  # never 0
        if size == 101:  # so small that bins would be of unequal sizes
            assert_uniform(np.bincount(first, minlength=size), size - 1)
            assert_uniform(np.bincount(distances - 1, minlength=size - 1), size - 2)
        else:
            assert_uniform(np.bincount(in_bins(first, size, 50), minlength=50), 49)
            assert_uniform(np.bincount(in_bins(distances - 1, size - 1, 50), minlength=50), 49)


@pytest.mark.parametrize("size", [10_000, 99_991, 1_000_000])
def test_neighbors_within_an_epoch_are_independent(size):
    for permutation_key in KEYS[:2]:
        values = Permutation(size, permutation_key)[np.arange(size)]
        for lag in (1, 2, 32, 1000):
            pairs = in_bins(values[:-lag], size, 20) * 20 + in_bins(values[lag:], size, 20)
            assert_uniform(np.bincount(pairs, minlength=400), 19**2)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_items_are_equally_likely(size):
    _, counts = np.unique(orders(size), axis=0, return_counts=True)
    assert counts.size == math.factorial(size)
    assert_uniform(counts, counts.size - 1)
