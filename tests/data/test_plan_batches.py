from __future__ import annotations

import random
from collections import deque

import pytest

from samestep.comm.base import Alone
from samestep.data.agreement import DataCheck
from samestep.data.loader import plan_batches
from samestep.data.plan import GroupedPlan, ShuffledPlan
from samestep.errors import LoaderError
from samestep.step.layout import lanes_of

# loader processes fork; warned about since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
LANES = 5


class Augmented:
    def __getitem__(self, index):
        return index, random.random()


class Broken:
    def __getitem__(self, index):
        if index == 17:
            raise OSError("truncated")
        return index


def every_step(plan, epochs, start=(0, 0)):
    return [
        (epoch, step)
        for epoch in range(epochs)
        for step in range(plan.steps_per_epoch)
        if (epoch, step) >= start
    ]


def batches_of(plan, lanes, positions, *, dataset=None, loader_workers=0):
    return plan_batches(
        plan,
        dataset or Augmented(),
        lanes,
        lambda: iter(positions),
        DataCheck(0, 0, 1, Alone().all_gather_json),
        "train",
        seed=3,
        collate_fn=list,
        loader_workers=loader_workers,
        pin_memory=False,
    )


def lane_batches(plan, lanes, positions, loader_workers=0):
    """Return the batch of each position and lane."""
    batches = batches_of(plan, lanes, positions, loader_workers=loader_workers)
    return {
        (*position, lane): data
        for position, batch in zip(positions, batches, strict=True)
        for lane, data in batch.lane_batches()
    }


@pytest.mark.parametrize(
    "plan",
    [
        ShuffledPlan(23, 8, LANES, 1),
        ShuffledPlan(3, 2, LANES, 1),
        GroupedPlan(14, 7, LANES, 1, groups=[index % 3 for index in range(14)]),
    ],
    ids=["short last batch", "fewer samples than lanes", "grouped"],
)
@forks
def test_a_lane_batch_does_not_depend_on_workers_loaders_or_the_starting_step(plan):
    positions = every_step(plan, epochs=2)
    expected = lane_batches(plan, range(LANES), positions)
    for epoch in (0, 1):
        used = [
            index
            for (of_epoch, *_), data in expected.items()
            for index, _ in data
            if of_epoch == epoch
        ]
        assert sorted(used) == list(range(plan.size))
    assert len({draw for data in expected.values() for _, draw in data}) == 2 * plan.size
    for loader_workers in (0, 2):
        parts = [
            lane_batches(plan, lanes_of(rank, 3, LANES), positions, loader_workers)
            for rank in range(3)
        ]
        assert {key: data for part in parts for key, data in part.items()} == expected
    for start in positions[1:]:
        rest = lane_batches(
            plan, range(LANES), [position for position in positions if position >= start]
        )
        assert rest == {key: data for key, data in expected.items() if key[:2] >= start}


def test_lanes_not_iterated_do_not_shift_later_batches():
    plan = ShuffledPlan(40, 8, LANES, 1)
    positions = every_step(plan, epochs=1)
    expected = lane_batches(plan, range(LANES), positions)
    for take in range(LANES):
        for (epoch, step), batch in zip(
            positions, batches_of(plan, range(LANES), positions), strict=True
        ):
            assert (batch.epoch, list(batch.counts)) == (epoch, plan.counts(epoch, step))
            lane_data = [data for _, data in zip(range(take), batch, strict=False)]
            assert lane_data == [expected[epoch, step, lane] for lane in range(take)]


@forks
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_error_names_step_lane_and_samples(loader_workers):
    plan = ShuffledPlan(20, 6, 3, 1)
    (where,) = [
        (step, lane)
        for _, step in every_step(plan, 1)
        for lane in range(3)
        if 17 in plan.indices(0, step, lane)
    ]
    indices = ", ".join(map(str, plan.indices(0, *where)))
    position = f"lane {where[1]} of step {where[0]} in epoch 0"
    expected = rf"{position} failed: OSError: truncated\nsample indices \[{indices}\]"
    batches = batches_of(
        plan, range(3), every_step(plan, 1), dataset=Broken(), loader_workers=loader_workers
    )
    with pytest.raises(LoaderError, match=expected):
        deque(map(list, batches))


def test_no_positions_yield_no_batches():
    assert list(batches_of(ShuffledPlan(20, 6, 3, 1), range(3), [])) == []
