"""A campaign of many inputs, each a function of the seed, the target and its number."""

from __future__ import annotations

import codecs
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz.sandbox import Sandbox
from tests.fuzz.target import Target
from tests.fuzz.targets import targets

# Imported on first use: by json, pickle and lookups of host names; by a server; by a median of NaN.
UTF = tuple(f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be"))
CODECS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-8-sig", *UTF)
MODULES = ("anyio._backends._asyncio", "numpy.ma", "psutil")
# unchecked inputs of each target, so that readers import what they need
WARM_UP = 5
FAST_TURNS = 4  # inputs of a fast target for each one of a slow target
SHOWN = 600  # characters of an input


def names() -> list[str]:
    """Return the names of all targets."""
    with TemporaryDirectory() as folder:
        return [target.name for target in targets(Path(folder))]


def run(
    seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[tuple[int, str, str | None]]:
    """Read the inputs with these numbers, alternating between targets.

    Yield the number and target of each before it is read, and again with every violation. Run it in
    its own process, because the sandbox cannot be removed.
    """
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        chosen = [target for target in targets(folder) if only in {None, target.name}]
        warnings.simplefilter("ignore")  # printing one reads a source file
        logging.disable()
        for codec in CODECS:
            codecs.lookup(codec)
        for module in MODULES:
            import_module(module)
        sandbox = Sandbox(folder)
        for target in chosen:
            for number in range(WARM_UP):
                _violation(sandbox, target, f"warm up {number}")
        turns = [target for target in chosen for _ in range(1 if target.is_slow else FAST_TURNS)]
        for number in numbers:
            target = turns[number % len(turns)]
            yield number, target.name, None
            if violation := _violation(sandbox, target, f"{seed} {target.name} {number}"):
                yield number, target.name, violation


def _violation(sandbox: Sandbox, target: Target, seed: str) -> str | None:
    case = target.make(Random(seed))
    violation = sandbox.violation(
        lambda: target.read(case),
        target.allowed,
        reads_elsewhere=target.reads_elsewhere,
        writes=target.writes,
    )
    return f"{violation}\ngiven {repr(case)[:SHOWN]}" if violation else None
