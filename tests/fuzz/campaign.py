"""Many inputs, each a function of the seed, its target and its number."""

from __future__ import annotations

import codecs
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz.law import Law
from tests.fuzz.target import Target
from tests.fuzz.targets import targets

# Imported when they are first met, by json, pickle and who looks at names of hosts; by the median
# of what has NaN, and by a server.
UTF = tuple(f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be"))
CODECS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-8-sig", *UTF)
MODULES = ("anyio._backends._asyncio", "numpy.ma")
# inputs of each target that are not judged: what reading needs is imported when it is needed first
WARM_UP = 5
SHOWN = 600  # letters of an input


def names() -> list[str]:
    """Return the names of all targets."""
    with TemporaryDirectory() as folder:
        return [target.name for target in targets(Path(folder))]


def run(
    seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[tuple[int, str, str | None]]:
    """Read the inputs of these numbers, in turn those of each target.

    Yield the number and name of each before it is read, and again with what was wrong where the law
    was broken. For a process of its own, which comes under the law for ever.
    """
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        chosen = [target for target in targets(folder) if only in {None, target.name}]
        warnings.simplefilter("ignore")  # to print one, Python reads a line of source
        logging.disable()
        for codec in CODECS:
            codecs.lookup(codec)
        for module in MODULES:
            import_module(module)
        law = Law(folder)
        for target in chosen:
            for number in range(WARM_UP):
                _breach(law, target, f"warm up {number}")
        for number in numbers:
            target = chosen[number % len(chosen)]
            yield number, target.name, None
            if breach := _breach(law, target, f"{seed} {target.name} {number}"):
                yield number, target.name, breach


def _breach(law: Law, target: Target, seed: str) -> str | None:
    given = target.make(Random(seed))
    found = law.breach(
        lambda: target.read(given), target.allowed, reads_elsewhere=target.reads_elsewhere
    )
    return f"{found}\ngiven {repr(given)[:SHOWN]}" if found else None
