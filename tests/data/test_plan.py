from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.orders import ByLength, ShardOrder, Weighted, make_plan
from samestep.data.plan import GroupedPlan, ShuffledPlan
from samestep.errors import ConfigError, DataError

SIZES = st.integers(1, 200)
LANES = st.integers(1, 24)
SEEDS = st.integers(0, 2**63 - 1)


def lane_batches(plan, epoch):
    """Return the sample indices of every lane of every step: [steps][lanes]."""
    return [
        [plan.indices(epoch, step, lane).tolist() for lane in range(plan.lanes)]
        for step in range(plan.steps_per_epoch)
    ]


def samples(batches):
    return [index for step in batches for index in chain(*step)]


def assert_pure(plan, again, batches, epoch):
    """Check that a plan gives the same backwards, twice, and between other epochs."""
    for step in reversed(range(plan.steps_per_epoch)):
        again.indices(epoch + 1, 0, 0)
        for lane in reversed(range(plan.lanes)):
            assert again.indices(epoch, step, lane).tolist() == batches[step][lane]
        assert again.indices_of_step(epoch, step).tolist() == [*chain(*batches[step])]
        assert (
            again.counts(epoch, step)
            == plan.counts(epoch, step)
            == [len(lane) for lane in batches[step]]
        )


@given(
    size=SIZES,
    batch_size=SIZES,
    lanes=LANES,
    seed=SEEDS,
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_every_sample_is_used_once_an_epoch(size, batch_size, lanes, seed, epoch, shuffle):
    plan = ShuffledPlan(size, batch_size, lanes, seed, shuffle=shuffle)
    batches = lane_batches(plan, epoch)
    assert sorted(samples(batches)) == list(range(size))
    assert shuffle or samples(batches) == list(range(size))
    sizes = [sum(map(len, step)) for step in batches]
    assert sizes == [batch_size] * (size // batch_size) + [size % batch_size] * (
        size % batch_size > 0
    )
    for step in batches:
        assert max(map(len, step)) - min(map(len, step)) <= 1
    assert_pure(plan, ShuffledPlan(size, batch_size, lanes, seed, shuffle=shuffle), batches, epoch)


@given(size=SIZES, batch_size=SIZES, lanes=LANES, seed=SEEDS)
def test_batches_do_not_depend_on_the_number_of_lanes(size, batch_size, lanes, seed):
    """Lanes divide a global batch; they do not select its samples."""
    divided, undivided = (
        lane_batches(ShuffledPlan(size, batch_size, n, seed), epoch=3) for n in (lanes, 1)
    )
    assert [list(chain(*step)) for step in divided] == [list(chain(*step)) for step in undivided]


@given(size=SIZES, batch_size=SIZES, lanes=LANES, seed=SEEDS)
def test_drop_last_drops_only_the_short_batch(size, batch_size, lanes, seed):
    if batch_size > size:
        with pytest.raises(
            ConfigError,
            match=f"batch_size={batch_size} with drop_last leaves none of {size} samples",
        ):
            ShuffledPlan(size, batch_size, lanes, seed, drop_last=True)
        return
    dropped, kept = (
        lane_batches(ShuffledPlan(size, batch_size, lanes, seed, drop_last=drop_last), epoch=0)
        for drop_last in (True, False)
    )
    assert dropped == kept[: size // batch_size]


@given(st.data(), SIZES, LANES, SEEDS, st.booleans())
def test_grouped_lane_batches_hold_one_group_and_every_sample_once(
    data, batch_size, lanes, seed, shuffle
):
    labels = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=120))
    plan = GroupedPlan(len(labels), batch_size, lanes, seed, shuffle=shuffle, groups=labels)
    batches = lane_batches(plan, 4)
    assert sorted(samples(batches)) == list(range(len(labels)))
    for step in batches:
        assert 1 <= sum(map(len, step)) <= batch_size
        for lane in step:
            assert len({labels[index] for index in lane}) <= 1
            assert len(lane) <= -(-batch_size // lanes)
    assert_pure(
        plan,
        GroupedPlan(len(labels), batch_size, lanes, seed, shuffle=shuffle, groups=labels),
        batches,
        4,
    )


def test_other_epochs_and_seeds_have_other_orders():
    def orders(make):
        return {
            tuple(samples(lane_batches(make(seed), epoch)))
            for seed in range(10)
            for epoch in range(10)
        }

    assert len(orders(lambda seed: ShuffledPlan(30, 4, 2, seed))) == 100
    assert (
        len(
            orders(
                lambda seed: GroupedPlan(30, 4, 2, seed, groups=[index % 3 for index in range(30)])
            )
        )
        == 100
    )
    assert len(orders(lambda seed: ShuffledPlan(30, 4, 2, seed, shuffle=False))) == 1
    assert (
        len(
            orders(
                lambda seed: GroupedPlan(
                    30, 4, 2, seed, shuffle=False, groups=[index % 3 for index in range(30)]
                )
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("size", "step", "expected"),
    [
        (1000, 2, [202, 825, 531, 561]),
        (10**6, 1953, [470285, 834215, 448720, 747902]),
        (10**9, 1953125, [128724754, 716348057, 44521923, 545959489]),
        (10**12, 1953125000, [869581140230, 332772446937, 391331637911, 170776296713]),
    ],
)
def test_an_order_never_changes(size, step, expected):
    """A run that resumes under another version must get the same order."""
    assert ShuffledPlan(size, 256, 4, seed=7).indices(3, step, 2)[:4].tolist() == expected


def test_a_grouped_order_never_changes():
    plan = GroupedPlan(20_000, 64, 4, seed=7, groups=np.arange(20_000) % 7)
    assert plan.indices(3, 100, 2)[:4].tolist() == [11463, 3476, 4890, 802]


def test_counts_may_be_modified():
    plan = ShuffledPlan(10, 4, 2, 0)
    plan.counts(0, 0).clear()
    assert plan.counts(0, 0) == [2, 2]


def test_a_plan_of_any_size_takes_no_memory():
    plan = ShuffledPlan(10**12, 4096, 8, seed=1)
    indices = np.concatenate(
        [plan.indices(0, step, lane) for step in (0, plan.steps_per_epoch - 1) for lane in range(8)]
    )
    assert len(set(indices.tolist())) == len(indices)
    assert plan.counts(0, 5) == [512] * 8


def test_group_by_accepts_lists_arrays_and_functions():
    labels = [3, 1, 3, 2, 1, 1, 2, 3, 3]
    tensor = torch.tensor(labels)
    given_as = {
        "list": labels,
        "words": ["abcd"[label] for label in labels],
        "tuples": [(label, -label) for label in labels],
        "array": np.array(labels),
        "tensor": tensor,
        "list of tensors": list(tensor),
        "list of numpy integers": list(np.array(labels)),
        "function": labels.__getitem__,
        "function that returns tensors": tensor.__getitem__,
    }
    plans = {
        name: lane_batches(GroupedPlan(len(labels), 4, 2, seed=0, groups=group_by), epoch=0)
        for name, group_by in given_as.items()
    }
    assert plans == dict.fromkeys(given_as, plans["list"])


def test_unusable_arguments_are_rejected():
    for batch_size in (0, -1, True, 2.0, "8"):
        for make in (
            lambda b: ShuffledPlan(10, b, 2, 0),
            lambda b: GroupedPlan(10, b, 2, 0, groups=[0] * 10),
        ):
            with pytest.raises(
                ConfigError,
                match=f"batch_size must be a whole number of at least 1 .*, got {batch_size!r}",
            ):
                make(batch_size)
    with pytest.raises(DataError, match="the data set has no samples"):
        ShuffledPlan(0, 4, 2, 0)
    with pytest.raises(DataError, match="group_by has 3 entries for 4 samples"):
        GroupedPlan(4, 4, 2, 0, groups=[0, 1, 0])
    for useless in (
        [[1], [2], [1], [2]],
        torch.ones(4, 2),
        lambda index: [index],
        lambda index: ([index],),
    ):
        with pytest.raises(
            DataError, match=r"group_by must return hashable values, got .* for sample 0"
        ):
            GroupedPlan(4, 4, 2, 0, groups=useless)


def test_different_plans_have_different_descriptions():
    described = [
        ShuffledPlan(10, 4, 2, 0),
        ShuffledPlan(11, 4, 2, 0),
        ShuffledPlan(10, 5, 2, 0),
        ShuffledPlan(10, 4, 3, 0),
        ShuffledPlan(10, 4, 2, 1),
        ShuffledPlan(10, 4, 2, 0, shuffle=False),
        ShuffledPlan(10, 4, 2, 0, drop_last=True),
        GroupedPlan(10, 4, 2, 0, groups=[0] * 10),
        GroupedPlan(10, 4, 2, 0, groups=[0, 1] * 5),
    ]
    assert len({str(sorted(plan.describe().items())) for plan in described}) == len(described)
    assert ShuffledPlan(10, 4, 2, 0).describe() == described[0].describe()


@st.composite
def any_plans(draw):
    """Return a plan of any kind but mixtures."""
    size, options = draw(st.integers(1, 120)), {"shuffle": draw(st.booleans()), "drop_last": False}
    batch_size = draw(st.integers(1, 40))
    numbers = st.lists(st.integers(1, 9), min_size=size, max_size=size)
    shards = draw(st.lists(st.integers(0, 9), max_size=12))
    shards.append(size + 1 - min(size, sum(shards)))
    kinds = {
        "shuffled": lambda: {"order": None, "drop_last": size >= batch_size},
        "weighted": lambda: {"order": Weighted(draw(numbers)), "shuffle": True},
        "ordered": lambda: {
            "order": draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
        },
        "grouped": lambda: {"group_by": draw(numbers), "order": None},
        "by length": lambda: {
            "order": ByLength(draw(numbers), max_tokens=draw(st.integers(9, 30)))
        },
        "shards": lambda: {"order": ShardOrder(shards, draw(st.integers(1, 4)))},
    }
    kind = draw(st.sampled_from([*kinds]))
    options |= {"group_by": None, **kinds[kind]()}
    size = sum(shards) if kind == "shards" else size
    batch = None if kind == "by length" else batch_size
    return make_plan(size, batch, draw(LANES), draw(SEEDS), **options)


@given(any_plans(), st.integers(0, 9), st.data())
def test_uses_of_samples_are_those_of_the_lanes(plan, epoch, data):
    asked = data.draw(st.lists(st.integers(0, plan.size - 1), unique=True))
    first = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    steps = range(first, data.draw(st.integers(first, plan.steps_per_epoch)))
    expected = [
        [step, lane, sample]
        for step in steps
        for lane in range(plan.lanes)
        for sample in sorted(plan.indices(epoch, step, lane).tolist())
        if sample in asked
    ]
    assert plan.uses(epoch, np.array(asked, dtype=np.int64), steps).tolist() == expected
