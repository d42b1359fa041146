"""Events in plain words."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samestep.record.source import STARTS
from samestep.watch.numbers import real, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LONGEST_TEXT: Final = 1000
_KNOWN: Final = {"time", "event", "step"}
GOOD, BAD, INFO = "good", "bad", "info"


@dataclass(frozen=True)
class Words:
    """How a kind of event is told: `text` makes it of the event's fields."""

    tone: str
    text: Callable[[Mapping[str, Any]], str]


def told(event: Mapping[str, Any], kind: str, before: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return an event's text and tone; `before` is the newest start that came before."""
    if kind in STARTS:
        return _start(event, kind, before)[:LONGEST_TEXT], INFO
    words = WORDS.get(kind)
    if words is None:
        return f"{kind.replace('_', ' ')}{_details(event)}"[:LONGEST_TEXT], BAD if kind.endswith(
            ("failed", "rejected")
        ) else INFO
    return words.text(event)[:LONGEST_TEXT], BAD if event.get("error") else words.tone


def _start(event: Mapping[str, Any], kind: str, before: Mapping[str, Any] | None) -> str:
    count = _workers(event)
    lanes = f", {event['lanes']} lanes" if isinstance(event.get("lanes"), int) else ""
    if kind == "started":
        return f"started with {_counted(count, 'worker')}{lanes}"
    text = f"resumed at step {event.get('step')} with {_counted(count, 'worker')}"
    if before is not None and _workers(before) != count:
        text += f": resized from {_workers(before)} to {_counted(count, 'worker')}"
    return text


def _workers(start: Mapping[str, Any]) -> int:
    workers = start.get("workers")
    return len(workers) if isinstance(workers, list) else 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _stopped(event: Mapping[str, Any]) -> str:
    number = event.get("signal")
    if not number:
        return f"stopped at step {event.get('step')}, as asked for"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"stopped at step {event.get('step')} by {name}"


def _who(event: Mapping[str, Any]) -> str:
    host = event.get("host")
    return f"worker {event.get('rank')}" + (f" on {host}" if host else "")


def _loop(event: Mapping[str, Any]) -> str:
    done, steps = whole(event.get("done")), whole(event.get("steps"))
    if not done:
        return f"loop {event.get('name')} begins" + (
            "" if steps is None else f": {_counted(steps, 'step')}"
        )
    return f"loop {event.get('name')} goes on after {done} " + (
        "steps" if steps is None else f"of {_counted(steps, 'step')}"
    )


def _sink(event: Mapping[str, Any]) -> str:
    if event.get("error"):
        return f"sink {event.get('name')} failed: {event['error']}"
    dropped = event.get("dropped")
    behind = f"sink {event.get('name')} is {event.get('behind_bytes') or 0} bytes behind"
    return behind + (f", {dropped} dropped" if dropped else "")


def _snapshot(event: Mapping[str, Any]) -> str:
    score = real(event.get("score"))
    return f"snapshot of step {event.get('step')}" + (
        "" if math.isnan(score) else f", score {score:.6g}"
    )


def _details(event: Mapping[str, Any]) -> str:
    fields = [
        f"{name} {value}"
        for name, value in event.items()
        if name not in _KNOWN and isinstance(value, (str, int, float))
    ]
    return ": " + ", ".join(fields) if fields else ""


WORDS: Final[Mapping[str, Words]] = {
    "finished": Words(GOOD, lambda event: f"finished after {event.get('step')} steps"),
    "stopped": Words(INFO, _stopped),
    "failed": Words(
        BAD, lambda event: f"{_who(event)} failed at step {event.get('step')}: {event.get('error')}"
    ),
    "restarting": Words(
        BAD,
        lambda event: (
            f"{_who(event)}: {event.get('reason')}; all workers start again from step {event.get('step')}"
        ),
    ),
    "snapshot": Words(GOOD, _snapshot),
    "loop": Words(INFO, _loop),
    "sink": Words(INFO, _sink),
    "images_dropped": Words(
        BAD,
        lambda event: (
            f"{event.get('count')} images were dropped, since writing them could not keep up"
        ),
    ),
    "snapshot_rejected": Words(
        BAD, lambda event: f"passed over snapshot {event.get('path')}: {event.get('reason')}"
    ),
    "snapshot_copied": Words(
        GOOD, lambda event: f"snapshot of step {event.get('step')} copied to remote storage"
    ),
}
