"""The view of one run: its record as JSON for the page, the report and the plot."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from statistics import median, median_high
from threading import Lock
from typing import Any, Final

import numpy as np

from samestep.config import Config
from samestep.errors import RecordError
from samestep.record.events import parse_events
from samestep.record.source import Source
from samestep.watch.curves import (
    AXES,
    Curve,
    Points,
    row_range,
    select_points,
    to_int,
    to_list,
    to_number,
    to_text,
)
from samestep.watch.run_state import SYSTEM, RunState, SamplePlan, cause
from samestep.watch.timings import started_workers, worker_rows

EVENTS_AT_A_TIME: Final = 256  # applied while holding the lock
TAIL_BYTES: Final = 1024
LONG_BYTES: Final = 2**24  # of a record: reading it takes a second
SILENT_SECONDS: Final = 60.0
SILENT_STEPS: Final = 5
MOST_BYTES: Final = 2**29  # of the curves, timings, samples and histograms that are held
MOST_ROWS: Final = 2**20  # of a curve, the timings or the samples of a host: more are thinned
FEWEST_ROWS: Final = 512  # however many curves there are
DEEPEST: Final = 4  # nesting of configuration values
LOG_BYTES: Final = 256 * 1024
LOG_LINES: Final = 500
# of a terminal: colors and cursor movements (CSI), and titles and links (OSC)
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z_])")
# names of scalars
_LOSS: Final = re.compile(r"loss|error|mae|mse|perplexity", re.IGNORECASE)
_EVALUATED: Final = re.compile(
    r"(?<![a-z])(val|valid|validation|test|eval|evaluation|held[-_ ]?out)(?![a-z])", re.IGNORECASE
)
_TRAINED: Final = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
ALL_SAMPLES: Final = 100_000  # of hosts, shared by their curves
FEWEST_SAMPLES, MOST_SAMPLES = 30, 500  # per curve
SIGNATURES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


class View:
    """One run, as far as its record has been read.

    `id` is unique among the runs shown, `name` is for people. One thread at a time may call
    `refresh` or `advance`; everything else may run concurrently.
    """

    def __init__(self, source: Source, run: str = ".", name: str | None = None) -> None:
        self.id = run
        self.name = name or Path(source.location).name or source.location
        self.source = source
        self._lock = Lock()
        self._version: object = None
        self._is_read = True  # up to `_version`
        self._restarted = False  # read again from the start at `_version`
        self._most_rows = MOST_ROWS
        self.bytes_held = 0
        self._reset()

    def _reset(self) -> None:
        self._run = RunState()
        self._offset = 0
        self._tail = b""  # the last bytes read, to recognize the record
        self._was_read = False  # to its end at least once
        self._seen: float | None = None  # time of the last news since then

    def refresh(self) -> bool:
        """Read everything new, and return whether there was any. Raises `RecordError`."""
        is_new = False
        while self.advance():
            is_new = True
        return is_new

    def advance(self) -> bool:
        """Read the next few MB, and return whether there was anything new.

        Reads from the start if the record was replaced or truncated. Raises `RecordError` if the
        record cannot be read now.
        """
        if self._is_read:
            version = self.source.version()
            if version == self._version:
                return False
            self._version, self._is_read, self._restarted = version, False, False
        data = self._read_next()
        if not data:
            with self._lock:
                is_news = not self._was_read and self._offset >= LONG_BYTES  # no share any more
                self._is_read = self._was_read = True
            return is_news
        read = list(parse_events(data))  # all or none: a newer format raises
        lines, events = sum(1 for line in data.split(b"\n") if line), iter(read)
        while batch := list(islice(events, EVENTS_AT_A_TIME)):
            with self._lock:
                self._run.apply(*batch)
        with self._lock:
            self._run.skip_lines(lines - len(read))
        self.thin(self._most_rows)
        if self._was_read and any(event.get("event") != SYSTEM for event in read):
            self._seen = time.time()
        self._offset += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return True

    def thin(self, rows: int) -> None:
        """Keep at most `rows` rows of each curve, of timings and of samples from now on.

        If all take more than `MOST_BYTES`, fewer are kept.
        """
        with self._lock:
            rows = min(rows, self._most_rows)
            self._run.flush(rows)
            while (held := self._run.nbytes) > MOST_BYTES and rows > FEWEST_ROWS:
                rows //= 2
                self._run.flush(rows)
            self._most_rows, self.bytes_held = rows, held

    def _read_next(self) -> bytes:
        try:
            data = self._reread_tail()
        except RecordError:
            if not self._offset:
                raise
            data = b""
        if data.startswith(self._tail):
            # nothing is left of `data` if the next line is longer than one read
            return data[len(self._tail) :] or self.source.read(self._offset)
        if self._restarted:  # parts that contradict each other must not cause an endless loop
            with suppress(RecordError):
                return self.source.read(self._offset)
            return b""
        data, self._restarted = self.source.read(0), True
        with self._lock:
            self._reset()
        return data

    def _reread_tail(self) -> bytes:
        """Read the tail again, which may span several files, and the rest of its last file."""
        data, start = b"", self._offset - len(self._tail)
        while len(data) < len(self._tail) and (more := self.source.read(start + len(data))):
            data += more
        return data

    def row(self) -> dict[str, Any]:
        """Return the run's row in a list of runs."""
        with self._lock:
            return self._row(self._run, time.time())

    def _share_read(self) -> float | None:
        """Return the share of a long record that has been read, None if that is all of it."""
        size = self.source.size
        return None if self._was_read or size < LONG_BYTES else min(1.0, self._offset / size)

    def _row(self, run: RunState, now: float) -> dict[str, Any]:
        progress = _progress(run, is_running=False)
        curves, score = run.curves, run.principal
        role, name = next(iter(principals(curves, score).items()), (None, None))
        last = None if name is None else curves[name].summary()["last"]
        return {
            "id": self.id,
            "name": self.name,
            "state": _state(run, now, self._seen),
            "started": run.started,
            "updated": run.updated,
            "elapsed": run.elapsed,
            "nonfinite": [
                {"name": name, "step": since}
                for name, curve in curves.items()
                if (since := curve.nonfinite_since()) is not None
            ],
            "step": int(run.step),
            "epoch": run.epoch,
            "workers": len(started_workers(run.start)),
            "lanes": to_int(run.start.get("lanes")),
            "share": None if progress["is_of_epoch"] else progress["share"],
            "principal": name
            and {"role": role, "name": name, "last": last, "goal": goal_of(name, score)},
            "noted": self.source.notes and self.source.notes.version(),
            # its id, and the run of which it is a fork, if any
            "owner": to_text(run.start.get("run")),
            "forked": run.forked
            and {
                "run": to_text(run.forked.get("run")),
                "step": to_int(run.forked.get("step")) or 0,
                "trunk": to_text(run.forked.get("trunk")) or "",
            },
        }

    def summary(self) -> dict[str, Any]:
        """Return everything about the run except its curves."""
        with self._lock:
            run, now = self._run, time.time()
            row, config = self._row(self._run, now), run.start.get("config")
            is_running = row["state"] == "running" and self._was_read
            curves, score = run.curves, run.principal
            config = _config(config) if isinstance(config, dict) else {}
            return {
                **row,
                **self._notes(),
                "now": now,
                "reading": self._share_read(),
                "attempts": run.attempts,
                "progress": _progress(run, is_running=is_running),
                "scalars": [
                    {
                        "name": name,
                        "goal": goal_of(name, score),
                        "digest": curve.digest(),
                        **curve.summary(),
                    }
                    for name, curve in curves.items()
                ],
                "principals": principals(curves, score),
                "images": [
                    {"name": name, "items": [image.to_json() for image in series]}
                    for name, series in run.images.items()
                ],
                "histograms": [
                    {"name": name, "step": series[-1].position[0]}
                    for name, series in run.histograms.items()
                ],
                "workers": worker_rows(run.start, run.timings, is_strided=run.has_strided_lanes),
                "parts": run.timings.parts(),
                "samples": run.hosts.count,
                "samples_used": _all_samples(run),
                "events": [vars(event) for event in run.timeline],
                "dropped_events": run.dropped_events,
                "config": config,
                "defaults": _defaults(config),
                **_origin(run),
                "sinks": [
                    {
                        "name": name,
                        "behind_bytes": to_int(event.get("behind_bytes")),
                        "dropped": to_int(event.get("dropped")) or 0,
                        "error": to_text(event.get("error")),
                    }
                    for name, event in run.sinks.items()
                ],
                "dropped_images": run.dropped_images,
                "skipped_lines": run.skipped_lines,
                "failure": cause(run.failures) if row["state"] == "failed" else None,
                "stall": run.stall if row["state"] == "stalled" else None,
            }

    def table_row(self) -> dict[str, Any]:
        """Return the run's row in the table of runs: tags, scores by scalar, settings, origin."""
        with self._lock:
            run = self._run
            curves, score = run.curves, run.principal
            scores = {name: curve.summary() for name, curve in curves.items()}
            config = run.start.get("config")
            config = _config(config) if isinstance(config, dict) else {}
            row = {**self._row(run, time.time()), **self._notes(), **_origin(run)}
            return {
                **row,
                "principals": principals(curves, score),
                "scores": {
                    name: {**each, "goal": goal_of(name, score)} for name, each in scores.items()
                },
                "config": config,
            }

    def _notes(self) -> dict[str, Any]:
        if (notes := self.source.notes) is None:
            return {"tags": [], "note": "", "locked": "a run at a URL is read-only"}
        return notes.read()

    def write_notes(self, tags: list[str], note: str, version: str | None) -> None:
        """Replace the run's tags and note; see `Notes.write`."""
        if self.source.notes is None:
            raise RecordError("a run at a URL is read-only")
        self.source.notes.write(tags, note, version)

    def curve(
        self,
        name: str,
        start: float | None = None,
        end: float | None = None,
        points: int = 1000,
        smooth: float = 0.0,
        axis: str = AXES[0],
    ) -> dict[str, Any]:
        """Return the points to draw of a scalar; see `Points.to_json`.

        At most `points` points from `start` to `end` of the axis, inclusive; None means no limit.
        `smooth` is the weight of earlier values in a moving average, 0 for none. Raises `KeyError`
        if there is no such scalar, or the axis is samples and the record does not have them.
        """
        return self.points(name, smooth, axis).to_json(start, end, points, axis)

    def points(self, name: str, smooth: float = 0.0, axis: str = AXES[0]) -> Points:
        """Return all points of a scalar; raises `KeyError` as `curve` does."""
        with self._lock:
            curve = self._run.curves[name].points(smooth)
            if axis != "samples":
                return curve
            samples = self._run.samples_after(curve.done)
        if samples is None:
            raise KeyError("samples")
        return replace(curve, samples=samples)

    @property
    def samples(self) -> float | None:
        """The samples that all steps used, None if the record does not have them."""
        with self._lock:
            return _all_samples(self._run)

    @property
    def started(self) -> float:
        """The Unix time of the first start."""
        return self._run.started or 0.0

    def histogram(self, name: str) -> dict[str, Any]:
        """Return the histograms of a name over the run, evenly, at most 201.

        Each has its step, bins as [edge nearest to zero, count], and counts of other values. Raises
        `KeyError` if there is no such name.
        """
        with self._lock:
            series = list(self._run.histograms[name])
        return {"items": [histogram.to_json() for histogram in series]}

    def timing(
        self, start: float | None = None, end: float | None = None, points: int = 500
    ) -> dict[str, Any]:
        """Return seconds per step by part and worker, as means over at most `points` spans."""
        with self._lock:
            steps = self._run.timings.steps()
        return steps.to_json(start, end, points)

    def system(self, start: float | None = None, end: float | None = None) -> dict[str, Any]:
        """Return the use of each host from `start` to `end`: x is Unix time, at most 500 points."""
        with self._lock:
            columns = self._run.hosts.columns()
        limit = max(FEWEST_SAMPLES, min(MOST_SAMPLES, ALL_SAMPLES // max(1, len(columns))))
        curves = []
        for (host, name), series in columns.items():
            order = np.argsort(series[0], kind="stable")  # the clock may have been set back
            time, value = (column[order] for column in series)
            inside = row_range(time, start, end)
            rows = select_points(time[inside], [value[inside]], [value[inside]], limit)
            x, y = to_list(time[inside][rows]), to_list(value[inside][rows].round(2))
            curves.append({"host": host, "name": name, "x": x, "value": y})
        return {"curves": curves}

    def log(self, worker: int, search: str = "", have: int = 0) -> dict[str, Any]:
        """Return the last lines of a worker's log that have all words of a search.

        They are at most 500 of its last 256 KiB, None if its size is still `have`. Also returns its
        `size`, whether earlier output is `cut`, and the `workers` that have logs. Raises
        `RecordError` if the log cannot be read.
        """
        sizes = self.source.log_sizes()
        size = sizes.get(worker, 0)
        start = max(0, size - LOG_BYTES)
        report = {"workers": sorted(sizes), "size": size, "cut": start > 0, "lines": None}
        if size == 0 or size != have:
            data = self.source.read_log(worker, start, size) if size else b""
            words = search.lower().split()
            lines = [
                line for line in _log_lines(data) if all(word in line.lower() for word in words)
            ]
            report |= {"lines": lines[-LOG_LINES:], "cut": start > 0 or len(lines) > LOG_LINES}
        return report

    def open_image(self, number: int) -> tuple[str | None, int, Iterator[bytes]]:
        """Return an image's media type (see `media_type`), size in bytes, and content in chunks.

        Raises `KeyError` if there is no such image, `RecordError` if it cannot be read.
        """
        with self._lock:
            paths = {
                image.number: image.path for images in self._run.images.values() for image in images
            }
        size, chunks = self.source.open_image(paths[number])
        first = next(chunks, b"")
        return media_type(first), size, chain([first], chunks)


def _log_lines(data: bytes) -> list[str]:
    """Return what a terminal shows of each line: no colors, and the last state of progress bars."""
    lines = _ESCAPE.sub("", data.decode(errors="replace")).split("\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return lines[:-1] if lines[-1] == "" else lines


def media_type(data: bytes) -> str | None:
    """Return the media type of a PNG, JPEG, WebP or GIF by its first bytes, else None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for begin, kind in SIGNATURES.items() if data.startswith(begin)), None)


def _state(run: RunState, now: float, seen: float | None) -> str:
    if run.state not in {"running", "stalled"}:
        return run.state
    gaps = [later - time for (_, time), (_, later) in pairwise(run.paces)]
    usual = median_high(gaps) if gaps else 0.0
    newest = max(run.updated or 0.0, seen or 0.0)  # the clock of another machine may differ
    limit = max(SILENT_SECONDS, SILENT_STEPS * usual)
    if run.state == "stalled":  # no news until the timeout
        config = run.start.get("config")
        timeout = to_number(config.get("timeout")) if isinstance(config, dict) else None
        limit += timeout or 0.0
    return "silent" if now - newest > limit else run.state


def _step_seconds(run: RunState) -> float | None:
    """Return the mean seconds of the newest steps, as the page shows them everywhere.

    A step lasts until the next one begins, with evaluation and all else that the loop does.
    """
    if len(run.paces) < 2:
        return None
    (first, begin), (last, end) = run.paces[0], run.paces[-1]
    return run.timings.seconds() or (end - begin) / (last - first) or None


def _seconds_to_expect(run: RunState) -> float | None:
    """Return the seconds of a step to expect, with evaluations between steps.

    It is the mean since the loop began in this start. If steps became slower since
    then, it is the usual time of the newest ones.
    """
    steps = pairwise(run.paces)
    gaps = [(later - time) / (last - first) for (first, time), (last, later) in steps]
    usual = median(gaps) if gaps else 0.0
    if usual <= 0 or run.loop_pace is None:
        return usual if usual > 0 else None
    (first, begin), (last, end) = run.loop_pace, run.paces[-1]
    return max(usual, (end - begin) / max(1.0, last - first))


def principals(curves: Mapping[str, Curve], score: tuple[str, str] | None) -> dict[str, str]:
    """Return the names of a run's score and loss, each if it has one.

    The `score` is that of `run.snapshot`, with its goal. Losses of an evaluation come first: by
    their names, or because they are rarer and not named after training.
    """
    found = {} if score is None else {"score": score[0]}
    fitting = [name for name in curves if _is_loss(name) and name not in found.values()]
    longest = max((len(curves[name]) for name in fitting), default=0)
    others = [name for name in fitting if not _TRAINED.search(name)]
    rare = (name for name in others if 2 * len(curves[name]) < longest)
    evaluated = (name for name in fitting if _EVALUATED.search(name))
    if (loss := next(chain(evaluated, rare, others, fitting), None)) is not None:
        found["loss"] = loss
    return found


def goal_of(name: str, score: tuple[str, str] | None) -> str | None:
    """Return which values of a scalar are better, "lowest" or "highest", None if unknown."""
    if score is not None and name == score[0]:
        return score[1]
    return "lowest" if _is_loss(name) else None


@lru_cache(4096)
def _is_loss(name: str) -> bool:
    return _LOSS.search(name) is not None


def _progress(run: RunState, *, is_running: bool) -> dict[str, Any]:
    loop, done = run.loop or {}, int(run.step)
    per_epoch = to_int(loop.get("steps_per_epoch")) if loop.get("ends_with_epoch") else None
    steps, batch = to_int(loop.get("steps")), to_int(loop.get("batch_size"))
    if run.loop is not None:
        done = max(0, done - (to_int(loop.get("step")) or 0)) + (to_int(loop.get("done")) or 0)
    seconds = _step_seconds(run) if is_running else None
    expected = _seconds_to_expect(run) if is_running else None
    pace = None if seconds is None else 1 / seconds
    remaining = None if steps is None else max(0, steps - done)
    # if a loop ends with its epoch, the record does not say how many loops follow
    share = None if not steps else 1 - (steps - done) / (per_epoch or steps)
    return {
        "loop": to_text(loop.get("name")),
        "loops": len(run.loops),
        "done": done,
        "steps": None if per_epoch else steps,
        "share": None if share is None else min(1.0, max(0.0, share)),
        "is_of_epoch": bool(per_epoch),
        "epochs": to_int(loop.get("epochs")),
        "samples": None if batch is None else int(SamplePlan.of(loop).used(done)),
        "samples_per_second": None if pace is None or batch is None else pace * batch,
        "steps_per_second": pace,
        "seconds_left": None if expected is None or remaining is None else remaining * expected,
    }


def _all_samples(run: RunState) -> float | None:
    samples = run.samples_after(np.array([run.step]))
    return None if samples is None else float(samples[0])


def _origin(run: RunState) -> dict[str, Any]:
    """Return the job's settings, the versions, hosts, command and commit, as far as known."""
    _, settings, versions = zip(*run.inputs, strict=True) if run.inputs else ((), (), ())
    hosts = dict.fromkeys(to_text(worker.get("host")) for worker in started_workers(run.start))
    environment = _with_changes(versions) if versions and isinstance(versions[-1], dict) else {}
    return {
        "settings": _with_changes(settings) if settings and isinstance(settings[-1], dict) else {},
        # settings are in there as well, for comparisons
        "environment": {
            name: value for name, value in environment.items() if not name.startswith("setting ")
        },
        "hosts": [host for host in hosts if host],
        "command": to_text(run.start.get("command")),
        "commit": run.commit,
    }


def _with_changes(values: Sequence[Any], depth: int = 0) -> Any:
    """Return the last value for JSON; for one that changed when the run resumed, all as text.

    Either may hold: an optimizer keeps what its state has, and all else takes the new value.
    """
    last = values[-1]
    if isinstance(last, dict) and depth < DEEPEST:
        dicts = [value for value in values if isinstance(value, dict)]
        return {
            name: _with_changes([value[name] for value in dicts if name in value], depth + 1)
            for name in last
        }
    texts = [value if isinstance(value, str) else _text(value) for value in values]
    different = [text for text, _ in groupby(texts)]
    if len(different) == 1 or isinstance(last, dict):
        return _config(last, depth)
    return " → ".join(different)


def _defaults(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that have their default values."""
    defaults = {option.name: option.default for option in fields(Config)}
    return [
        name
        for name, value in config.items()
        if name in defaults and _text(value) == _text(defaults[name])
    ]


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


def _config(value: object, depth: int = 0) -> Any:
    """Return a value of the configuration for JSON."""
    if depth == DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {name: _config(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_config(inner, depth + 1) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
