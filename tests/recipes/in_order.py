"""The samples and random numbers of a one-lane run, for a script that knows nothing of samestep."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import samestep as ss
from samestep.data.batch import LaneStream
from samestep.data.random_state import key, set_generators
from tests.jobs import fingerprint

patch.object(tqdm, "monitor_interval", 0).start()  # or it would leave a thread behind


class Epochs:
    """A shuffling loader that yields an epoch of a run's batches each time.

    They are used under the random numbers of their steps.
    """

    def __init__(self, run, dataset, batch_size, **options):
        self.run, self.dataset, self.batch_size, self.options = run, dataset, batch_size, options

    def __iter__(self):
        for batch in self.run.batches(self.dataset, self.batch_size, **self.options):
            (samples,) = batch
            set_generators(key(self.run.config.seed, "lane", self.run.step, 0, 0))
            yield samples


@contextmanager
def in_order(script, seed=0, **options):
    """Let `script.DataLoader` shuffle as a run does; `options` are more of `run.batches`."""

    def loader(dataset, batch_size=1, *, shuffle=False, num_workers=0, **loader_options):
        if shuffle:
            return Epochs(
                run, dataset, batch_size, loader_workers=num_workers, **loader_options, **options
            )
        return DataLoader(dataset, batch_size, num_workers=num_workers, **loader_options)

    with ss.init(lanes=1, seed=seed) as run, patch.object(script, "DataLoader", loader):
        yield


@contextmanager
def keyed_lane(script, seed=0):
    """Let the items of `script.Lane` be drawn as those of a run's stream of games are."""
    make = script.Lane
    with patch.object(
        script,
        "Lane",
        lambda *arguments, **named: LaneStream(
            lambda _: make(*arguments, **named), "games", 0, seed
        ),
    ):
        yield


def left_in_checkpoint(directory):
    """Return a hash by name of all that a plain script saved, besides how far it was."""
    state = torch.load(directory / "checkpoint.pt", weights_only=True)
    return fingerprint({name: value for name, value in state.items() if name != "done"})
