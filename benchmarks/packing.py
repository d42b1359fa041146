"""What packing costs: attention within documents against causal attention, and the rows of a file.

usage: python -m benchmarks.packing [--rounds 5] [--length 512] [--steps 10] [--rows 2000]

A step is the forward and backward pass of one block of attention on 4 rows. Rows are read at random
from a mapped file of documents with 64 to 2,000 tokens: as `ss.Packed` makes them, and as two
slices of the tokens without regard to documents. One thread, all variants in turn, after one round
that is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

import samestep as ss
from benchmarks.measure import spread
from benchmarks.turns import in_turn

HEADS, WIDTH, ROWS = 8, 512, 4
VOCABULARY = 50_000


def documents(count: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Yield random documents of 64 to 2,000 tokens, short ones more often."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield random.integers(
            VOCABULARY, size=int(np.exp(random.uniform(np.log(64), np.log(2000))))
        )


def step_seconds(row: dict[str, torch.Tensor], steps: int, *, is_masked: bool) -> float:
    """Return the seconds of a step of attention, within documents or causal."""
    hidden = torch.randn(*row["tokens"].shape, WIDTH)
    layers = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    start = time.perf_counter()
    for _ in range(steps):
        parts = layers[0](hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if is_masked:
            numbers = row["documents"]
            mask = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=not is_masked)
        layers[1](mixed.transpose(1, 2).flatten(2)).square().mean().backward()
    return (time.perf_counter() - start) / steps


def row_seconds(read: Callable[[int], object], numbers: np.ndarray[Any, Any]) -> float:
    """Return the seconds to read a row."""
    start = time.perf_counter()
    for number in numbers.tolist():
        read(number)
    return (time.perf_counter() - start) / len(numbers)


def slices(file: ss.TokenFile, length: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row and its targets, across documents."""
    tokens = torch.from_numpy(file.tokens[number * length :][: length + 1].astype(np.int64))
    return tokens[:-1], tokens[1:]


def main(arguments: list[str] | None = None) -> None:
    """Print the medians of all variants with their range, in milliseconds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    for name, default in {"rounds": 5, "length": 512, "steps": 10, "rows": 2000}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        path = Path(folder, "data.bin")
        file = ss.TokenFile.write(path, documents(2 * options.rows), dtype="uint16")
        packed = ss.Packed(file, length=options.length)
        numbers = np.random.default_rng(1).integers(len(packed) - 1, size=options.rows)
        row = default_collate([packed[number] for number in numbers[:ROWS].tolist()])
        step = partial(step_seconds, row, options.steps)
        variants = {
            "attention within documents, a step": partial(step, is_masked=True),
            "causal attention, a step": partial(step, is_masked=False),
            "a row of Packed": partial(row_seconds, packed.__getitem__, numbers),
            "a row of slices": partial(row_seconds, partial(slices, file, options.length), numbers),
        }
        in_turn(variants, 1)
        for name, seconds in in_turn(variants, options.rounds).items():
            print(f"{name:36}{spread([1000 * value for value in seconds], 3)} ms", flush=True)


if __name__ == "__main__":
    main()
