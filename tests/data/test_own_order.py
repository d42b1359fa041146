"""Weights and orders of the user's own: the same at any number of workers, and as they say."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.comm.base import Alone
from samestep.data.agreement import DataCheck
from samestep.data.loader import plan_batches
from samestep.data.orders import CACHED_EPOCHS, OrderedPlan, Weighted, WeightedPlan
from samestep.data.random_state import key, uniform
from samestep.errors import DataError
from samestep.step.layout import lanes_of
from tests.data.test_permutation import chi_square_bounds
from tests.data.test_plan import assert_pure, lane_batches, samples
from tests.workers import run_workers, try_workers

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(1, 60)
LANES = st.integers(4, 12)


@st.composite
def plans(draw):
    """Return a function that makes the same plan again."""
    size, batch_size, lanes, seed = draw(SIZES), draw(SIZES), draw(LANES), draw(SEEDS)
    if draw(st.booleans()):
        weight = st.one_of(st.integers(0, 3), st.floats(0, 1e300))
        weights = draw(st.lists(weight, min_size=size, max_size=size).filter(any))
        return lambda: WeightedPlan(size, batch_size, lanes, seed, order=Weighted(weights))
    indices = st.lists(st.integers(0, size - 1), min_size=1, max_size=60)
    epoch_order = draw(indices)
    order = epoch_order if draw(st.booleans()) else lambda epoch: np.roll(epoch_order, epoch)
    return lambda: OrderedPlan(size, batch_size, lanes, seed, shuffle=False, order=order)


def read_by(workers, plan):
    """Return the indices of each (epoch, step, lane) that the workers read for two epochs."""
    positions = list(itertools.product(range(2), range(plan.steps_per_epoch)))
    lane_indices = {}
    for rank in range(workers):
        batches = plan_batches(
            plan,
            range(plan.size),
            lanes_of(rank, workers, plan.lanes),
            lambda: iter(positions),
            DataCheck(0, 0, 1, Alone().all_gather_json),
            "train",
            seed=3,
            collate_fn=list,
            loader_workers=0,
            pin_memory=False,
        )
        for position, batch in zip(positions, batches, strict=True):
            lane_indices |= {(*position, lane): data for lane, data in batch.lane_batches()}
    return lane_indices


@given(plans())
def test_a_step_has_the_same_samples_at_any_number_of_workers(make):
    alone = read_by(1, make())
    for workers in (2, 3, 4):
        assert read_by(workers, make()) == alone
    batches = lane_batches(make(), 1)
    assert_pure(make(), make(), batches, 1)
    assert len(samples(batches)) == make().samples
    assert {
        (1, step, lane): data
        for step, lanes in enumerate(batches)
        for lane, data in enumerate(lanes)
        if data
    } == {at: data for at, data in alone.items() if at[0] == 1}


@given(plans(), LANES)
def test_lanes_divide_a_batch_and_do_not_select_its_samples(make, lanes):
    plan, other = make(), make()
    other.lanes = lanes
    assert [list(chain(*step)) for step in lane_batches(plan, 0)] == [
        list(chain(*step)) for step in lane_batches(other, 0)
    ]


@given(SIZES, SIZES, LANES, SEEDS, st.data())
def test_an_order_is_used_as_given(size, batch_size, lanes, seed, data):
    orders = data.draw(
        st.integers(1, 40).flatmap(
            lambda length: st.lists(
                st.lists(st.integers(0, size - 1), min_size=length, max_size=length),
                min_size=3,
                max_size=3,
            )
        )
    )
    plan = OrderedPlan(size, batch_size, lanes, seed, order=orders.__getitem__)
    assert [samples(lane_batches(plan, epoch)) for epoch in range(3)] == orders
    fixed = OrderedPlan(size, batch_size, lanes, seed, order=orders[1])
    assert [samples(lane_batches(fixed, epoch)) for epoch in range(3)] == 3 * [orders[1]]


def drawn(plan, epochs):
    """Return the samples of each epoch: [epochs, samples]."""
    return np.stack([plan.indices(epoch, 0, 0) for epoch in range(epochs)])


def assert_chi_square(counts, expected):
    """Check that counts differ from the expected ones as chance predicts, and not less."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    low, high = chi_square_bounds(counts.size - 1)
    assert low <= statistic <= high


@pytest.mark.long
def test_samples_are_drawn_in_proportion_to_their_weights():
    weights = np.arange(50)
    indices = drawn(WeightedPlan(50, 50, 1, seed=5, order=Weighted(weights)), epochs=4000)
    counts = np.bincount(indices.ravel(), minlength=50)
    assert counts[0] == 0
    assert_chi_square(counts[1:], indices.size * weights[1:] / weights.sum())
    skewed = drawn(WeightedPlan(3, 3, 1, seed=6, order=Weighted([1e-3, 1.0, 0.1])), epochs=100_000)
    assert_chi_square(np.bincount(skewed.ravel()), skewed.size * np.array([0.001, 1, 0.1]) / 1.101)


