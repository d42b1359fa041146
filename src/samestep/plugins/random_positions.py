"""Whether all workers have drawn the same random numbers in the body of a loop.

A body begins with the same generators on all workers. What one of them draws alone, such as a
preview on rank 0, shifts all that it draws later in that body.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final
from zlib import crc32

import torch

from samestep.data.random_state import numpy_position
from samestep.errors import DataError
from samestep.plugin import EndedStep, RunPlugin

NAMES: Final = ("Python's random", "numpy.random", "torch")  # then those of GPUs


class RandomPositions(RunPlugin):
    """Compares the positions of the global generators, which are sent with the losses of a step."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device.index for device in devices if device.type == "cuda"]
        self._in_body = False

    def begin_step(self, step: int) -> None:
        """Compare from here on: the body begins."""
        self._in_body = True

    def end_step(self, ended: EndedStep) -> None:
        """Leave draws after a body alone, which no later one sees."""
        self._in_body = False

    def note(self) -> list[int] | None:
        """Return a number for each generator, which tells its position."""
        if not self._in_body:
            return None
        words = random.getstate()[1]
        generators = [torch.default_generator]
        generators += [torch.cuda.default_generators[index] for index in self._gpus]
        positions = [crc32(generator.get_state().numpy().data) for generator in generators]
        return [words[0] ^ words[-1], numpy_position(), *positions]

    def receive(self, step: int, notes: Sequence[list[int] | None]) -> None:
        """Raise `DataError` if the workers' positions differ."""
        first = notes[0] or []
        for rank, other in enumerate(notes):
            pairs = zip(other or (), first, strict=False)
            for number, (position, expected) in enumerate(pairs):
                if position != expected:
                    raise _differ(step, rank, number)


def _differ(step: int, rank: int, number: int) -> DataError:
    gpu = number - len(NAMES)
    name = NAMES[number] if gpu < 0 else f"torch.cuda of device {gpu}"
    return DataError(
        f"in the body of step {step}, worker {rank} has drawn other random numbers from the"
        f" generator of {name} than worker 0, so that all that they draw after it differs. Draw on"
        " all workers alike; what one worker does alone, as behind run.is_main, gets a generator of"
        " its own, such as torch.Generator().manual_seed(0), or follows the last draw of the body"
        " and run.backward"
    )
