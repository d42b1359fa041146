"""Private generators of data sets and transforms are found, and seeded like the global ones."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import deque

import numpy as np
import pytest
import torch

from samestep.data.batch import LaneStream
from samestep.data.generators import OBSERVED, ForeignGenerators, can_seed, find
from samestep.data.loader import Request, load
from samestep.data.search import MOST_ENTRIES

NOISE = np.random.default_rng(0)


class Randomizable:
    """MONAI's protocol: one generator of the class until `set_random_state` makes an own one."""

    R = np.random.RandomState(0)

    def set_random_state(self, seed=None):
        self.R = np.random.RandomState(seed)

    def __call__(self):
        return self.R.rand()


class Compose:
    """albumentations' protocol: transforms share the two generators of the composition."""

    def __init__(self, *transforms):
        self.transforms = transforms
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)
        for transform in self.transforms:
            transform.set_random_state(self.random_generator, self.py_random)

    def __call__(self):
        return [transform() for transform in self.transforms]


class Flip:
    def set_random_state(self, random_generator, py_random):
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self):
        return self.random_generator.random(), self.py_random.random()


class Native:
    """Draws from a list of numbers, like an extension in C, and has a method that seeds it."""

    def set_random_seed(self, seed):
        self.numbers = iter([seed])

    def __call__(self):
        return next(self.numbers)


class Slots:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = random.Random()

    def __call__(self):
        return self.rng.random()


class Lazy:
    rng = None

    def __call__(self):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return self.rng.random()


class Torch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self):
        return torch.rand(2, generator=self.generator).tolist()


class Philox:
    def __init__(self):
        self.bits = np.random.Philox()
        self.rng = np.random.Generator(self.bits)

    def __call__(self):
        return self.rng.standard_normal()


def draws_from_a_global():
    return NOISE.random()


def closure():
    rng = random.Random()
    return lambda: 1 - rng.random()


TRANSFORMS = {
    "MONAI's protocol": Randomizable,
    "albumentations' protocol": lambda: Compose(Flip(), Flip()),
    "only a method": Native,
    "slots": Slots,
    "created by the first draw": Lazy,
    "a torch module": lambda: torch.nn.Sequential(Torch())[0],
    "a bit generator": Philox,
    "a bound method": lambda: random.Random().random,
    "a closure": closure,
    "a global": lambda: draws_from_a_global,
    "a partial": lambda: functools.partial(random.Random().uniform, 0, 1),
}


class Data:
    """Applies transforms, kept in several containers, to 8 samples."""

    def __init__(self, transform):
        self.steps = {"first": [(deque([transform]),)]}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.steps["first"][0][0][0]()


def loaded(dataset, keys, collate_fn=None, loader_workers=0):
    """Return the values of one sample for each key, drawn in order."""
    requests = [Request("here", [0], key) for key in keys]
    batches = load(
        dataset,
        requests,
        collate_fn=collate_fn or (lambda samples: samples),
        loader_workers=loader_workers,
        pin_memory=False,
    )
    return dict(zip(keys, batches, strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_draw_depends_on_its_key_only(transform):
    forward = loaded(Data(TRANSFORMS[transform]()), [1, 2, 3])
    backward = loaded(Data(TRANSFORMS[transform]()), [3, 1])
    assert len({repr(value) for value in forward.values()}) == 3
    assert backward == {key: forward[key] for key in (3, 1)}


def test_generators_of_collate_fn_and_loader_processes_are_seeded():
    def collate(samples):
        return [*samples, rng.random()]

    rng = np.random.default_rng()
    in_worker, in_loaders = (loaded(Data(Compose(Flip())), [1, 2, 3], collate, n) for n in (0, 2))
    assert in_worker == in_loaders


def test_generators_get_different_seeds_and_their_states_back():
    pair = [np.random.default_rng(3), np.random.default_rng(3)]
    foreign = ForeignGenerators(dataset=pair)
    first, second = foreign.draw(7, lambda: [rng.random() for rng in pair])
    assert first != second
    expected = np.random.default_rng(3).random()
    assert [rng.random() for rng in pair] == [expected, expected]


def test_global_generators_are_not_found():
    class Data:
        shared = random.random.__self__
        numpy = np.random.rand.__self__
        torch = torch.default_generator

        def __getitem__(self, index):
            return random.random() + np.random.rand() + torch.rand(())

    assert find(dataset=Data(), collate_fn=random.shuffle) == []


def test_names_say_where_generators_are():
    dataset = Data(Compose(Flip()))
    names = [place.name for place in find(dataset=dataset)]
    path = "dataset.steps['first'][0][0][0]"
    assert names[:2] == [f"{path}.random_generator", f"{path}.py_random"]
    assert [place.name for place in find(fn=draws_from_a_global)] == [f"{__name__}.NOISE"]
    assert [place.name for place in find(fn=closure())] == ["fn: rng"]


def test_a_large_data_set_is_not_searched_to_its_end():
    files = [random.Random() for _ in range(2 * MOST_ENTRIES)]
    assert len(find(dataset=files)) == MOST_ENTRIES
    nested = [[[number] for number in range(200)] for _ in range(200)]
    nested.append(random.Random())
    assert [place.name for place in find(dataset={"a": nested, "rng": random.Random()})] == [
        "dataset['rng']",
        "dataset['a'][200]",
    ]
    nested[200] = [[[[random.Random()]]]]
    assert len(find(dataset=nested)) == 0


def test_generators_of_the_system_cannot_be_seeded():
    assert not can_seed(random.SystemRandom())
    assert not can_seed(np.random.RandomState(np.random.PCG64()))
    assert can_seed(np.random.Generator(np.random.SFC64()))


def test_verify_hears_of_generators_that_cannot_be_seeded(tmp_path, monkeypatch):
    monkeypatch.setenv(OBSERVED, str(tmp_path))

    def shuffled(lane):  # as webdataset.shuffle
        rng = random.Random(lane)
        while True:
            yield rng.random()

    next(LaneStream(shuffled, "train", 0, seed=1))
    loaded(Data(random.SystemRandom().random), [1])
    (file,) = tmp_path.iterdir()
    entries = map(json.loads, file.read_text().splitlines())
    assert list(dict.fromkeys(each["name"] for each in entries if each["kind"] == "unseeded")) == [
        "stream: rng",
        "dataset.steps['first'][0][0][0]",
    ]


def test_a_stream_draws_by_its_position():
    def shuffled(lane):
        def shuffle(numbers, rng):
            while True:
                yield next(numbers) + rng.random()

        return map(float, shuffle(itertools.count(100 * lane), shared))

    shared = random.Random()
    streams = [LaneStream(shuffled, "train", lane, seed=1) for lane in (0, 1)]
    together = [[next(stream) for stream in streams] for _ in range(3)]
    alone = LaneStream(shuffled, "train", 1, seed=1)
    assert [next(alone) for _ in range(3)] == [items[1] for items in together]
