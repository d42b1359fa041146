"""Helpers of several tools: run a script, read its record, format numbers."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final

from samestep.errors import RecordError, SamestepError
from samestep.host import SIGNALED, printable
from samestep.launch.local import check_script
from samestep.record import read_events

OUTPUT: Final = "output.txt"
SHOWN_LINES: Final = 30
_WORKER_FAILURE: Final = re.compile(r"(?m)^(samestep: error: )?(?=worker \d+ failed first: )")
# the run neither writes anything outside its directory nor restarts
ISOLATED: Final = (
    *(f"--{name}=none" for name in ("remote", "transfer", "sinks", "on-event")),
    "--max-restarts=0",
)


def add_script(parser: argparse.ArgumentParser, script: str) -> None:
    """Add the arguments that say what to run, the last ones of a parser."""
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="the script is a module, like python -m")
    add("script", help=script)
    add("arguments", nargs="...", help="arguments of the script")


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command of these arguments. Raises `ConfigError` if there is no such script."""
    check_script(options.script, as_module=options.module)
    return ["-m"] * options.module + [options.script, *options.arguments]


@contextmanager
def started(
    command: Sequence[str],
    workers: int,
    directory: Path,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    is_interactive: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script by `samestep run` in `directory`; append its output to the file `OUTPUT`.

    If it `is_interactive`, it has this process's terminal instead.

    Each run is a new process, although importing torch takes seconds: in forks of one process,
    objects would have the same addresses, and with them sets the same order, in every run. An
    exception in the block ends the script, and so does a SIGTERM of this process.
    """
    options = ["-n", str(workers), "--dir", str(directory), *ISOLATED, *flags]
    program = [sys.executable, "-m", "samestep", "run", *options, *command]
    with (
        _sigterm_as_exit(),
        (directory / OUTPUT).open("ab") as file,
        subprocess.Popen(
            program,
            stdin=None if is_interactive else subprocess.DEVNULL,
            stdout=None if is_interactive else file,
            stderr=None if is_interactive else subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            process.terminate()
            process.wait()
            raise


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(SIGNALED + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextmanager
def damage_explained(directory: Path) -> Iterator[None]:
    """Raise `RecordError` for what is wrong in the record of a run that the block reads."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, SamestepError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise RecordError(f"the record in {directory} is damaged ({reason})") from error


def first_failure(directory: Path) -> str:
    """Return the launcher's last report of the worker that failed first, or else the last lines."""
    output = (directory / OUTPUT).read_text(errors="replace")
    starts = [match.end() for match in _WORKER_FAILURE.finditer(output)]
    return "\n".join(output[starts[-1] if starts else 0 :].strip().splitlines()[-SHOWN_LINES:])


def read_run(directory: Path) -> list[dict[str, Any]]:
    """Return the events of a run. Raises `RecordError` if the script started none."""
    events: list[dict[str, Any]] = []
    with suppress(RecordError):
        events += read_events(directory)
    if not any(event["event"] in {"started", "resumed"} for event in events):
        raise RecordError("the script did not start a run; it must call samestep.init")
    return events


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that only one has, in order."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names as text, and how many more there are."""
    more = f" and {len(names) - 1} more" * (len(names) > 1)
    return f"{printable(names[0])!r}{more}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, for example 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
