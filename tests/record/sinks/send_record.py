"""Send a record to a sink: `python -m tests.record.sinks.send_record NAME DIR FIRST SECONDS`.

Starts with the event number FIRST. If SECONDS is not empty, the process kills itself that long
after the last event.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.record import FileRecord, read_events
from samestep.record.sinks import open_sink

if TYPE_CHECKING:
    import numpy as np

    from samestep.record.sinks import Sink

CONFIG = {
    "lanes": 4,
    "seed": 7,
    "dir": "runs/<b>a|b</b>",
    "stop_after": None,
    "devices": ["cpu", "cpu"],
    "timeout": 1.5,
}
ODD = "<script>alert(1)</script>/../ü\n"


def write_start(record: FileRecord, step: int, **config: object) -> None:
    record.event("resumed" if step else "started", step=step, config={**CONFIG, **config})


def write_step(
    record: FileRecord, number: int, /, *, between: bool = False, **values: float
) -> None:
    record.scalars(
        number, 0, values or {"loss": 1 / (number + 1), ODD: float(number)}, between=between
    )


def write_image(
    record: FileRecord, step: int, pixels: np.ndarray, name: str = "cells", *, between: bool = False
) -> None:
    record.image(step, name, pixels, between=between)
    record.flush()


def send(sink: Sink, directory: Path, first: int = 0, stop: int | None = None) -> None:
    """Send the events [first, stop) of a record."""
    for event in islice(read_events(directory), first, stop):
        sink.take(event)
        if event["event"] == "image":
            sink.image(event, (directory / event["path"]).read_bytes())
    sink.flush()


def send_all(name: str, directory: Path, first: int = 0) -> None:
    """Send the events of a record from `first` on to a new sink, and close it."""
    sink = open_sink(name, directory)
    send(sink, directory, first)
    sink.close()


if __name__ == "__main__":
    name, place, first, seconds = sys.argv[1:]
    if seconds:
        send(open_sink(name, Path(place)), Path(place), int(first))
        time.sleep(float(seconds))
        os.kill(os.getpid(), signal.SIGKILL)
    send_all(name, Path(place), int(first))
    if "torch" in sys.modules:
        sys.exit("a sink has imported torch")
