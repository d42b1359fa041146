"""Random numbers that one worker draws alone in the body of a loop are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import DataError
from tests.jobs import fingerprint
from tests.run.test_stages import EXAMPLES, loss_fn
from tests.workers import run_workers, try_workers

DRAWS = {
    "torch": lambda: torch.randn(3),
    "random": random.random,
    "numpy.random": np.random.rand,
    "a permutation": lambda: torch.randperm(4),
    "a shuffle": lambda: random.shuffle([1, 2, 3]),
    "a normal": np.random.standard_normal,
}
PLACES = ["end of the body", "between loops"]
GENERATORS = {
    "a permutation": "torch",
    "a shuffle": "random",
    "a normal": r"numpy\.random",
    "numpy.random": r"numpy\.random",
}


def train(preview, *, place="body", who=0):
    """Train with noise that the body draws; one worker draws in addition."""
    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def draw(here):
            if run.rank == who and here == place and run.step in (1, 3):
                preview()

        for _ in range(2):
            for batch in run.batches(EXAMPLES, 4, epochs=2):
                draw("body")
                noise = torch.rand(()).item() + random.random() + np.random.rand()
                for lane_batch in batch.lanes(model):
                    batch.backward(noise * loss_fn(model, lane_batch))
                optimizer.step()
                optimizer.zero_grad()
                draw("end of the body")
            draw("between loops")
        return fingerprint(model)


@pytest.mark.parametrize(("name", "who"), [*zip(DRAWS, [0, 1] * 3, strict=True)])
def test_a_draw_of_one_worker_is_refused(name, who):
    generator = GENERATORS.get(name, name)
    outcomes = try_workers(lambda: train(DRAWS[name], who=who), 2)
    message = rf"step 1, worker 1 has drawn other .*{generator} than worker 0"
    for outcome in outcomes:
        with pytest.raises(DataError, match=message):
            raise outcome.error


def test_other_draws_are_not():
    """After the last draw of a body, between loops, and from an own generator."""
    own = torch.Generator().manual_seed(0)

    def draw_all():
        for draw in DRAWS.values():
            draw()

    def trained():
        of_own = train(lambda: torch.randn(3, generator=own))
        return [of_own, *(train(draw_all, place=place) for place in PLACES)]

    undisturbed = train(draw_all, who=None)
    assert run_workers(trained, 2) == [[undisturbed] * 3] * 2