def test_draws_are_independent_of_those_before_and_of_other_epochs():
    indices = drawn(WeightedPlan(10, 10, 1, seed=1, order=Weighted(np.ones(10))), epochs=20_000)
    for first, second in (
        (indices[:, :-1], indices[:, 1:]),
        (indices[:-1], indices[1:]),
        (indices[:, 0], indices[:, -1]),
    ):
        pairs = np.bincount((first * 10 + second).ravel(), minlength=100)
        assert_chi_square(pairs, np.full(100, pairs.sum() / 100))


def test_uniform_numbers_fill_the_interval():
    numbers = uniform(key(0, "test"), np.arange(10**6))
    assert 0 <= numbers.min() < 1e-5
    assert 1 - 1e-5 < numbers.max() < 1
    assert len(np.unique(numbers)) == 10**6
    assert_chi_square(np.bincount((numbers * 1000).astype(int)), np.full(1000, 1000.0))


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40).filter(any), SEEDS)
def test_only_the_ratios_of_weights_matter_and_zero_is_never_drawn(weights, seed):
    def indices(weights):
        return (
            WeightedPlan(len(weights), 64, 1, seed, order=Weighted(weights))
            .indices(3, 0, 0)
            .tolist()
        )

    chosen = indices(weights)
    assert all(weights[index] for index in chosen)
    assert indices([2.0**400 * weight for weight in weights]) == chosen
    assert indices(np.array(weights)) == indices(torch.tensor(weights, dtype=torch.float64))
    assert indices([0.0, 5e-324, 0.0]) == [1, 1, 1]


def test_a_draw_at_a_boundary_takes_the_next_sample_with_a_weight(monkeypatch):
    at = np.array([0.0, 0.25, 0.5, 1 - 2.0**-53])
    monkeypatch.setattr("samestep.data.orders.uniform", lambda key, positions: at.copy())
    for scale in (1, 0.7, 1e-300):
        weights = scale * np.array([0, 1, 0, 1, 1, 1, 0])
        plan = WeightedPlan(7, 4, 1, seed=0, order=Weighted(weights))
        assert plan.indices(0, 0, 0).tolist() == [1, 3, 4, 5]


def test_weighted_draws_never_change():
    """A run that resumes under another version must get the same samples."""
    plan = WeightedPlan(10_000, 64, 4, seed=7, order=Weighted(np.arange(10_000) % 7))
    assert plan.indices(3, 100, 2)[:5].tolist() == [3089, 2561, 7054, 4170, 4752]


def test_orders_may_be_of_any_type_and_may_change_afterwards():
    given_as = [[2, 0, 2], (2, 0, 2), np.array([2, 0, 2], dtype=np.uint8), torch.tensor([2, 0, 2])]
    for order in [*given_as, torch.tensor([2, 0, 2], dtype=torch.int32), list(given_as[3])]:
        assert OrderedPlan(3, 3, 1, 0, order=order).indices(0, 0, 0).tolist() == [2, 0, 2]
    assert OrderedPlan(9, 9, 1, 0, order=range(0, 9, 4)).indices(5, 0, 0).tolist() == [0, 4, 8]
    order = [0, 1, 2]
    plan = OrderedPlan(3, 3, 1, 0, order=order)
    order.reverse()
    assert plan.indices(0, 0, 0).tolist() == [0, 1, 2]
    assert not plan.indices(0, 0, 0).flags.writeable


def test_global_generators_are_seeded_for_the_epoch_and_restored():
    def order(_):
        return np.roll(np.random.permutation(20), random.randrange(20))[torch.randperm(20).numpy()]

    def epochs(plan):
        return [plan.indices(epoch, 0, 0).tolist() for epoch in range(3)]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    orders = epochs(OrderedPlan(20, 20, 1, 4, order=order))
    assert torch.equal(before, torch.get_rng_state())
    assert len({tuple(epoch) for epoch in orders}) == 3
    torch.manual_seed(2)
    assert epochs(OrderedPlan(20, 20, 1, 4, order=order)) == orders
    assert epochs(OrderedPlan(20, 20, 1, 5, order=order)) != orders


def test_an_order_is_made_once_per_epoch():
    calls = []
    plan = OrderedPlan(8, 2, 2, 0, order=lambda epoch: calls.append(epoch) or range(8))
    for epoch in range(CACHED_EPOCHS):
        lane_batches(plan, epoch)
        plan.describe(epoch)
    assert calls == [0, *range(CACHED_EPOCHS)]  # epoch 0 twice, to see that it stays the same


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 3, 1], r"order must have indices from 0 to 2, got 3 at position 1"),
        ([0, 1, -1], r"order must have indices from 0 to 2, got -1 at position 2"),
        ([], "order is empty; order must be a one-dimensional list, .* with at least one"),
        ([0.0, 1.0], r"order must be .* whole numbers, got list of float64 \[2\]"),
        ([True, False], r"whole numbers, got list of bool \[2\]"),
        ([[0], [1]], r"whole numbers, got list of int64 \[2, 1\]"),
        ([[0], [1, 2]], "whole numbers: .*inhomogeneous"),
        (torch.ones(2, dtype=torch.bfloat16), "whole numbers: .*BFloat16"),
        (iter([0, 1]), "whole numbers, got list_iterator"),
        (lambda _: [0, 9], r"order\(0\) must have indices from 0 to 2, got 9 at position 1"),
        (lambda _: None, r"order\(0\) must be .* whole numbers, got NoneType"),
        ({}.__getitem__, r"order\(0\) failed: KeyError: 0"),
        (
            lambda _: np.random.default_rng().integers(3, size=64),
            r"order\(0\) returned other indices when it was called again; .* of the epoch alone",
        ),
    ],
)
def test_an_unusable_order_is_refused(order, words):
    with pytest.raises(DataError, match=words):
        OrderedPlan(3, 2, 2, 0, order=order)


