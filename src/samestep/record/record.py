"""A run's record: events as lines of an append-only file, with scalars, timing and images.

One worker writes it; the others get one that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.chain import ChainFile
from samestep.record.events import FILE_NAME, NON_FINITE, EventFile
from samestep.record.images import AsyncImageWriter, Picture, copy_picture, write_picture
from samestep.record.orders import write_order

# the parts of a step that `timing` measures
PARTS: Final = (
    *("data", "compute", "exchange", "optimizer", "snapshot"),
    *("evaluation", "logging"),  # only in steps that have them
)
NONE: Final[Mapping[str, Any]] = MappingProxyType({})
MAX_TIMED_WORKERS: Final = 64  # whose seconds are recorded one by one
QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
OWN: Final = "own"  # the duration of a step minus the time that the worker waited for others


class Record:
    """A run's record, which is append-only. This base class, for other workers, writes nothing."""

    def event(self, kind: str, **fields: Any) -> None:
        """Add an event: numbers, strings, lists and mappings of them.

        Raises `RecordError` if it cannot be written.
        """

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
        """Add a step's scalars: global values by name, and the lowest and highest of the workers.

        `between` marks values logged outside a step, after `step` complete steps.
        """
        parts = {"values": _floats(values), "low": _floats(low or {}), "high": _floats(high or {})}
        self.event("scalars", step=step, epoch=epoch, **parts, **_mark(between))

    def timing(
        self, step: int, workers: Sequence[Mapping[str, float]], updates: Mapping[str, Any] = NONE
    ) -> None:
        """Add a step's durations: for each worker in rank order, seconds by part (`PARTS`, `OWN`).

        Of more than 64 workers, means and quantiles are added instead. `updates` has the
        learning rates that changed (`rates`) and the norms of gradients (`norms`).
        """
        seconds = [_floats(parts) for parts in workers]
        fields = {"workers": seconds} if len(workers) <= MAX_TIMED_WORKERS else _summary(seconds)
        self.event("timing", step=step, **fields, **updates)

    def histogram(
        self, step: int, name: str, counts: Mapping[str, int], *, between: bool = False
    ) -> None:
        """Add a histogram: counts by the edge nearest to zero of each bin, "nan", "inf" or "-inf".

        Bins have the edges 0 and plus and minus 1, 1.25, 1.5 and 1.75 times powers of two.
        `between` is as for `scalars`.
        """
        bins = sorted(
            [float(edge), count] for edge, count in counts.items() if edge not in NON_FINITE
        )
        others = {key: counts.get(key, 0) for key in NON_FINITE}
        self.event("histogram", step=step, name=name, bins=bins, **others, **_mark(between))

    def order(self, step: int, loop: str, epoch: int, array: Any, digest: str) -> None:
        """Add the array, of which a digest is given, that the order of an epoch is computed from.

        Equal arrays are written once; `kept` says whether all of the record's are at most
        `ORDER_BYTES` with this one.
        """

    def image(self, step: int, name: str, pixels: Any, *, between: bool = False) -> None:
        """Add an image as a PNG file.

        `pixels` is a uint8 array [H, W], [H, W, 1] or [H, W, 3] (RGB). The file and then its event
        are written in the background. If the queue is full, the image is dropped, and counted in
        an event `images_dropped`. `between` is as for `scalars`. Raises `RecordError` for other
        arrays, without Pillow, and if an earlier image could not be written.
        """

    def begin_chain(self, seed: int, step: int, head: bytes) -> ChainFile | None:
        """Open the chain of the run at `step`, after the `head` of that state; None for no file.

        Raises `RecordError` if it cannot be written.
        """

    def flush(self) -> None:
        """Wait until every image is written. Raises `RecordError` if one could not be written."""

    def sync(self) -> None:
        """Wait until what was added so far would survive a power loss; from any thread.

        Raises `OSError` if the disk fails. `flush` reports images that could not be written.
        """

    def close(self) -> None:
        """Write all queued images, and end the record; no call follows."""


def open_record(directory: Path | None, *, writes: bool) -> Record:
    """Open the record in a run's directory; if `directory` is None or not `writes`, it is a no-op.

    An existing record is continued. Raises `RecordError` if the directory is not writable.
    """
    return Record() if directory is None or not writes else FileRecord(directory)


class FileRecord(Record):
    """A record in a directory: events.jsonl and images/."""

    def __init__(self, directory: Path) -> None:
        """Open the record in `directory`, which is created if it is missing."""
        self._directory = directory
        self._events = EventFile(directory / FILE_NAME)
        self._images = AsyncImageWriter(self._write_image)
        self._dropped = {"count": 0, "step": 0}
        self._chain: ChainFile | None = None

    def begin_chain(self, seed: int, step: int, head: bytes) -> ChainFile:
        self._chain = ChainFile(self._directory, step, seed, head)
        return self._chain

    def event(self, kind: str, **fields: Any) -> None:
        if reserved := {"time", "event"} & fields.keys():
            raise RecordError(
                f"field {min(reserved)!r} of event {kind!r} is reserved for the record; rename it"
            )
        self._events.append({"time": time.time(), "event": kind, **fields})

    def image(self, step: int, name: str, pixels: Any, *, between: bool = False) -> None:
        if self._images.add(copy_picture(step, name, pixels), between=between):
            self._report_dropped()
        else:
            self._dropped = {"count": self._dropped["count"] + 1, "step": step}

    def order(self, step: int, loop: str, epoch: int, array: Any, digest: str) -> None:
        kept = write_order(self._directory, array, digest)
        self.event("order", step=step, loop=loop, epoch=epoch, digest=digest, kept=kept)

    def _write_image(self, picture: Picture, between: bool) -> None:
        size = {"width": picture.width, "height": picture.height}
        size["bytes"] = write_picture(self._directory, picture)
        names = {"name": picture.name, "step": picture.step, "path": picture.path}
        self.event("image", **names, **size, **_mark(between))

    def _report_dropped(self) -> None:
        if self._dropped["count"]:
            self.event("images_dropped", **self._dropped)
            self._dropped = {"count": 0, "step": 0}

    def flush(self) -> None:
        self._report_dropped()
        self._images.flush()

    def sync(self) -> None:
        self._images.wait_for_queued()
        if self._chain is not None:
            self._chain.sync()
        self._events.sync()

    def close(self) -> None:
        self._images.close()
        self._events.close()
        if self._chain is not None:
            self._chain.close()


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _summary(workers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the means and quantiles of each part, to 6 digits, and the rank of the slowest."""
    parts = {name: [worker.get(name, 0.0) for worker in workers] for name in PARTS}
    own_seconds = [worker.get(OWN, 0.0) for worker in workers]
    return {
        "count": len(workers),
        "mean": {name: _short(sum(values) / len(values)) for name, values in parts.items()},
        "quantiles": {
            name: _quantiles(values) for name, values in {**parts, OWN: own_seconds}.items()
        },
        "slowest": own_seconds.index(max(own_seconds)),
    }


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [_short(ordered[round(share * (len(ordered) - 1))]) for share in QUANTILES]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _mark(between: bool) -> dict[str, bool]:
    return {"between": True} if between else {}
