from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.launch.place import NEEDED, STARTED_BY, VARIABLES, Place, find_place

SECOND_OF_FOUR = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_nothing_set_is_one_worker_alone():
    assert find_place({"HOME": "/root"}) == Place(0, 1, 0, 1, "127.0.0.1", 0, "alone")


@pytest.mark.parametrize(("extra", "started_by"), [({}, "torchrun"), ({STARTED_BY: "samestep"}, "samestep")])
def test_the_place_is_read_as_torchrun_sets_it(extra, started_by):
    assert find_place({**SECOND_OF_FOUR, **extra}) == Place(1, 4, 1, 2, "10.0.0.7", 29500, started_by)


def test_without_local_variables_all_workers_are_on_one_host():
    assert find_place({name: SECOND_OF_FOUR[name] for name in NEEDED}) == Place(1, 4, 1, 4, "10.0.0.7", 29500, "torchrun")


@given(st.sets(st.sampled_from(VARIABLES), min_size=1).filter(lambda names: not names.issuperset(NEEDED)))
def test_a_part_of_the_variables_is_an_error_that_names_those_set_and_those_missing(given_names):
    with pytest.raises(ConfigError, match="unset all to run one worker alone") as caught:
        find_place({name: SECOND_OF_FOUR[name] for name in given_names})
    was_set, _, missing = str(caught.value).split(";")[0].partition(" is set and ")
    assert was_set == ", ".join(f"{name}={SECOND_OF_FOUR[name]}" for name in VARIABLES if name in given_names)
    assert missing == ", ".join(name for name in NEEDED if name not in given_names) + " is not"


@pytest.mark.parametrize("name", [name for name in VARIABLES if name != "MASTER_ADDR"])
@pytest.mark.parametrize("text", ["", "one", "-1", "1.0", " 1", "²"])
def test_what_is_no_number_is_named(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text!r} was given; expected a whole number"):
        find_place({**SECOND_OF_FOUR, name: text})


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "4"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"RANK": "0"},
        {"MASTER_ADDR": ""},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "65536"},
    ],
)
def test_contradictions_are_told_with_all_values(changed):
    (name, value) = next(iter(changed.items()))
    with pytest.raises(ConfigError, match=f"{name}={value}.*contradict"):
        find_place({**SECOND_OF_FOUR, **changed})


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_every_place_of_a_cluster_is_read(hosts, local_workers, data):
    workers = hosts * local_workers
    rank = data.draw(st.integers(0, workers - 1))
    environment = {
        **SECOND_OF_FOUR,
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank % local_workers),
        "LOCAL_WORLD_SIZE": str(local_workers),
    }
    assert find_place(environment) == Place(rank, workers, rank % local_workers, local_workers, "10.0.0.7", 29500, "torchrun")
