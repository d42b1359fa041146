"""Records as a run writes them, and odd ones as nobody does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

START = 1_700_000_000.0


def started(
    step: int = 0, *, kind: str = "started", workers: int = 2, lanes: int = 8, **fields: Any
) -> dict[str, Any]:
    """Make the event of a start."""
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
    """Make the event of a step's scalars."""
    return {
        "event": "scalars",
        "step": step,
        "epoch": step // 4,
        "values": values,
        "low": {},
        "high": {},
    }


def timing(step: int, *workers: tuple[float, ...]) -> dict[str, Any]:
    """Make the event of a step's seconds: data, compute, exchange, optimizer, snapshot, by worker."""
    parts = ("data", "compute", "exchange", "optimizer", "snapshot")
    return {
        "event": "timing",
        "step": step,
        "workers": [dict(zip(parts, seconds, strict=True)) for seconds in workers],
    }


def write(
    directory: Path, *events: dict[str, Any], seconds: float = 1.0, start: float = START
) -> None:
    """Append events to a run's record, one each `seconds`."""
    directory.mkdir(exist_ok=True)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(lines(*events, seconds=seconds, start=start))


def lines(*events: dict[str, Any], seconds: float = 1.0, start: float = START) -> bytes:
    """Return events as a record has them."""
    timed = ({"time": start + number * seconds, **event} for number, event in enumerate(events))
    return b"".join(json.dumps(event).encode() + b"\n" for event in timed)
