"""Random generators of other code, found in data sets and transforms, and seeded by samestep."""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from samestep.data.random_state import key, keyed, set_generators
from samestep.data.search import KINDS, Reference, walk

T = TypeVar("T")

OBSERVED: Final = "SAMESTEP_INTERNAL_OBSERVED"  # folder for observations; set by samestep verify
_METHODS: Final = ("set_random_seed", "set_random_state")  # of albumentations, MONAI


class ForeignGenerators:
    """The generators that the `roots` reach: found at the first draw, and seeded for each draw.

    Each gets a separate seed, made from the draw's key and the generator's name.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._references: list[Reference] | None = None

    def draw(self, value: int, fn: Callable[[], T], *, repeatable: bool = True) -> T:
        """Return `fn()` with all generators seeded by `value`, then restore their states.

        If the first call creates generators, it is repeated with these seeded.
        """
        with keyed(value):
            is_first = self._references is None
            if is_first:
                self._references = find(**self._roots)
            with self._seeded(value):
                result = fn()
            created = self._search_again() if is_first else []
            if created and repeatable:
                set_generators(value)
                with self._seeded(value):
                    return fn()
            for name in created:
                observe(kind="unseeded", name=name)
            return result

    def _search_again(self) -> list[str]:
        """Return the names of the generators that the first draw created."""
        before = {reference.name for reference in self._references or ()}
        self._references = find(**self._roots)
        return [reference.name for reference in self._references if reference.name not in before]

    @contextmanager
    def _seeded(self, value: int) -> Iterator[None]:
        if not self._references:
            yield
            return
        states: dict[int, tuple[Any, Any]] = {}
        try:
            for reference in self._references:
                generator = reference.value()
                if generator is None or id(generator) in states:
                    continue
                if not isinstance(generator, KINDS):
                    states[id(generator)] = generator, None
                    method = seed_method(generator)
                    if method is not None:
                        method(key(value, reference.name) % 2**32)
                elif can_seed(generator):
                    states[id(generator)] = generator, get_state(generator)
                    seed(generator, key(value, reference.name))
                else:
                    observe(kind="unseeded", name=reference.name)
            yield
        finally:
            for generator, state in states.values():
                if state is not None:
                    set_state(generator, state)


def find(**roots: Any) -> list[Reference]:
    """Return references to all generators, and to objects with a method that seeds them.

    The global generators of Python, NumPy and torch are left out. A generator may have several
    references, because any of them may get another generator later.
    """
    return [
        match.reference
        for match in walk(**roots)
        if isinstance(match.value, KINDS)
        or (
            seed_method(match.value) and not any(isinstance(part, KINDS) for _, part in match.parts)
        )
    ]


def seed(generator: Any, value: int) -> None:
    """Seed a generator with 63 bits."""
    if isinstance(generator, random.Random):
        generator.seed(value)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif not isinstance(generator, np.random.RandomState):
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(value).state
    else:
        generator.seed(value % 2**32)


def get_state(generator: Any) -> Any:
    """Return the state of a generator, for `set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def set_state(generator: Any, state: Any) -> None:
    """Restore a state that `get_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def can_seed(generator: Any) -> bool:
    """Return whether `seed` supports a generator: not the system's, nor one of another library."""
    if isinstance(generator, random.Random):
        return not isinstance(generator, random.SystemRandom)
    if isinstance(generator, torch.Generator):
        return True
    if isinstance(generator, np.random.RandomState):
        return bool(generator.get_state(legacy=False)["bit_generator"] == "MT19937")
    bits = getattr(generator, "bit_generator", generator)
    return type(bits).__module__.startswith("numpy.")


def seed_method(value: Any) -> Callable[[int], Any] | None:
    """Return the method of an object that seeds its generators, None if it has none."""
    for name in _METHODS:
        if callable(getattr(type(value), name, None)):
            method: Callable[[int], Any] = getattr(value, name)
            try:
                first = next(iter(inspect.signature(method).parameters), None)
            except (TypeError, ValueError):
                continue
            if first == "seed":
                return method
    return None


def is_observed() -> bool:
    """Return whether `samestep verify` runs the script."""
    return OBSERVED in os.environ


def observe(**observation: Any) -> None:
    """Record what may explain a difference, if `samestep verify` runs the script."""
    if folder := os.environ.get(OBSERVED):
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(observation) + "\n")
