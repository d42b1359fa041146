"""Samples that are left out: every other one stays in its step and lane."""

from __future__ import annotations

import json
import re
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.data.agreement import Use
from samestep.data.exclude import Exclusion, indices_of, merged, read_loops, write_loops
from samestep.data.mixture_plan import MixturePlan
from samestep.data.orders import make_plan
from samestep.errors import ConfigError, DataError
from tests.data.test_plan import lane_batches, samples

EPOCH = 3


def plans(size, batch_size, lanes):
    """Return how to make a plan of each kind."""
    options = {"shuffle": True, "drop_last": False, "group_by": None, "order": None}

    def make(**changes):
        length = None if "ByLength" in repr(changes) else batch_size
        return lambda: make_plan(size, length, lanes, 7, **{**options, **changes})

    halves = {"a": (size + 1) // 2, "b": size // 2 or 1}
    return {
        "shuffled": make(),
        "in order": make(shuffle=False),
        "drop last": make(drop_last=batch_size <= size),
        "weighted": make(order=ss.Weighted(np.arange(1, size + 1))),
        "list": make(order=[*range(size), *range(0, size, 3)]),
        "function": make(order=lambda epoch: np.roll(np.arange(size), epoch)),
        "grouped": make(group_by=[index % 3 for index in range(size)]),
        "by length": make(
            order=ss.ByLength([1 + index % 5 for index in range(size)], max_tokens=20)
        ),
        "shards": make(order=ss.ShardOrder([size // 2, size - size // 2], window=1)),
        "mixture": lambda: MixturePlan(
            halves, batch_size, lanes, 7, weights={"a": 2, "b": 1}, shuffle=True
        ),
    }


@given(
    kind=st.sampled_from([*plans(9, 3, 2)]),
    size=st.integers(2, 60),
    batch_size=st.integers(1, 20),
    lanes=st.integers(1, 6),
    data=st.data(),
)
def test_every_other_sample_stays_in_its_step_and_lane(kind, size, batch_size, lanes, data):
    make = plans(size, batch_size, lanes)[kind]
    whole, plan = make(), make()
    for each in (whole, plan):
        if isinstance(each, MixturePlan):
            each.begin({}, 0, 0, each.steps_per_epoch)
    epoch = 0 if kind == "mixture" else EPOCH
    before = lane_batches(whole, epoch)
    left_out = data.draw(st.sets(st.integers(0, whole.size - 1), max_size=whole.size - 1))
    plan.exclude(np.array(sorted(left_out), dtype=np.int64))
    if not set(samples(lane_batches(whole, 0))) - left_out:  # a list or weights use no others
        with pytest.raises(DataError, match="all samples that an epoch uses"):
            plan.check_left()
        return
    plan.check_left()
    assert plan.steps_per_epoch == whole.steps_per_epoch
    expected = [[[i for i in lane if i not in left_out] for lane in step] for step in before]
    assert lane_batches(plan, epoch) == expected
    counts = [plan.counts(epoch, step) for step in range(plan.steps_per_epoch)]
    assert counts == [[*map(len, step)] for step in expected]
    assert (plan.describe(epoch) == whole.describe(epoch)) == (not left_out)


def test_files_of_each_kind_have_the_same_indices(tmp_path):
    text, listed, loops, array = (
        tmp_path / name for name in ("a.txt", "a.json", "b.json", "a.npy")
    )
    text.write_bytes(b"\xef\xbb\xbf7\r\n\r\n3 # broken\r\n  7\n# none\n")  # as on Windows
    listed.write_text("[3, 7, 7]")
    loops.write_text('{"train": [7, 3]}')
    np.save(array, np.array([7, 3], dtype=np.uint8))
    for path in (text, listed, array):
        assert {loop: own.tolist() for loop, own in read_loops(path).items()} == {"": [3, 7]}
        assert indices_of(str(path), 8, {}).tolist() == [3, 7]
    assert read_loops(loops)["train"].tolist() == [3, 7]
    for values in ({3, 7}, (7, 3, 3), torch.tensor([7, 3]), np.array([3, 7], dtype=np.int8)):
        assert indices_of(values, 8, {}).tolist() == [3, 7]
    assert indices_of({"b": [1]}, 8, {"a": 5, "b": 3}).tolist() == [6]
    written = write_loops(tmp_path, merged([read_loops(loops), {"train": [9], "tune": [1]}]))
    assert {loop: own.tolist() for loop, own in read_loops(written).items()} == {
        "train": [3, 7, 9],
        "tune": [1],
    }


@pytest.mark.parametrize("content", ["", "\n# nothing\n"])
def test_nothing_is_left_out_by_an_empty_file(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    assert indices_of(tmp_path / "a.txt", 8, {}).tolist() == []
    assert indices_of([], 8, {}).tolist() == indices_of(set(), 8, {}).tolist() == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"3\nx7\n", r"a.txt, line 2: expected the index .*, got 'x7'"),
        ("a.txt", b"-3", r"line 1: expected the index .* at least 0, got '-3'"),
        ("a.txt", b"3.0", "line 1: .* got '3.0'"),
        ("a.txt", b"3 4", "line 1: .* got '3 4'"),
        ("a.txt", b"9" * 30, "line 1: .* got '9999"),
        ("a.txt", b"\xff\xfe3", "is no .txt file"),
        ("a.json", b"[3,", "is no .json file"),
        ("a.json", b"[" * 100_000, "is no .json file"),
        ("a.json", b"[true]", "one-dimensional .* of indices of samples, got list of bool"),
        ("a.json", b"[[3]]", r"one-dimensional .* got list of int64 \[1, 1\]"),
        ("a.json", b'["3"]', "one-dimensional .* of indices"),
        ("a.json", b"[1e3]", "one-dimensional .* got list of float64"),
        ("a.json", b"3", "one-dimensional .* got int"),
        ("a.json", b'{"train": 3}', "one-dimensional .* got int"),
        ("a.json", b'{"train": {"a": 3}}', "one-dimensional .* got dict"),
        ("a.json", b"[-1]", "must have indices of at least 0, got -1"),
        ("a.npy", b"\x93NUMPY", "is no .npy file"),
        ("a.npy", b"", "is no .npy file"),
    ],
)
def test_files_with_anything_else_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_loops(tmp_path / name)


def test_pickled_arrays_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match=r"is no \.npy file"):
        read_loops(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("exclude", "error", "words"),
    [
        ([8], DataError, "must have indices from 0 to 7, got 8; are they those of another"),
        ([-1], DataError, "at least 0, got -1"),
        ([True] * 8, DataError, "got list of bool"),
        (range(8), DataError, "leaves out all 8 samples"),
        ("missing.txt", ConfigError, "missing.txt cannot be read: No such file"),
        (".", ConfigError, "cannot be read: Is a directory"),
        ({"c": [1]}, ConfigError, "no source 'c' to leave rows out of: a, b"),
        ({"b": [3]}, DataError, r"exclude\['b'\] must have indices from 0 to 2, got 3"),
    ],
)
def test_other_values_are_refused(exclude, error, words):
    with pytest.raises(error, match=words):
        indices_of(exclude, 8, {"a": 5, "b": 3})


def test_a_file_by_loops_is_refused_for_one_loop(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": [1]}))
    with pytest.raises(ConfigError, match="lists by loop, which only the option exclude"):
        indices_of(tmp_path / "a.json", 8, {})


def test_an_epoch_of_which_nothing_is_left_is_refused():
    options = {"shuffle": True, "drop_last": False, "group_by": None}
    plan = make_plan(9, 2, 2, 0, **options, order=[4, 5, 4])
    plan.exclude(np.array([4, 5]))
    with pytest.raises(DataError, match="all samples that an epoch uses, 3 in 2 steps"):
        plan.check_left()


def test_the_option_names_a_loop_if_there_are_several():
    exclusion = Exclusion({"": [3], "tune": [4]})
    assert exclusion.unused == ["tune"]
    assert exclusion.of("train").tolist() == exclusion.of("train").tolist() == [3]
    with pytest.raises(ConfigError, match=re.escape("the loops train, tune leaves out")):
        exclusion.of("tune")
    named = Exclusion({"train": [3]})
    assert (named.of("train").tolist(), named.of("tune").tolist()) == ([3], [])
    assert named.of("text", is_stream=True).tolist() == []
    with pytest.raises(ConfigError, match="stream 'train', whose items have no indices"):
        named.of("train", is_stream=True)


def test_samples_that_are_left_out_are_not_loaded_to_compare_them():
    drawn = {index for number in range(9) for index in Use("loop", 9, 5, 1).indices(number)}
    left_out = np.array(sorted(drawn)[1:])
    use = Use("loop", 9, 5, 1, excluded=left_out)
    kept = {index for number in range(9) for index in use.indices(number)}
    assert kept
    assert not kept & {*left_out.tolist()}


def test_the_first_step_with_a_sample_is_that_of_the_plan():
    plan = plans(30, 4, 2)["shuffled"]()
    batches = [set(chain(*lanes)) for lanes in lane_batches(plan, EPOCH)]
    for index in range(30):
        (step,) = [number for number, batch in enumerate(batches) if index in batch]
        assert plan.first_step_with(np.array([index]), EPOCH, step) is None
        assert plan.first_step_with(np.array([index]), EPOCH, step + 1) == step
    assert plan.first_step_with(np.array([], dtype=np.int64), EPOCH, 8) is None


def test_a_mixture_knows_whether_it_has_given_a_row():
    make = plans(30, 4, 2)["mixture"]
    whole, plan = make(), make()
    whole.begin({}, 0, 0, 7)
    used = set(samples([[whole.indices(0, step, lane) for lane in range(2)] for step in range(5)]))
    plan.begin(whole.state(5), 5, 5, 7)
    said = {n for n in range(30) if plan.first_step_with(np.array([n]), 0, 5) is not None}
    assert said == used
