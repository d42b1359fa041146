"""Mixtures: shares of every window, rows of every epoch, and what a resume goes on with."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import accumulate, chain

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.data.mixture import Mixture, plan_for
from samestep.data.mixture_plan import KEPT, MixturePlan, shares_of
from samestep.data.orders import ShardOrder
from samestep.errors import DataError
from tests.data.test_own_order import read_by
from tests.data.test_plan import assert_pure

SEEDS = st.integers(0, 2**63 - 1)
LANES = st.integers(7, 12)
WEIGHT = st.one_of(st.integers(0, 9), st.floats(0, 1e300), st.sampled_from([1e-9, 1e-3, 5e-324]))
SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)
EVERY = 40  # steps
TOLERANCE = Fraction(1, 10**9)  # for shares that are rounded to 2**-48


def named(values):
    return {f"source {n}": value for n, value in enumerate(values)}


def plan_of(sizes, batch_size, weights, lanes=8, seed=3, *, shuffle=True):
    """Return a plan that begins, from lists or functions of the step."""
    named_weights = (lambda step: named(weights(step))) if callable(weights) else named(weights)
    plan = MixturePlan(
        named(sizes), batch_size, lanes, seed, weights=named_weights, shuffle=shuffle
    )
    plan.begin({}, 0, 0, plan.steps_per_epoch)
    return plan


def rows_of(plan, steps):
    """Return the rows of each step, as (source, row), without the division into lanes."""
    ends = list(accumulate(plan._sizes))
    at = [divmod(step, plan.steps_per_epoch) for step in steps]
    indices = [np.concatenate([plan.indices(*p, lane) for lane in range(plan.lanes)]) for p in at]
    numbers = [np.searchsorted(ends, step, side="right") for step in indices]
    starts = np.array([0, *ends])
    return [
        list(zip(number.tolist(), (step - starts[number]).tolist(), strict=True))
        for number, step in zip(numbers, indices, strict=True)
    ]


def deviations(plan, weights, sizes, steps):
    """Yield the rows that each source has got at the end of each step, minus its shares."""
    got = owed = [Fraction(0)] * len(sizes)
    for step, rows in enumerate(rows_of(plan, range(steps))):
        values = [Fraction(weight) for weight in weights(step)]
        batch, total = len(rows), sum(values)
        owed = [o + batch * value / total for o, value in zip(owed, values, strict=True)]
        taken = [sum(source == n for source, _ in rows) for n in range(len(sizes))]
        assert not any(n for n, value in zip(taken, values, strict=True) if not value)
        got = [g + n for g, n in zip(got, taken, strict=True)]
        yield [g - o for g, o in zip(got, owed, strict=True)]


@given(st.lists(WEIGHT, min_size=1, max_size=8).filter(any), st.lists(st.integers(1, 40)), SEEDS)
def test_a_source_is_always_within_one_row_of_its_share(weights, batches, seed):
    batches = [*batches, 1] * EVERY  # also batches that grow and shrink
    sizes = [10 + n for n in range(len(weights))]
    plan = plan_of(sizes, batches.__getitem__, weights, seed=seed)
    for by_source in deviations(plan, lambda _: weights, sizes, EVERY):
        assert all(abs(deviation) < 1 + TOLERANCE for deviation in by_source)


@given(st.lists(WEIGHT, min_size=1, max_size=8).filter(any))
def test_shares_that_a_record_has_stay_as_they_are(weights):
    names = [*named(weights)]
    shares = shares_of(named(weights), names, "weights")
    assert shares_of(dict(zip(names, shares, strict=True)), names, "weights") == shares


@given(st.integers(2, 6), st.data())
def test_weights_may_change_in_every_step(count, data):
    positive = st.lists(st.integers(1, 1000), min_size=count, max_size=count)
    weights = data.draw(st.lists(positive, min_size=EVERY, max_size=EVERY))
    batches = data.draw(st.lists(st.integers(1, 9), min_size=EVERY, max_size=EVERY))
    plan = plan_of([9] * count, batches.__getitem__, weights.__getitem__)
    behind = 1 if count <= 3 else sum(Fraction(1, n) for n in range(1, count + 1))
    for by_source in deviations(plan, weights.__getitem__, [9] * count, EVERY):
        assert all(-behind - TOLERANCE < d < 1 + TOLERANCE for d in by_source)


def test_rows_that_are_due_at_once_wait_for_the_next_step():
    # after two steps, two sources are owed more than half of a row each
    weights = [[1.1, 1, 1, 1], [0.001, 1.1, 1, 1], *[[0.001, 0.001, 1, 1]] * 20]
    plan = plan_of([9] * 4, 1, weights.__getitem__)
    by_step = list(deviations(plan, weights.__getitem__, [9] * 4, 22))
    assert min(by_step[2]) < -1  # no plan without the knowledge of later weights avoids it
    assert all(-1.1 < d < 1 for by_source in by_step for d in by_source)


@given(st.data(), st.integers(2, 5), SEEDS)
def test_a_source_without_weight_gives_no_row(data, count, seed):
    lists = st.lists(st.sampled_from([0, 0, 1, 3]), min_size=count, max_size=count).filter(any)
    weights = data.draw(st.lists(lists, min_size=EVERY, max_size=EVERY))
    plan = plan_of([5] * count, 3, weights.__getitem__, seed=seed)
    for step, rows in enumerate(rows_of(plan, range(EVERY))):
        assert len(rows) == 3
        assert all(weights[step][source] for source, _ in rows)


@given(SIZES, st.integers(1, 40), LANES, SEEDS, st.booleans(), st.data())
def test_each_row_is_used_before_any_is_used_again(sizes, batch_size, lanes, seed, shuffle, data):
    weights = data.draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)).filter(any))
    plan = plan_of(sizes, batch_size, weights, lanes, seed, shuffle=shuffle)
    steps = rows_of(plan, range(EVERY))
    assert all(len(rows) == batch_size for rows in steps)
    for source, size in enumerate(sizes):
        used: list[int] = []
        for rows in steps:
            begun, own = len(used), [row for number, row in rows if number == source]
            used += own
            if not shuffle:  # in a step, lanes have them in another order
                in_order = [number % size for number in range(begun, len(used))]
                assert sorted(own) == sorted(in_order)
            counts = np.bincount(used, minlength=size)
            assert counts.max() - counts.min() <= 1
        assert plan.used(EVERY)[f"source {source}"] == (len(used), len(used) / size)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 6), SEEDS)
def test_an_epoch_in_proportion_to_sizes_uses_each_row_once(counts, steps, seed):
    sizes = [count * steps for count in counts]
    plan = plan_of(sizes, sum(counts), sizes, seed=seed)
    assert plan.steps_per_epoch == steps
    epochs = [sorted(chain(*rows_of(plan, range(n * steps, n * steps + steps)))) for n in range(3)]
    everything = [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    assert epochs == [everything] * 3
    assert rows_of(plan, range(steps)) != rows_of(plan, range(steps, 2 * steps)) or max(sizes) < 4


@given(SIZES, st.integers(1, 30), LANES, SEEDS, st.data())
def test_a_step_has_the_same_rows_at_any_number_of_workers_and_lanes(
    sizes, batch_size, lanes, seed, data
):
    assume(sum(sizes) // batch_size < 12)
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))

    def make(lanes=lanes):
        return plan_of(sizes, batch_size, weights, lanes, seed)

    alone = read_by(1, make())
    assert len(list(chain(*alone.values()))) == 2 * make().steps_per_epoch * batch_size
    for workers in (2, 3, 7):
        assert read_by(workers, make()) == alone
    steps = range(2 * make().steps_per_epoch)
    assert rows_of(make(), steps) == rows_of(make(lanes - 5), steps)
    by_step = [
        [make().indices(0, step, lane).tolist() for lane in range(lanes)]
        for step in range(make().steps_per_epoch)
    ]
    assert_pure(make(), make(), by_step, 0)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 8), st.integers(1, 9))
def test_lanes_get_their_share_of_each_source(weights, lanes, rows):
    plan, batch_size = plan_of([50] * len(weights), lanes * rows, weights, lanes), lanes * rows
    for step in range(3):
        taken = plan._take(step).rows
        for lane in range(lanes):
            sources = plan.indices(0, step, lane) // 50
            for source, count in enumerate(taken):
                share = count / batch_size
                most = 2 + len(weights) * share
                assert abs(np.count_nonzero(sources == source) - rows * share) <= most
    halves = plan_of([50, 50], 4 * lanes, [1, 1], lanes)
    assert all(set(halves.indices(0, 0, lane) // 50) == {0, 1} for lane in range(lanes))


@given(SIZES, st.integers(1, 20), st.integers(0, EVERY), SEEDS, st.data())
def test_a_resumed_plan_goes_on_as_if_undisturbed(sizes, batch_size, at, seed, data):
    weights = data.draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)).filter(any))
    limit = data.draw(st.integers(1, EVERY))

    def make(**changed):
        options = {"batch_size": batch_size, "weights": weights, **changed}
        return plan_of(sizes, options["batch_size"], options["weights"], seed=seed)

    whole = make()
    expected = rows_of(whole, range(2 * EVERY))
    whole.begin({}, 0, 0, whole.steps_per_epoch)
    for step in range(at):
        whole.counts(*divmod(step, whole.steps_per_epoch))
        whole.state(step + 1)
    state = json.loads(json.dumps(whole.state(at)))

    resumed = make()
    resumed.begin(state, at, at, resumed.steps_per_epoch)
    assert rows_of(resumed, range(at, 2 * EVERY)) == expected[at:]

    # another limit of epochs renumbers steps, but skips none
    resumed.begin(state, at, 5 * limit, limit)
    batches = [np.concatenate([resumed.indices(5, 0, lane) for lane in range(8)])]
    whole.begin(state, at, at, whole.steps_per_epoch)
    place = divmod(at, whole.steps_per_epoch)
    assert batches[0].tolist() == list(
        chain(*(whole.indices(*place, lane).tolist() for lane in range(8)))
    )

    # other weights and batches go on with the next rows of each source
    changed = make(batch_size=lambda step: 1 + step % 3, weights=lambda step: [1] * len(sizes))
    changed.resume(state)
    changed.begin(state, at, at, changed.steps_per_epoch)
    assert changed.steps_per_epoch == whole.steps_per_epoch  # that the run has begun with
    used = list(chain(*expected[:at], *rows_of(changed, range(at, at + EVERY))))
    for source, size in enumerate(sizes):
        counts = np.bincount([row for number, row in used if number == source], minlength=size)
        assert counts.max() - counts.min() <= 1


def test_recent_steps_can_be_read_again_and_later_ones_ahead():
    plan = plan_of([100, 50], 8, [2, 1])
    ahead = [plan.indices(*divmod(step, 18), 0).tolist() for step in range(300)]
    for step in range(200):
        plan.state(step + 1)
    assert len(plan._given) == 300 + 1 - (200 - KEPT)
    for step in (150, 299, 136, 200):
        assert plan.indices(*divmod(step, 18), 0).tolist() == ahead[step]


def test_sources_may_come_go_and_return():
    both = plan_of([10, 4], 3, [1, 1], shuffle=False)
    rows_of(both, range(4))
    state = both.state(4)
    one = MixturePlan({"source 1": 4}, 3, 8, 3, weights={"source 1": 1}, shuffle=False)
    one.begin(state, 4, 4, 4)
    assert np.concatenate([one.indices(1, 0, lane) for lane in range(8)]).tolist() == [2, 3, 0]
    state = one.state(5)
    assert {name: source["rows"] for name, source in state["sources"].items()} == {
        "source 0": 6,
        "source 1": 9,
    }
    three = plan_of([10, 4, 5], 3, [1, 1, 1], shuffle=False)
    three.begin(state, 5, 5, 4)
    assert sorted(rows_of(three, [5])[0]) == [(0, 6), (1, 1), (2, 0)]


def test_a_source_that_changed_is_refused():
    plan = plan_of([10, 4], 3, [1, 1])
    rows_of(plan, range(2))
    for sizes, shuffle, words in (
        ([10, 5], True, "source 'source 1' had size=4 in the snapshot and has size=5 now"),
        (
            [10, 4],
            False,
            "source 'source 0' had shuffle=True in the snapshot and has shuffle=False",
        ),
    ):
        with pytest.raises(DataError, match=words):
            plan_of(sizes, 3, [1, 1], shuffle=shuffle).begin(plan.state(2), 2, 2, 4)


def test_a_mixture_never_changes():
    plan = plan_of([5, 10**9, 40], 10, [0.1, 0.6, 0.3], lanes=2, seed=1)
    assert [plan.indices(0, step, 1).tolist() for step in (0, 7)] == [
        [580149765, 1000000027, 687090160, 493401204, 0],
        [1000000044, 901323001, 722508779, 4, 1000000040],
    ]


class Rows:
    """Rows that know their source, with and without `__getitems__`."""

    def __init__(self, size, name, *, wrap=lambda row: row):
        self.size, self.name, self.wrap = size, name, wrap

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        return self.wrap({"row": row, "name": self.name})

    def describe(self, row):
        return f"{self.name}-{row}.txt"


class Together(Rows):
    calls = 0

    def __getitems__(self, rows):
        self.calls += 1
        return [self[row] for row in rows]


def test_rows_are_numbered_one_source_after_the_other():
    together = Together(3, "b")
    mixture = Mixture({"a": Rows(2, "a"), "b": together, "c": torch.arange(4)})
    assert len(mixture) == 9
    assert mixture[1] == {"row": 1, "name": "a", "source": 0}
    samples = mixture.__getitems__([4, 0, 8, 2])
    assert samples[:2] == [
        {"row": 2, "name": "b", "source": 1},
        {"row": 0, "name": "a", "source": 0},
    ]
    assert samples[2] == torch.tensor(3)  # not a dict
    assert samples[3]["row"] == 0
    assert together.calls == 1
    assert [mixture.describe(index) for index in (1, 3, 8)] == ["a 1 a-1.txt", "b 1 b-1.txt", "c 3"]
    assert Mixture({"a": Rows(2, "a", wrap=lambda row: None)})[1] is None


def test_an_entry_source_is_not_overwritten():
    mixture = Mixture({"a": Rows(2, "a", wrap=lambda row: {"source": "web"})})
    with pytest.raises(DataError, match="samples of source 'a' have an entry 'source'"):
        mixture[0]


def test_an_error_names_the_source_and_its_rows():
    mixture = Mixture({"a": Rows(2, "a"), "b": Rows(9, "b", wrap=lambda row: row["missing"])})
    with pytest.raises(DataError, match=r"cannot load rows \[1, 0\] of source 'b': KeyError: 'mi"):
        mixture.__getitems__([3, 0, 2])


A, B = TensorDataset(torch.arange(5)), TensorDataset(torch.arange(7))
EQUAL = {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        ({}, {"weights": {}}, DataError, "the dict of data sets is empty"),
        ({"a": A, "b": []}, {"weights": EQUAL}, DataError, "source 'b' has no samples"),
        ({"a": A, "b": 3}, {"weights": EQUAL}, DataError, "source 'b': dataset must have __len__"),
        ({"a": A, "b": "p"}, {"weights": EQUAL}, DataError, "source 'b' .* instead of paths"),
        ({"a": A, "b": {"c": A}}, {"weights": EQUAL}, DataError, "source 'b': expected .* a dict"),
        ({0: A, 1: B}, {"weights": {0: 1, 1: 1}}, DataError, "a source must be a text, got 0"),
        ({"a": A, "b": B}, {}, ss.ConfigError, "a dict of data sets is a mixture, which needs wei"),
        ({"a": A, "b": B}, {"weights": [1, 2]}, ss.ConfigError, "each of a, b, got list"),
        ({"a": A, "b": B}, {"weights": {"a": 1}}, ss.ConfigError, "it misses 'b'"),
        (
            {"a": A, "b": B},
            {"weights": {**EQUAL, "c": 1}},
            ss.ConfigError,
            "weights must be a dict with a number for each of a, b; it has no data set for 'c'",
        ),
        ({"a": A, "b": B}, {"weights": {"a": 1, "b": -1}}, ss.ConfigError, "got -1.0 for 'b'"),
        ({"a": A, "b": B}, {"weights": {"a": float("nan"), "b": 1}}, ss.ConfigError, "got nan for"),
        ({"a": A, "b": B}, {"weights": {"a": "x", "b": 1}}, ss.ConfigError, "got str for 'a'"),
        ({"a": A, "b": B}, {"weights": {"a": 0, "b": 0}}, ss.ConfigError, "weights are all 0"),
        (
            {"a": A, "b": B},
            {"weights": lambda step: {"a": step - 1, "b": 1}},
            ss.ConfigError,
            r"weights\(0\) must be finite numbers of at least 0, got -1.0 for 'a'",
        ),
        (
            {"a": A, "b": B},
            {"weights": lambda step: {}[step]},
            ss.ConfigError,
            r"weights\(0\) failed: KeyError: 0",
        ),
        (A, {"weights": [1, 2]}, ss.ConfigError, r"write order=ss\.Weighted\(weights\)"),
        (
            {"a": A, "b": B},
            {"weights": EQUAL, "drop_last": True},
            ss.ConfigError,
            "drop_last cannot be used with a dict of data sets, because each step is full",
        ),
        (
            {"a": A, "b": B},
            {"weights": EQUAL, "order": ShardOrder([12])},
            ss.ConfigError,
            "order cannot be used with a dict of data sets",
        ),
        (
            {"a": A, "b": B},
            {"weights": EQUAL, "group_by": [0] * 12},
            ss.ConfigError,
            "group_by cannot be used with a dict of data sets",
        ),
        (
            A,
            {"batch_size": lambda step: 4, "order": [1, 2]},
            ss.ConfigError,
            "order cannot be used with a function as batch_size",
        ),
        (
            A,
            {"batch_size": lambda step: 4.0},
            ss.ConfigError,
            r"batch_size\(0\) must be a whole nu",
        ),
        (A, {"batch_size": lambda step: 0}, ss.ConfigError, r"batch_size\(0\) .* got 0"),
        ([], {"batch_size": lambda step: 4}, DataError, "the data set has no samples"),
        ({"a": A, "b": B}, {"weights": EQUAL, "batch_size": None}, ss.ConfigError, "needs batch_s"),
        (
            {"a": A, "b": B},
            {"weights": EQUAL, "batch_size": 0},
            ss.ConfigError,
            "batch_size must b",
        ),
    ],
)
def test_what_is_unusable_is_refused(dataset, options, error, words):
    usual = {"batch_size": 4, "weights": None, "shuffle": True, "drop_last": False}
    usual |= {"group_by": None, "order": None, "name": "train", **options}
    with pytest.raises(error, match=words):
        plan_for(dataset, lanes=2, seed=1, **usual)[1].counts(0, 0)


def test_functions_depend_on_the_step_alone():
    calls = iter(range(100))
    plan = plan_of([9, 9], 2, lambda step: [1, 1 + next(calls)])
    with pytest.raises(DataError, match=r"weights\(0\) returned another value when it was called"):
        plan.counts(0, 0)
    size = [4]
    plan = plan_of([9, 9], lambda step: size[0], [1, 1])
    plan.counts(0, 0)
    plan.state(1)
    plan.counts(0, 1)
    size[0] = 5  # as by what the script has seen in the step
    with pytest.raises(DataError, match=r"batch_size\(1\) returned another value"):
        plan.state(2)


def test_a_function_is_called_for_the_steps_that_there_are():
    called = []
    plan = plan_of([100, 100], 10, lambda step: called.append(step) or [1, 1])
    for step in range(5):
        plan.counts(0, step)
        plan.state(step + 1)
    assert sorted(set(called)) == [0, 1, 2, 3, 4]


def test_workers_compare_what_may_differ():
    plan = plan_of([10, 4], 3, [1, 3], shuffle=False)
    assert plan.compared(0, 1) == {
        **plan.describe(),
        "batch_size": 3,
        "sources": "source 0 (10 rows, 1 used, 0 now, share 0.25),"
        " source 1 (4 rows, 2 used, 3 now, share 0.75)",
    }
