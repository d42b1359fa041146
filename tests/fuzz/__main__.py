"""Read many fuzzed inputs; exit with status 1 if a reader violated a rule.

usage: python -m tests.fuzz [--inputs 20000] [--seed 0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from tests.fuzz.campaign import names, run

FORK = multiprocessing.get_context("fork")


def main(given: Sequence[str] | None = None) -> int:
    """Read the inputs that the command line selects; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Feed damaged and hostile files to all readers."
    )
    parser.add_argument(
        "--inputs", type=int, default=20_000, help="number of inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input (default: %(default)s)"
    )
    parser.add_argument("--target", choices=names(), help="only this reader")
    arguments = parser.parse_args(given)
    numbers, count = range(arguments.first, arguments.first + arguments.inputs), 0
    for name, number, violation in violations(arguments.seed, numbers, arguments.target):
        count += 1
        sys.stderr.write(
            f"python -m tests.fuzz --seed {arguments.seed} --target {name} --first {number} "
            f"--inputs 1\n{violation}\n\n"
        )
    sys.stdout.write(f"{arguments.inputs} inputs, {count} violations\n")
    return 1 if count else 0


def violations(
    seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[tuple[str, int, str]]:
    """Yield target, number and description of every violation.

    A crash of the process that reads is one; another process then continues.
    """
    while numbers:
        results, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(sender, seed, numbers, only))
        process.start()
        sender.close()
        number, name = numbers[0], "none"
        try:
            while True:
                number, name, violation = results.recv()
                if violation:
                    yield name, number, violation
        except EOFError:
            process.join()
        results.close()
        if process.exitcode == 0:
            return
        yield name, number, f"the process exited with status {process.exitcode}"
        numbers = numbers[numbers.index(number) + 1 :]


def _run(sender: Connection, seed: int, numbers: Sequence[int], only: str | None) -> None:
    for result in run(seed, numbers, only):
        sender.send(result)


if __name__ == "__main__":
    raise SystemExit(main())
