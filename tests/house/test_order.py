from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.order import group_of, seconds_of_groups, slow_ones_first


def test_tests_on_simulated_gpus_stay_together():
    assert group_of("tests/gpu/test_waits.py::test_a[1::2]") == "tests/gpu"
    assert group_of("tests/gpu/test_objects.py::test_b") == "tests/gpu"
    assert group_of("tests/run/test_log.py::test_c") == "tests/run/test_log.py"


def test_each_slow_test_has_a_group():
    assert "tests/gpu" in seconds_of_groups()
    assert min(seconds_of_groups().values()) > 0


def test_slow_groups_begin_the_shares_of_all_processes():
    groups = {"a": [1, 2], "slow": [3], "b": [4, 5], "slower": [6, 7], "c": [8], "slowest": [9]}
    seconds = {"slow": 2.0, "slower": 3.0, "slowest": 9.0}
    assert slow_ones_first(groups, seconds, 2) == [9, 1, 2, 4, 6, 7, 3, 5, 8]
    assert slow_ones_first(groups, seconds, 1) == [9, 6, 7, 3, 1, 2, 4, 5, 8]


@given(
    st.dictionaries(st.integers(0, 20), st.integers(1, 5)), st.sets(st.integers(0, 20)), st.data()
)
def test_no_test_is_lost_and_none_leaves_its_group(sizes, slow, data):
    groups = {group: [(group, n) for n in range(size)] for group, size in sizes.items()}
    processes = data.draw(st.integers(1, 5))
    ordered = slow_ones_first(groups, dict.fromkeys(slow, 1.0), processes)
    assert sorted(ordered) == sorted(test for tests in groups.values() for test in tests)
    for group, tests in groups.items():
        start = ordered.index(tests[0])
        assert group not in slow or ordered[start : start + len(tests)] == tests
