"""Read many fuzzed inputs; exit with status 1 if a reader violated a rule.

usage: python -m tests.fuzz [--inputs 20000] [--seed 0] [--processes 1]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.campaign import names, run

MEMORY = Path("/dev/shm")
FORK = multiprocessing.get_context("fork")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the inputs that the command line selects; return the exit status."""
    if MEMORY.is_dir():  # targets write many files, and sync them
        os.environ.setdefault("TMPDIR", str(MEMORY))
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
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that read (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    numbers = range(arguments.first, arguments.first + arguments.inputs)
    shares = [numbers[process :: arguments.processes] for process in range(arguments.processes)]
    rates, began = Rates(), time.monotonic()
    failures: list[int] = []

    def read(share: Sequence[int]) -> None:
        for name, number, violation in violations(arguments.seed, share, arguments.target, rates):
            failures.append(number)
            sys.stderr.write(
                f"python -m tests.fuzz --seed {arguments.seed} --target {name} --first {number} "
                f"--inputs 1\n{violation}\n\n"
            )

    threads = [threading.Thread(target=read, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    summary = f"{arguments.inputs} inputs in {seconds:.0f} s, {len(failures)} violations\n"
    sys.stdout.write(f"{rates}{summary}")
    return 1 if failures else 0


class Rates:
    """Counts inputs of each target, and the seconds that making and reading them took."""

    def __init__(self) -> None:
        self._inputs: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def add(self, target: str, seconds: float) -> None:
        """Count an input."""
        self._inputs[target] += 1
        self._seconds[target] += seconds  # type: ignore[assignment]  # a Counter of floats

    def __str__(self) -> str:
        return "".join(
            f"{name:<12} {count:>8} inputs {count / max(self._seconds[name], 1e-9):>8.0f} per s\n"
            for name, count in self._inputs.items()
        )


def violations(
    seed: int, numbers: Sequence[int], only: str | None = None, rates: Rates | None = None
) -> Iterator[tuple[str, int, str]]:
    """Yield target, number and description of every violation.

    A crash of the process that reads is one; another process then continues.
    """
    while numbers:
        results, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(sender, seed, numbers, only))
        process.start()
        sender.close()
        number, name, began = numbers[0], "", 0.0
        try:
            while True:
                before, before_name = began, name
                number, name, violation = results.recv()
                if violation is None:  # a new input
                    began = time.monotonic()
                    if rates is not None and before_name:
                        rates.add(before_name, began - before)
                else:
                    yield name, number, violation
        except EOFError:
            process.join()
        results.close()
        if process.exitcode == 0:
            return
        yield name or "none", number, f"the process exited with status {process.exitcode}"
        if not name:
            return  # so would every other one
        numbers = numbers[numbers.index(number) + 1 :]


def _run(sender: Connection, seed: int, numbers: Sequence[int], only: str | None) -> None:
    for result in run(seed, numbers, only):
        sender.send(result)


if __name__ == "__main__":
    raise SystemExit(main())
