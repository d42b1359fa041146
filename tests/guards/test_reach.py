"""Searches of what lanes reach are spread over calls, and still find everything."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from samestep.data.search import Search
from samestep.guards import reach as module
from samestep.guards.reach import Reach
from samestep.step.lane_pass import LossSpec


def deep(layers=100):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def loss_fn(model, batch):
    return model(batch).mean()


def counted(monkeypatch):
    """Return a list of the objects that searches have found."""
    found, original = [], Search.__next__

    def note(search):
        found.append(original(search))
        return found[-1]

    monkeypatch.setattr(Search, "__next__", note)
    return found


def begin(reach, model, function=loss_fn, step=1):
    reach.begin(SimpleNamespace(loss=LossSpec(function, model), seed=(step, 0)))
    try:
        return reach.marks(), reach.is_watched
    finally:
        reach.report()


def test_only_the_first_call_searches_to_the_end(monkeypatch):
    found, model = counted(monkeypatch), deep()
    reach = Reach([model], None)
    (marks, _) = begin(reach, model)
    assert len(marks.tensors) == 200
    assert len(found) > 200  # two of each module
    for _ in range(50):
        found.clear()
        begin(reach, model)
        assert len(found) <= module.MOST_OBJECTS
    found.clear()
    begin(reach, model)  # nothing has told that there may be more
    assert not found


def test_a_new_loss_function_is_searched_at_once_but_not_its_model_again(monkeypatch):
    found, model, state = counted(monkeypatch), deep(), torch.zeros(1)
    reach = Reach([model], None)
    for _ in range(40):
        begin(reach, model)
    found.clear()
    marks, is_watched = begin(reach, model, lambda model, batch: model(batch).mean() + state)
    assert any(tensor is state for tensor in marks.tensors)
    assert is_watched
    assert len(found) < 50


def test_state_that_appears_anywhere_is_found_within_a_bounded_number_of_calls():
    model = deep()
    reach = Reach([model], None)
    for number in range(20):
        begin(reach, model)
        if number == 12:
            model[99].state = torch.zeros(1)
    calls = 0
    while not any(tensor is model[99].state for tensor in begin(reach, model)[0].tensors):
        calls += 1
        assert calls < 32


def test_bits_of_all_tensors_are_compared_in_a_few_calls(monkeypatch):
    model = deep()
    reach = Reach([model], None)
    marks, _ = begin(reach, model)
    assert len(marks.hashed) == 200
    hashed = [begin(reach, model)[0].hashed for _ in range(16)]
    assert max(map(len, hashed)) <= 16
    assert {id(tensor) for part in hashed for tensor in part} == set(map(id, marks.tensors))