def test_epochs_have_one_length():
    plan = OrderedPlan(9, 2, 2, 0, order=lambda epoch: range(6 - epoch % 3 // 2))
    assert lane_batches(plan, 1) == lane_batches(plan, 0)
    words = r"order\(2\) has 5 indices and order\(0\) has 6; .* for epoch in range\(run.epoch, "
    with pytest.raises(DataError, match=words):
        plan.indices(2, 0, 0)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, 2], "weights has 2 entries for 3 samples; pass one weight per sample"),
        ([1, -0.5, -2], "weights must be finite .* at least 0, got -0.5 for sample 1"),
        ([1, 0, float("nan")], "weights must be finite .* got nan for sample 2"),
        ([float("inf"), 0, 1], "weights must be finite .* got inf for sample 0"),
        ([0, 0, 0], "weights are all 0; at least one sample needs a larger weight"),
        (["a", "b", "c"], r"weights must be .* of numbers, got list of <U1 \[3\]"),
        (lambda epoch: [1, 1, 1], "weights must be .* of numbers, got function"),
    ],
)
def test_unusable_weights_are_refused(weights, words):
    with pytest.raises(DataError, match=words):
        WeightedPlan(3, 2, 2, 0, order=Weighted(weights))


def test_plans_are_told_apart():
    described = [
        *(
            WeightedPlan(4, 2, 2, 0, order=Weighted(weights))
            for weights in ([1, 1, 1, 1], [1, 1, 1, 2])
        ),
        *(OrderedPlan(4, 2, 2, 0, order=order) for order in ([0, 1], [1, 0], [0, 1, 2])),
    ]
    assert len({str(plan.describe()) for plan in described}) == len(described)
    changing = OrderedPlan(4, 2, 2, 0, order=lambda epoch: [epoch % 4])
    assert changing.describe(1) != changing.describe(2)
    assert changing.describe(1) == changing.describe(5)


def train(epochs=2, **options):
    """Train as a worker; return the number of completed steps."""
    with ss.init(lanes=4) as run:
        model = run.replicate(torch.nn.Linear(3, 10))
        data = torch.utils.data.TensorDataset(torch.ones(12, 3))
        options = {name: make(run) for name, make in options.items()}
        batch_size = None if isinstance(options.get("order"), ss.ByLength) else 4
        for batch in run.batches(data, batch_size, epochs=epochs, **options):
            run.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
        return run.step


DIFFERENT = {
    "orders": {"order": lambda run: [run.rank, 1, 2, 3]},
    "lengths of orders": {"order": lambda run: range(4 + 2 * run.rank)},
    "orders of epoch 1": {"order": lambda run: lambda epoch: [epoch * run.rank, 1, 2, 3]},
    "weights": {"order": lambda run: ss.Weighted([1] * 11 + [run.rank])},
    "lengths": {"order": lambda run: ss.ByLength([2] * 11 + [1 + run.rank], max_tokens=4)},
    "drop_last": {"drop_last": lambda run: run.is_main},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_workers_with_different_plans_are_refused(name):
    options = DIFFERENT[name]
    outcomes = try_workers(lambda: train(**options), 2)
    assert [type(outcome.error) for outcome in outcomes] == [DataError] * 2
    first, second = (str(outcome.error) for outcome in outcomes)
    assert first == second
    epoch = int(name == "orders of epoch 1")
    assert f"different data: the plan of loop 'train' in epoch {epoch} is " in first
    assert f"{name if name in {'weights', 'lengths'} else next(iter(options))}=" in first
    assert " on worker 1 " in first
    assert "weights = run.broadcast(weights)" in first


def test_weights_of_rank_0_are_the_same_on_all_workers():
    def order(run):
        return ss.Weighted(run.broadcast(np.random.default_rng().random(12).tolist()))

    assert run_workers(lambda: train(order=order), 2) == [6, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda values: WeightedPlan(len(values), 256, 4, 0, order=Weighted(values)),
        lambda values: OrderedPlan(len(values), 256, 4, 0, order=values),
    ],
    ids=["weights", "order"],
)
def test_memory_is_8_bytes_per_entry(make):
    values = np.arange(10**6)
    tracemalloc.start()
    try:
        plan = make(values)
        plan.indices(0, plan.steps_per_epoch - 1, 3)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 8e6 <= kept < 8.5e6
    assert peak < 12e6
