"""Helpers of several tools: run a script, read its record, format numbers."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final

from samestep.errors import RecordError
from samestep.host import no_garbage_collection
from samestep.record import read_events

OUTPUT: Final = "output.txt"
# the run neither writes anything outside its directory nor restarts
ISOLATED: Final = (
    *(f"--{name}=none" for name in ("remote", "transfer", "sinks", "on-event")),
    "--max-restarts=0",
)


@contextmanager
def started(
    command: Sequence[str],
    workers: int,
    directory: Path,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[BaseProcess]:
    """Start a script by `samestep run` in `directory`; append its output to the file `OUTPUT`.

    It runs in a fork of this process, which imports torch only once for all runs. An exception in
    the block ends the script, and so does a SIGTERM of this process.
    """
    import torch

    from samestep.launch.local import preload
    from samestep.launch.worker import FORK

    torch.set_num_threads(1)  # threads do not survive a fork
    preload()
    options = ["-n", str(workers), "--dir", str(directory), *ISOLATED, *flags]
    with _sigterm_as_exit(), (directory / OUTPUT).open("ab") as file:
        arguments = (["run", *options, *command], file.fileno(), dict(environment or {}))
        process = FORK.Process(target=_run_samestep, args=arguments, name="samestep run")
        with no_garbage_collection():
            process.start()
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
        finally:
            process.join()


def _run_samestep(arguments: Sequence[str], output: int, environment: Mapping[str, str]) -> None:
    """Do in this process what `python -m samestep` does, with the output in an open file."""
    from samestep.launch.output import print_to

    atexit._clear()  # noqa: SLF001  exit functions belong to the process that was forked
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print_to([os.dup(output), os.dup(output)])
    os.environ.update(environment)
    sys.argv = ["samestep", *arguments]
    runpy.run_module("samestep", run_name="__main__")


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def read_run(directory: Path) -> tuple[list[dict[str, Any]], Path]:
    """Return the events and the newest snapshot of a run. Raises `RecordError` without either."""
    from samestep.snapshot.read import list_snapshots

    events: list[dict[str, Any]] = []
    with suppress(RecordError):
        events += read_events(directory)
    if not any(event["event"] in {"started", "resumed"} for event in events):
        raise RecordError("the script did not start a run; it must call samestep.init")
    if not (snapshots := list_snapshots(directory)):
        needed = "track its model and optimizer (run.track) and train for at least one step"
        raise RecordError(f"the script wrote no snapshot; it must {needed}")
    return events, snapshots[-1]


def counted(count: float, noun: str) -> str:
    """Return a count with its noun, such as "1 worker" or "2 workers"."""
    return f"{count:g} {noun}{'s' * (count != 1)}"


def whole_number(text: str | None) -> int | None:
    """Return the integer that a text holds, or None."""
    try:
        return int(text or "")
    except ValueError:
        return None


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, for example 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
