"""A batch is used before its loop gives the next one; others are refused."""

from __future__ import annotations

from itertools import islice
from queue import Queue
from threading import Thread

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import DataError
from tests.run.test_stages import EXAMPLES, loss_fn


def ahead(loop):
    batches = iter(loop)
    current = next(batches)
    for following in batches:
        yield current
        current = following


def from_a_thread(loop):
    queue = Queue()
    thread = Thread(target=lambda: [queue.put(batch) for batch in loop])
    thread.start()
    thread.join()
    yield from iter(queue.get, None)


def as_a_thread_gives_them(loop):
    queue = Queue(1)
    thread = Thread(target=lambda: [queue.put(batch) for batch in islice(loop, 1)])
    thread.start()
    yield queue.get()
    thread.join()


def pairs(loop):
    batches = iter(loop)
    for first in batches:
        for second in islice(batches, 1):
            yield from (first, second)


def train(wrap, *, inline):
    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in wrap(run.batches(EXAMPLES, 4, epochs=2)):
            if inline:
                for lane_batch in batch.lanes(model):
                    batch.backward(loss_fn(model, lane_batch))
            else:
                run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.tolist()


def reversed_list(loop):
    return reversed(list(loop))


def numbered(loop):
    return (batch for _, batch in enumerate(loop))


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    "wrap", [ahead, list, reversed_list, pairs, from_a_thread, as_a_thread_gives_them]
)
def test_a_batch_whose_step_is_over_is_refused(wrap, inline):
    with pytest.raises(DataError, match=r"not that of the current step.*loader_workers"):
        train(wrap, inline=inline)


@pytest.mark.parametrize("wrap", [iter, numbered])
def test_one_at_a_time_is_accepted(wrap):
    assert train(wrap, inline=True) == train(lambda loop: loop, inline=False)
