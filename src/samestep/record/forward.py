"""Forwards a run's record to its sinks: in a process of its own beside training, without torch, or by hand.

    python -m samestep.record.forward DIR --to s3://bucket/runs/one --to tensorboard

by hand sends what DIR holds and has not arrived yet, and ends. Beside training, the file of events
is the queue: this process reads it, so that no step waits for a destination and a crash of one of
the two loses nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from select import select
from typing import IO, TYPE_CHECKING, Any, Final

from samestep.config import is_url
from samestep.errors import SamestepError
from samestep.record.events import FILE_NAME
from samestep.record.forwarded import Forwarded, lock
from samestep.record.sender import Sender
from samestep.record.sinks.base import check_sinks
from samestep.record.sinks.feed import Feed
from samestep.record.sinks.function import FunctionDestination
from samestep.record.sinks.storage import StorageDestination
from samestep.record.source import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samestep.record.sender import Destination

LOOK_SECONDS: Final = 0.5
TELL_SECONDS: Final = 10.0  # at least, between two events of a sink
WITHOUT_PARENT_SECONDS: Final = 3.0  # to send the rest once the run was killed
NICENESS: Final = 5  # training comes first where there are too few cores


class Forwarder:
    """The senders of a run's record, and what is told of them."""

    def __init__(
        self, directory: Path, sinks: Sequence[str], function: str | None, channel: IO[str]
    ) -> None:
        forwarded = Forwarded(directory)
        self._file, self._channel = directory / FILE_NAME, channel
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}
        destinations: list[Destination] = []
        for name in sinks:
            kind = StorageDestination if is_url(name) else Feed
            destinations.append(kind(name, directory, open_source(directory), forwarded))
        if function is not None:
            destinations.append(
                FunctionDestination(function, directory, open_source(directory), forwarded)
            )
        self._senders = [
            Sender(open_source(directory), destination) for destination in destinations
        ]

    def tell(self) -> None:
        """Tell of each sink whose state changed, at most every few seconds. What is only being gathered is not behind."""
        for sender in self._senders:
            state = sender.state(self._size())
            state["behind_bytes"] *= state["error"] is not None
            when, told = self._told.get(state["name"], (-TELL_SECONDS, {}))
            is_known = sender.has_answered or state["error"] is not None
            if is_known and time.monotonic() - when >= TELL_SECONDS and _differs(state, told):
                self._told[state["name"]] = time.monotonic(), state
                self._write(state)

    def finish(self, seconds: float | None) -> bool:
        """Send what is there, for so long at most, and tell what is missing then; return whether everything arrived."""
        for sender in self._senders:
            sender.end()
        deadline = None if seconds is None else time.monotonic() + seconds
        arrived = [
            sender.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for sender in self._senders
        ]
        self.tell()
        for sender in (
            sender for sender, has_all in zip(self._senders, arrived, strict=True) if not has_all
        ):
            state = sender.state(self._size())
            self._write(
                {**state, "error": state["error"] or "the rest did not arrive before the run ended"}
            )
        return all(arrived)

    def _write(self, state: dict[str, Any]) -> None:
        self._channel.write(f"{json.dumps(state)}\n")
        self._channel.flush()

    def _size(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0


def _differs(state: dict[str, Any], told: dict[str, Any]) -> bool:
    """Tell whether a state is news: what is waiting must at least have doubled."""
    if not told or (state["error"] is None, state["dropped"]) != (
        told["error"] is None,
        told["dropped"],
    ):
        return True
    return state["error"] is not None and state["behind_bytes"] >= 2 * max(1, told["behind_bytes"])


def main() -> int:
    """Forward as the command line says; return 1 where something is missing at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m samestep.record.forward",
        description="Send what sinks lack of a run's record.",
    )
    parser.add_argument("directory", type=Path, help="directory of a run")
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="SINK",
        help="a URL, tensorboard, mlflow, wandb, or module:Class",
    )
    parser.add_argument(
        "--transfer",
        metavar="FUNCTION",
        help="module:function that is called with the path of every file",
    )
    parser.add_argument(
        "--beside",
        type=int,
        metavar="PID",
        help="go on until that parent process says or has ended",
    )
    options = parser.parse_args()
    if options.beside is not None:
        return _forward_beside(options)
    check_sinks(options.to)
    if not (options.to or options.transfer):
        parser.error("nothing was given to send to; expected --to or --transfer")
    if not (options.directory / FILE_NAME).is_file():
        parser.error(f"{options.directory} holds no {FILE_NAME}; expected the directory of a run")
    held = lock(options.directory)
    if held is None:
        parser.error(
            f"another process forwards the record of {options.directory}; wait until its run has ended"
        )
    return (
        0
        if Forwarder(options.directory, options.to, options.transfer, sys.stdout).finish(None)
        else 1
    )


def _forward_beside(options: argparse.Namespace) -> int:
    os.nice(NICENESS)
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what users' code prints
    while (held := lock(options.directory)) is None:  # the one before it is about to end
        if _word_of(options.beside, LOOK_SECONDS) is not None:
            return 1
    with held:
        forwarder = Forwarder(options.directory, options.to, options.transfer, channel)
        while (seconds := _word_of(options.beside, LOOK_SECONDS)) is None:
            forwarder.tell()
        return 0 if forwarder.finish(seconds) else 1


def _word_of(parent: int, seconds: float) -> float | None:
    """Return how many seconds are left to send the rest, once the parent has told or is gone; None after `seconds` without a word."""
    if os.getppid() != parent:
        return WITHOUT_PARENT_SECONDS
    if not select([sys.stdin], [], [], seconds)[0]:
        return None
    word = sys.stdin.readline()
    return float(word) if word else WITHOUT_PARENT_SECONDS


if __name__ == "__main__":
    try:
        status = main()
    except SamestepError as error:
        sys.stderr.write(f"samestep: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that hang in a storage are not waited for
