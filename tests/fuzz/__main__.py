"""`python -m tests.fuzz --inputs 20000 --seed 0`: read so many inputs, and exit with status 1 where the law was broken."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from tests.fuzz.campaign import names, run

FORK = multiprocessing.get_context("fork")


def main(given: Sequence[str] | None = None) -> int:
    """Read inputs as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Feed damaged and hostile files to whatever reads files.",
    )
    parser.add_argument(
        "--inputs", type=int, default=20_000, help="how many (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all of them (default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first (default: %(default)s)"
    )
    parser.add_argument("--target", choices=names(), help="only this reader")
    arguments = parser.parse_args(given)
    numbers, count = range(arguments.first, arguments.first + arguments.inputs), 0
    for name, number, breach in breaches(arguments.seed, numbers, arguments.target):
        count += 1
        sys.stderr.write(
            f"python -m tests.fuzz --seed {arguments.seed} --target {name} --first {number} --inputs 1\n{breach}\n\n"
        )
    sys.stdout.write(f"{arguments.inputs} inputs, {count} breaches of the law\n")
    return 1 if count else 0


def breaches(
    seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[tuple[str, int, str]]:
    """Yield target, number and fault wherever the law was broken; what ends the process that reads is one, and another process goes on."""
    while numbers:
        results, told = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(told, seed, numbers, only))
        process.start()
        told.close()
        number, name = numbers[0], "none"
        try:
            while True:
                number, name, breach = results.recv()
                if breach:
                    yield name, number, breach
        except EOFError:
            process.join()
        results.close()
        if process.exitcode == 0:
            return
        yield name, number, f"it ended its process with status {process.exitcode}"
        numbers = numbers[numbers.index(number) + 1 :]


def _run(told: Connection, seed: int, numbers: Sequence[int], only: str | None) -> None:
    for result in run(seed, numbers, only):
        told.send(result)


if __name__ == "__main__":
    raise SystemExit(main())
