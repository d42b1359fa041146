"""What a run tells: which worker writes is chosen once, by giving the others a record that does nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.events import FILE_NAME, EventFile
from samestep.record.images import AsyncImageWriter, Picture, copy_picture, write_picture

# of a step, whose seconds `timing` tells
PARTS: Final = ("data", "compute", "exchange", "optimizer", "snapshot")


class Record:
    """A run's record. Every call adds to it, and none rewrites what is there."""

    def claim(self) -> None:
        """Keep other runs on this machine from the record, until it is closed. Raises `RecordError` where one has it."""

    def event(self, kind: str, **fields: Any) -> None:
        """Add an event: numbers, texts, lists and mappings of them. Raises `RecordError` when it cannot be written."""

    def scalars(
        self,
        step: int,
        epoch: int,
        values: Mapping[str, float],
        low: Mapping[str, float] | None = None,
        high: Mapping[str, float] | None = None,
        *,
        between: bool = False,
    ) -> None:
        """Add a step's scalars: global values by name, and of the workers the lowest and the highest.

        `between` tells that they belong to no step's body: `step` of them are done, and the next
        has not begun.
        """

    def timing(self, step: int, workers: Sequence[Mapping[str, float]]) -> None:
        """Add a step's seconds by worker (in rank order) and part, one of `PARTS`."""

    def image(self, step: int, name: str, pixels: Any, *, between: bool = False) -> None:
        """Add an image as a PNG file. `pixels` is a uint8 array [H, W], [H, W, 1] or [H, W, 3] (RGB).

        `between` is that of `scalars`. The file, and then the event, are written beside training;
        where too many wait, an image is dropped, which the next event `images_dropped` counts.
        Raises `RecordError` on anything else, without Pillow, and where an image before could not
        be written.
        """

    def flush(self) -> None:
        """Return when every image is on file. Raises `RecordError` where one could not be written."""

    def close(self) -> None:
        """Write what waits, and end the record; no call may follow."""


def open_record(directory: Path | None, *, writes: bool) -> Record:
    """Open the record in a run's directory; where `writes` is false or there is no directory, one that does nothing.

    A record that is there already is continued. Raises `RecordError` when the directory cannot be
    written.
    """
    return NoRecord() if directory is None or not writes else FileRecord(directory)


class NoRecord(Record):
    """The record of workers that do not write: its calls do nothing."""


class FileRecord(Record):
    """A record in a directory: events.jsonl, and images/ beside it."""

    def __init__(self, directory: Path) -> None:
        """Open the record in `directory`, which is made where it is missing."""
        self._directory = directory
        self._events = EventFile(directory / FILE_NAME)
        self._images = AsyncImageWriter(self._write_image)
        self._dropped = {"count": 0, "step": 0}

    def claim(self) -> None:
        self._events.claim()

    def event(self, kind: str, **fields: Any) -> None:
        if taken := {"time", "event"} & fields.keys():
            raise RecordError(
                f"an event of kind {kind!r} has a field {min(taken)!r}, which every event has already; rename it"
            )
        self._events.append({"time": time.time(), "event": kind, **fields})

    def scalars(
        self,
        step: int,
        epoch: int,
        values: Mapping[str, float],
        low: Mapping[str, float] | None = None,
        high: Mapping[str, float] | None = None,
        *,
        between: bool = False,
    ) -> None:
        parts = {"values": _floats(values), "low": _floats(low or {}), "high": _floats(high or {})}
        self.event("scalars", step=step, epoch=epoch, **parts, **_mark(between))

    def timing(self, step: int, workers: Sequence[Mapping[str, float]]) -> None:
        self.event("timing", step=step, workers=[_floats(parts) for parts in workers])

    def image(self, step: int, name: str, pixels: Any, *, between: bool = False) -> None:
        if self._images.add(copy_picture(step, name, pixels), between=between):
            self._tell_dropped()
        else:
            self._dropped = {"count": self._dropped["count"] + 1, "step": step}

    def _write_image(self, picture: Picture, between: bool) -> None:
        nbytes = write_picture(self._directory, picture)
        size = {"width": picture.width, "height": picture.height, "bytes": nbytes}
        self.event(
            "image",
            name=picture.name,
            step=picture.step,
            path=picture.path,
            **size,
            **_mark(between),
        )

    def _tell_dropped(self) -> None:
        if self._dropped["count"]:
            self.event("images_dropped", **self._dropped)
            self._dropped = {"count": 0, "step": 0}

    def flush(self) -> None:
        self._tell_dropped()
        self._images.flush()

    def close(self) -> None:
        self._images.close()
        self._events.close()


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _mark(between: bool) -> dict[str, bool]:
    return {"between": True} if between else {}
