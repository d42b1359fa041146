"""Values in nested containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samestep.data.nested import mapped, parts_of, tensors_in, values_in

ONE, TWO = torch.ones(1), torch.ones(2)


class Pair(NamedTuple):
    inputs: Any
    labels: Any


@dataclass
class Record:
    image: Any


@dataclass(slots=True)
class Slotted(Record):
    label: Any


def test_tensors_have_the_paths_of_their_containers():
    batch = {"a": [ONE, (TWO, "text")], "b": Pair(Record(TWO), 3)}
    paths = [("a.0", ONE), ("a.1.0", TWO), ("b.inputs.image", TWO)]
    for (path, tensor), (expected, same) in zip(tensors_in(batch), paths, strict=True):
        assert (path, tensor is same) == (expected, True)
    assert [path for path, _ in tensors_in(batch, "/")] == ["a/0", "a/1/0", "b/inputs/image"]
    assert [path for path, _ in tensors_in(ONE)] == [""]
    values = [("", [1, {"a": ()}]), ("0", 1), ("1", {"a": ()}), ("1.a", ())]
    assert [*values_in([1, {"a": ()}])] == values


def test_a_dataclass_with_a_length_is_no_container():
    sized = dataclass(type("Sized", (), {"__annotations__": {"image": Any}, "__len__": len}))
    assert parts_of(Record(1)) == {"image": 1}
    assert parts_of(sized(1)) == parts_of("text") == parts_of(None) == {}


def test_a_dataclass_may_have_slots():
    assert parts_of(Slotted(1, 2)) == {"image": 1, "label": 2}


def test_mapping_keeps_the_containers():
    moved = mapped({"a": Pair([ONE], (TWO, "text"))}, torch.Tensor.numel)
    assert moved == {"a": Pair([1], (2, "text"))}
    assert type(moved["a"]) is Pair
