"""A run's state as JSON: the row of a list of runs, and all that the page shows of one but its curves."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

from samestep.record.record import PARTS
from samestep.watch.numbers import whole
from samestep.watch.timings import OTHER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.watch.run_state import RunState

Item = TypeVar("Item")

SILENT_SECONDS: Final = 60.0
SILENT_STEPS: Final = 5
CLEARLY_SLOWER: Final = 1.1  # than the median of all workers
MOST_ITEMS: Final = 2000  # images of a name, and events, that are listed
DEEPEST: Final = 4  # values of the configuration within each other


def row(run: RunState, now: float, seen: float | None) -> dict[str, Any]:
    """Return what a list of runs tells of one; `seen` is when something new was read last."""
    return {
        "state": _state(run, now, seen),
        "started": run.started,
        "updated": run.updated,
        "step": int(run.step),
        "epoch": run.epoch,
        "workers": len(_told_workers(run)),
        "lanes": whole(run.start.get("lanes")),
    }


def summary(run: RunState, now: float, seen: float | None) -> dict[str, Any]:
    """Return where a run stands."""
    top = row(run, now, seen)
    return {
        **top,
        "now": now,
        "attempts": run.attempts,
        "torch": _text(run.start.get("torch")),
        "devices": _texts(run.start.get("devices")),
        "progress": _progress(run, is_running=top["state"] == "running"),
        "scalars": [
            {"name": name, "points": len(curve), **curve.extremes()}
            for name, curve in run.curves.items()
        ],
        "images": _images(run),
        "workers": _workers(run),
        "parts": run.timings.parts(),
        "events": [vars(line) for line in run.lines[:1] + run.lines[1:][-MOST_ITEMS:]],
        "config": _shown(run.start.get("config"))
        if isinstance(run.start.get("config"), dict)
        else {},
        "sinks": [_sink(name, event) for name, event in run.sinks.items()],
        "dropped_images": run.dropped_images,
    }


def lanes_of(rank: int, workers: int, lanes: int) -> tuple[int, int]:
    """Return the lanes [first, end) that a worker carries: those of `samestep.step.tree.lanes_of`, which stands below this part."""
    return rank * lanes // workers, (rank + 1) * lanes // workers


def _state(run: RunState, now: float, seen: float | None) -> str:
    if run.state != "running":
        return run.state
    newest = max(run.updated or 0.0, seen or 0.0)  # the clock of another machine may differ
    return (
        "silent"
        if now - newest > max(SILENT_SECONDS, SILENT_STEPS * run.usual_seconds)
        else "running"
    )


def _progress(run: RunState, *, is_running: bool) -> dict[str, Any]:
    loop, seconds = run.loop or {}, run.step_seconds
    done = (
        None
        if run.loop is None
        else (whole(loop.get("done")) or 0) + max(0, int(run.step) - (whole(loop.get("step")) or 0))
    )
    steps, batch = whole(loop.get("steps")), whole(loop.get("batch_size"))
    pace = 1 / seconds if seconds and is_running else None
    return {
        "loop": _text(loop.get("name")),
        "done": int(run.step) if done is None else done,
        "steps": steps,
        "epochs": whole(loop.get("epochs")),
        "samples": _samples(loop, done, batch),
        "samples_per_second": None if pace is None or batch is None else pace * batch,
        "steps_per_second": pace,
        "seconds_left": None
        if pace is None or steps is None or done is None
        else max(0, steps - done) / pace,
    }


def _samples(loop: Mapping[str, Any], done: int | None, batch: int | None) -> int | None:
    """Return how many samples a loop has used: the last batch of an epoch may be short."""
    if done is None or batch is None:
        return None
    size, steps = whole(loop.get("samples")), whole(loop.get("steps_per_epoch"))
    if not size or not steps:
        return done * batch
    return done // steps * size + min(done % steps * batch, size)


def _workers(run: RunState) -> list[dict[str, Any]]:
    told = _told_workers(run)
    lanes = whole(run.start.get("lanes")) or 0
    timed = run.timings.workers()
    slowest = _slowest([worker["seconds"] or 0.0 for worker in timed])
    unknown = {"seconds": None, "parts": dict.fromkeys((*PARTS, OTHER))}
    return [
        {
            "rank": rank,
            "host": _text(worker.get("host")),
            "pid": whole(worker.get("pid")),
            "devices": _texts(worker.get("devices", run.start.get("devices"))),
            "lanes": list(lanes_of(rank, len(told), lanes)),
            **(timed[rank] if rank < len(timed) else unknown),
            "slowest": rank == slowest,
        }
        for rank, worker in enumerate(told)
    ]


def _told_workers(run: RunState) -> list[dict[str, Any]]:
    told = run.start.get("workers")
    return (
        [worker if isinstance(worker, dict) else {} for worker in told]
        if isinstance(told, list)
        else []
    )


def _slowest(seconds: Sequence[float]) -> int | None:
    """Return who is clearly slower than most, None where nobody is."""
    # there are others
    if len(seconds) < 2 or max(seconds) <= CLEARLY_SLOWER * median(seconds):
        return None
    return seconds.index(max(seconds))


def _images(run: RunState) -> list[dict[str, Any]]:
    names: dict[str, list[dict[str, Any]]] = {}
    for image in run.images.values():
        item = {
            "number": image.number,
            "step": image.step,
            "width": image.width,
            "height": image.height,
            "bytes": image.size,
        }
        names.setdefault(image.name, []).append(item)
    return [{"name": name, "items": thinned(items, MOST_ITEMS)} for name, items in names.items()]


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Return every, or every second, fourth, eighth, … item and the last one: at most `most` + 1, and mostly the same when more come."""
    stride = 1
    while len(items) > most * stride:
        stride *= 2
    some = list(items[::stride])
    return some if (len(items) - 1) % stride == 0 else [*some, items[-1]]


def _sink(name: str, event: Mapping[str, Any]) -> dict[str, Any]:
    behind, dropped = whole(event.get("behind_bytes")), whole(event.get("dropped")) or 0
    return {
        "name": name,
        "behind_bytes": behind,
        "dropped": dropped,
        "error": _text(event.get("error")),
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _shown(value: object, depth: int = 0) -> Any:
    """Return a value of the configuration as JSON has it."""
    if depth == DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {name: _shown(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner, depth + 1) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
