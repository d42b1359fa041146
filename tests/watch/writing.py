"""Records as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.record.source import open_source
from samestep.watch.view import View

START = 1_700_000_000.0


def started(
    step: int = 0, *, kind: str = "started", workers: int = 2, lanes: int = 8, **fields: Any
) -> dict[str, Any]:
    """Return the event of a start."""
    team = [{"rank": rank, "host": "here", "pid": 100 + rank} for rank in range(workers)]
    base = {
        "event": kind,
        "attempt": "a",
        "step": step,
        "lanes": lanes,
        "workers": team,
        "devices": ["cpu"],
        "torch": "2.13.0",
    }
    return {**base, "config": {"lanes": lanes, "timeout": "inf"}, **fields}


def scalars(step: int, **values: Any) -> dict[str, Any]:
    """Return the event of a step's scalars."""
    return {
        "event": "scalars",
        "step": step,
        "epoch": step // 4,
        "values": values,
        "low": {},
        "high": {},
    }


def snapshot(step: int, score: float | None = None) -> dict[str, Any]:
    """Return the event of a snapshot after `step` steps."""
    return {"event": "snapshot", "step": step, "path": f"step-{step:08}", "score": score}


def timing(step: int, *workers: tuple[float, ...]) -> dict[str, Any]:
    """Return a timing event. Each worker has seconds of each part, in the order of `parts`."""
    parts = ("data", "compute", "exchange", "optimizer", "snapshot")
    return {
        "event": "timing",
        "step": step,
        "workers": [dict(zip(parts, seconds, strict=True)) for seconds in workers],
    }


def system(host: str, **fields: Any) -> dict[str, Any]:
    """Return a sample of a host with 16 GB of memory, half of it used, and one GPU."""
    gpu = {"use": 0.5, "memory": 3e9, "memory_total": 12e9}
    shares = {"cpu": 0.25, "memory": 8e9, "memory_total": 16e9, "gpus": [gpu]}
    return {"event": "system", "host": host, **shares, "disk_read": 2_000_000, **fields}


def histogram(step: int, name: str, *bins: tuple[float, int], **fields: Any) -> dict[str, Any]:
    """Return the event of a histogram."""
    others = {"nan": 0, "inf": 0, "-inf": 0, **fields}
    return {"event": "histogram", "step": step, "name": name, "bins": bins, **others}


def loop(step: int, **fields: Any) -> dict[str, Any]:
    """Return the event of a training loop."""
    return {"event": "loop", "name": "train", "step": step, "epoch": 0, "done": 0, **fields}


def write(
    directory: Path, *events: dict[str, Any], seconds: float = 1.0, start: float = START
) -> None:
    """Append events to a run's record, `seconds` apart."""
    directory.mkdir(exist_ok=True)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(lines(*events, seconds=seconds, start=start))


def lines(*events: dict[str, Any], seconds: float = 1.0, start: float = START) -> bytes:
    """Return events as lines of a record, `seconds` apart."""
    timed = ({"time": start + number * seconds, **event} for number, event in enumerate(events))
    return b"".join(json.dumps(event).encode() + b"\n" for event in timed)


def view_of(directory: Path, *events: dict[str, Any], **options: Any) -> View:
    """Append events to a run's record, and return a view that has read it."""
    write(directory, *events, **options)
    view = View(open_source(directory))
    view.refresh()
    return view
