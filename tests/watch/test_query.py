from __future__ import annotations

import pytest
from starlette.datastructures import QueryParams

from samestep.watch.query import LONGEST, Query, WrongQueryError


def query(text, *names):
    return Query(QueryParams(text), *names)


def test_what_is_asked_for():
    asked = query("id=a%2Fb&from=-1.5&points=20&x=time", "id", "from", "to", "points", "x")
    assert asked.text("id") == "a/b"
    assert (asked.number("from", None), asked.number("to", None)) == (-1.5, None)
    assert asked.count("points", 5, 100) == 20
    assert query("", "points").count("points", 5, 100) == 5
    assert asked.choice("x", ("step", "time")) == "time"
    assert query("", "x").choice("x", ("step", "time")) == "step"


@pytest.mark.parametrize(
    "text", ["from=nan", "from=inf", "from=1e999", "from=", "from=1,5", "from=2", "from=-1"]
)
def test_no_number_within_bounds(text):
    with pytest.raises(WrongQueryError, match="expected a number from 0 to 1"):
        query(text, "from").number("from", None, 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "points=-1",
        "points=1.5",
        "points=101",
        "points=",
        "points=1e1",
        "points=²",
        "points=" + "9" * 4000,
    ],
)
def test_no_count(text):
    with pytest.raises(WrongQueryError, match="expected a whole number from 0 to 100"):
        query(text, "points").count("points", 5, 100)


def test_other_wrong_queries():
    with pytest.raises(WrongQueryError, match="id is missing"):
        query("", "id").text("id")
    with pytest.raises(WrongQueryError, match="number is missing"):
        query("", "number").count("number", None, 9)
    with pytest.raises(WrongQueryError, match="'path' was given; expected id or name"):
        query("path=x", "id", "name")
    with pytest.raises(WrongQueryError, match="expected none"):
        query("path=x")
    with pytest.raises(WrongQueryError, match="id was given more than once"):
        query("id=a&id=b", "id")
    with pytest.raises(WrongQueryError, match="expected step or time"):
        query("x=value", "x").choice("x", ("step", "time"))
    with pytest.raises(WrongQueryError, match=f"at most {LONGEST}"):
        query(f"id={'x' * (LONGEST + 1)}", "id")


def test_a_refusal_repeats_little_of_what_was_given():
    with pytest.raises(WrongQueryError) as refused:
        query(f"{'<' * 3000}=1")
    assert len(str(refused.value)) < 100
