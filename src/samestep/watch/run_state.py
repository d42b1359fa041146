"""The state of a run, built from the events of its record one at a time, and events as text."""

from __future__ import annotations

import math
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from samestep.host import counted
from samestep.record.events import NON_FINITE
from samestep.record.source import STARTS, StepPosition, step_position, valid_until
from samestep.watch.curves import Curve, HostUse, spread, to_float, to_int, to_number, to_text
from samestep.watch.scalars import MOST_SCALARS, ScalarEvent, Scalars
from samestep.watch.score import NAME, Score
from samestep.watch.timings import MOST_TIMED, RECENT, Timings, seconds_of, started_workers

Event: TypeAlias = Mapping[str, Any]

STATES: Final = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "restarting": "running",
    "stalled": "stalled",
    "forked": "stopped",  # until it is started
}
# samples of hosts, taken by threads: they say nothing about the run's progress
SYSTEM: Final = "system"
# events of other processes and threads, which go on while workers wait
APART: Final = ("sink", "image", "images_dropped")
LONGEST_TEXT: Final = 1000
MOST_CHANGES: Final = 8  # of settings, that are shown
MOST_NAMES: Final = 10_000  # of images, and of histograms
MOST_EVENTS: Final = 2000  # on the timeline
MOST_KINDS: Final = 50  # of them, of which the rare ones are kept
MOST_IMAGES: Final = 2000  # per name
MOST_HISTOGRAMS: Final = 200  # per name, fewer if all would take more than `HISTOGRAM_BYTES`
HISTOGRAM_BYTES: Final = 2**25
GOOD, BAD, INFO = "good", "bad", "info"


@dataclass(frozen=True, slots=True)
class Image:
    """An image event. `number` counts all image events of the record, even invalidated ones."""

    number: int
    name: str
    position: StepPosition
    path: str
    width: int
    height: int
    size: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "step": int(self.position[0]),
            "bytes": self.size,
            "width": self.width,
            "height": self.height,
        }


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram event: `bins` [n, 2] has the edge and count of each bin, `others` NaN etc."""

    position: StepPosition
    bins: NDArray[np.float64]
    others: dict[str, int]

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return self.bins.nbytes + 500

    def to_json(self) -> dict[str, Any]:
        return {"step": int(self.position[0]), "bins": self.bins.tolist(), **self.others}


Item = TypeVar("Item", Image, Histogram)


@dataclass(frozen=True)
class TimelineEvent:
    """An event on the timeline; `detail` is further text, such as a traceback."""

    time: float
    kind: str
    step: int | None
    text: str
    severity: str
    detail: str | None


@dataclass(frozen=True)
class SamplePlan:
    """How many samples the steps of a loop use, from `step` on, when `done` of its were complete.

    The last batch of an epoch of `steps` steps and `size` samples may be short; both are 0 if the
    record does not have them.
    """

    step: float
    done: float
    batch: float
    size: float
    steps: float

    @classmethod
    def of(cls, loop: Event) -> SamplePlan:
        step, done, batch, size, steps = (
            float(to_int(loop.get(key)) or 0)
            for key in ("step", "done", "batch_size", "samples", "steps_per_epoch")
        )
        return cls(step, done, batch, *((size, steps) if size and steps else (0.0, 0.0)))

    def used(self, done: NDArray[Any] | float) -> Any:
        """Return the samples of the loop's first `done` steps, float64 of the same shape."""
        epochs, rest = np.divmod(done, self.steps or math.inf)
        return epochs * self.size + np.minimum(rest * self.batch, self.size or math.inf)

    def samples(self, step: NDArray[Any]) -> NDArray[Any]:
        """Return the samples of the steps from `self.step` to each of `step`, float64 [N]."""
        samples: NDArray[Any] = self.used(step - self.step + self.done) - self.used(self.done)
        return samples

    def goes_on_as(self, other: SamplePlan) -> bool:
        """Return whether a later plan is this one, continued."""
        is_same = (self.batch, self.size, self.steps) == (other.batch, other.size, other.steps)
        shift = (other.step - other.done) - (self.step - self.done)
        return is_same and (not self.steps or shift % self.steps == 0)


class RunState:
    """The state of a run after some of its events, with its curves, timings, images and timeline.

    A start removes the events that it invalidates, as `samestep.record.read_history` does. `flush`
    bounds the memory of curves, timings, histograms and samples of hosts.
    """

    def __init__(self) -> None:
        self.scalars = Scalars()
        self.score = Score()
        self.timings = Timings()
        self.hosts = HostUse()
        self.images: dict[str, list[Image]] = {}
        self.histograms: dict[str, list[Histogram]] = {}
        self.timeline: list[TimelineEvent] = []
        self.dropped_events = 0  # of the timeline
        self.sinks: dict[str, Event] = {}
        self.dropped_images = 0
        self.state = "running"
        self.started: float | None = None
        self.updated: float | None = None
        self.start: Event = {}
        self.has_strided_lanes = False  # of each worker: a model is sharded
        # of the starts that changed settings: the step, settings and environment
        self.inputs: list[tuple[float, Any, Any]] = []
        self.commit: str | None = None  # of git
        self.attempts = 0
        self.step = 0.0
        self.epoch: int | None = None
        self.loop: Event | None = None
        self.loops: set[str] = set()  # the names of all
        self.forked: Event | None = None  # from which run, and at which step
        self.plans: list[SamplePlan] = []  # of the loops, where they differ
        self.paces: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)  # (steps done, time)
        self.loop_pace: tuple[float, float] | None = None  # the first one of the current loop
        self.failures: list[Event] = []  # since the last start
        self.stall: str | None = None  # why the run was stalled last
        self.skipped_lines = 0
        self._earlier_seconds = 0.0  # of all starts before the last one
        self._started_at: float | None = None  # the last start
        self._trained: tuple[Event, Event] | None = None  # the last start with a loop, and the loop
        self._trained_inputs = self.inputs  # until then
        self._image_count = 0
        self._is_cut = False  # there are more scalars than are shown
        self._most_histograms = MOST_HISTOGRAMS

    def skip_lines(self, count: int) -> None:
        """Count lines that are torn or no events."""
        self.skipped_lines += count

    def apply(self, *events: dict[str, Any]) -> None:
        """Apply the next events. Fields and events that no run writes are ignored."""
        for event in events:
            kind, time = event.get("event"), to_number(event.get("time"))
            if not isinstance(kind, str) or time is None:
                continue
            if kind == SYSTEM:
                self.hosts.append(time, event)
            else:
                self._apply(event, kind, time)
        self.scalars.append_rows()
        if self.scalars.is_cut and not self._is_cut:
            self._is_cut = True
            text = f"more than {MOST_SCALARS} scalars: the others are not shown"
            self._list(TimelineEvent(self.updated or 0.0, "many", int(self.step), text, BAD, None))

    def _apply(self, event: dict[str, Any], kind: str, time: float) -> None:
        before, self.updated = self.updated, time
        if self.state == "stalled" and kind not in APART:
            self.state = "running"
        begins = kind in STARTS or kind == "forked"  # long after the trunk's last event
        if begins and before is not None:
            self._earlier_seconds += max(0.0, before - (self._started_at or before))
        if self._started_at is None or begins:
            self._started_at = time
        if kind == "scalars":
            self._add_scalars(event, time)
        elif kind == "timing":
            self._add_timing(event, time)
        elif kind == "image":
            self._add_image(event)
        elif kind == "histogram":
            self._add_histogram(event)
        elif kind in STARTS:
            self._start(event, kind, time)
        elif self._update(event, kind):
            self._add_to_timeline(event, kind, time)

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of scalars by name, with that of the score if no scalar is it."""
        scalars, principal = self.scalars.curves, self.principal
        return {**scalars, NAME: self.score.curve} if principal == (NAME, "highest") else scalars

    @property
    def principal(self) -> tuple[str, str] | None:
        """The name of the score, and whether its best value is the "highest" or the "lowest"."""
        return self.score.scalar(self.scalars.curves)

    @property
    def elapsed(self) -> float | None:
        """The seconds from each start to the last event before the next one, without the gaps.

        A start after which the clock was set back counts as no time.
        """
        if self._started_at is None or self.updated is None:
            return None
        return self._earlier_seconds + max(0.0, self.updated - self._started_at)

    def samples_after(self, steps: NDArray[Any]) -> NDArray[Any] | None:
        """Return the samples that all loops used in their first `steps` steps, float64 [N].

        None if a loop has no batch size: then the record does not say.
        """
        if not self.plans or any(not plan.batch for plan in self.plans):
            return None
        ends = (*(plan.step for plan in self.plans[1:]), math.inf)
        total = np.zeros(len(steps))
        for plan, end in zip(self.plans, ends, strict=True):
            total += plan.samples(steps.clip(plan.step, end))
        return total

    def _plan_samples(self, loop: Event) -> None:
        """Note how many samples the steps of a loop use, unless the one before says the same."""
        plan = SamplePlan.of(loop)
        if not self.plans or not self.plans[-1].goes_on_as(plan):
            self.plans = [earlier for earlier in self.plans if earlier.step < plan.step] + [plan]

    def _update(self, event: dict[str, Any], kind: str) -> bool:
        """Apply an event of the run itself, and return whether it belongs on the timeline."""
        self.state = STATES.get(kind, self.state)
        self.has_strided_lanes |= kind == "sharded_model"
        if kind == "finished" and self._trained is not None and self._made_no_step(event):
            self.start, self.loop = self._trained
            self.inputs = self._trained_inputs
            self.epoch = _last_epoch(self.loop, self.epoch, to_number(event.get("step")))
            self.timings.restore()
        if kind != "restarting":
            self._reach(to_number(event.get("step")))
        if kind == "failed":
            self.failures.append(event)
        if kind == "snapshot":
            self._add_score(event)
        if kind == "stalled":
            self.stall = to_text(event.get("reason"))
        if kind == "images_dropped":
            self.dropped_images += to_int(event.get("count")) or 0
        if kind == "sink":
            name = str(event.get("name"))
            before, self.sinks[name] = self.sinks.get(name, {}), event
            # a change of `behind_bytes` alone is not news
            return any(before.get(field) != event.get(field) for field in ("error", "dropped"))
        if kind == "state":
            return False  # of a snapshot, which is there
        if kind == "loop":
            before, self.loop, self.loop_pace = self.loop or {}, event, None
            self.loops.add(str(event.get("name")))
            self._plan_samples(event)
            self.epoch = to_int(event.get("epoch"))
            return before.get("name") != event.get("name")  # many loops start again each epoch
        return True

    def _add_score(self, event: Event) -> None:
        step, score = to_number(event.get("step")), to_float(event.get("score"))
        if step is not None and math.isfinite(score):
            self.scalars.append_rows()
            self.score.add(step, to_float(event["time"]), score, self.scalars.curves)

    def _made_no_step(self, end: Event) -> bool:
        """Return whether the last start only evaluated, or found the run finished."""
        return self.loop is None or to_number(end.get("step")) == to_number(self.start.get("step"))

    def _start(self, event: dict[str, Any], kind: str, time: float) -> None:
        step, between = valid_until(event)
        last = to_float(step), between
        self.scalars.discard_after(last)
        self.score.discard_after(last)
        self.timings.discard_after(last, trained=self.loop is not None)
        self.images = _until(last, self.images)
        self.histograms = _until(last, self.histograms)
        self.started = time if self.started is None else self.started
        self._add_to_timeline(event, kind, time)
        if self.loop is not None:
            self._trained, self._trained_inputs = (self.start, self.loop), self.inputs
        self._add_inputs(event, step)
        self.plans = [plan for plan in self.plans if plan.step < step]
        self.state, self.start, self.loop, self.loop_pace = "running", event, None, None
        self.has_strided_lanes = False
        if "commit" in event:  # not after a worker was replaced
            self.commit = to_text(event["commit"])
            if self.commit and event.get("dirty"):
                self.commit += ", with changes"
        self.epoch = to_int(event.get("epoch"))
        self.step = to_number(event.get("step")) or 0.0
        self.attempts += 1
        self.paces.clear()
        self.failures.clear()

    def _add_inputs(self, start: Event, last: float) -> None:
        """Note the settings of a start that keeps the steps until `last`.

        Those of a start without a step since then have no effect on the state.
        """
        kept = [inputs for inputs in self.inputs if inputs[0] < last]
        new = to_float(last), start.get("settings"), start.get("environment")
        if not kept or kept[-1][1:] != new[1:]:
            kept.append(new)
        self.inputs = [*kept[:1], *kept[1:][-MOST_CHANGES:]]

    def _add_scalars(self, event: dict[str, Any], time: float) -> None:
        position, values = _position(event), event.get("values")
        if position is None or not isinstance(values, dict):
            return
        bands = event.get("low"), event.get("high")
        low, high = (band if isinstance(band, dict) else {} for band in bands)
        self.scalars.add(ScalarEvent(position, time, values, low, high))
        epoch, is_between = to_int(event.get("epoch")), not position[1]
        if is_between and epoch:  # the number of the next epoch, which may not follow
            epoch = max(self.epoch or 0, epoch - 1)
        self.epoch = epoch
        self._reach(position[0], time)

    @property
    def nbytes(self) -> int:
        """The bytes of all that `flush` bounds."""
        bounded = (self.scalars, self.score.curve, self.timings, self.hosts)
        return sum(part.nbytes for part in bounded) + self._histogram_bytes()

    def flush(self, rows: int) -> None:
        """Keep curves, timings and samples in arrays, of at most `rows` rows each."""
        for part in (self.scalars, self.score.curve, self.timings, self.hosts):
            part.flush(rows)
        while self._histogram_bytes() > HISTOGRAM_BYTES and self._most_histograms > 1:
            self._most_histograms //= 2
            for series in self.histograms.values():
                _bound(series, self._most_histograms)

    def _histogram_bytes(self) -> int:
        return sum(each.nbytes for series in self.histograms.values() for each in series)

    def _add_timing(self, event: dict[str, Any], time: float) -> None:
        position, workers = _position(event), event.get("workers")
        if position is None:
            return
        if isinstance(event.get("quantiles"), dict) and self.timings.append_summary(
            position[0], time, event
        ):
            self._reach(position[0] + 1, time)
        if not isinstance(workers, list) or not 0 < len(workers) <= MOST_TIMED:
            return
        if all(isinstance(worker, dict) for worker in workers):
            seconds = [seconds_of(worker) for worker in workers]
            self.timings.append(position[0], time, seconds)
            self._reach(position[0] + 1, time)

    def _add_image(self, event: dict[str, Any]) -> None:
        position, path, name = _position(event), event.get("path"), str(event.get("name"))
        if position is None or not isinstance(path, str):
            return
        number, size = self._image_count, to_int(event.get("bytes"))
        width, height = (to_int(event.get(field)) or 0 for field in ("width", "height"))
        self._image_count += 1
        if name in self.images or len(self.images) < MOST_NAMES:
            series = self.images.setdefault(name, [])
            series.append(Image(number, name, position, path, width, height, size))
            _bound(series, MOST_IMAGES)

    def _add_histogram(self, event: dict[str, Any]) -> None:
        position = _position(event)
        try:
            bins = np.array(event.get("bins"), dtype=np.float64).reshape(-1, 2)
        except (OverflowError, TypeError, ValueError):
            return
        name = str(event.get("name"))
        is_shown = name in self.histograms or len(self.histograms) < MOST_NAMES
        if position is not None and np.isfinite(bins).all() and is_shown:
            others = {key: to_int(event.get(key)) or 0 for key in NON_FINITE}
            series = self.histograms.setdefault(name, [])
            series.append(Histogram(position, bins, others))
            _bound(series, self._most_histograms)

    def _reach(self, step: float | None, time: float | None = None) -> None:
        """Record that `step` steps are done, and the time if it is known."""
        if step is None or step <= self.step:
            return
        self.step = step
        if time is not None:
            self.paces.append((step, time))
            self.loop_pace = self.loop_pace or (step, time)

    def _add_to_timeline(self, event: Event, kind: str, time: float) -> None:
        text, severity = describe(event, kind, self.start)
        step, detail = to_int(event.get("step")), to_text(event.get("traceback"))
        if kind == "loss_alert":
            detail = _describe_samples(event)
        if kind == "forked":
            self.forked = event
        self._list(TimelineEvent(time, kind, step, text, severity, detail))

    def _list(self, event: TimelineEvent) -> None:
        """Append an event to the timeline; of too many, older ones of the most frequent kind go."""
        self.timeline.append(event)
        if len(self.timeline) > MOST_EVENTS:
            later = self.timeline[1:]
            ((kind, count),) = Counter(event.kind for event in later).most_common(1)
            rows = [row for row, event in enumerate(later, 1) if event.kind == kind]
            if count < MOST_EVENTS // MOST_KINDS:  # no run has as many kinds
                rows = list(range(1, len(self.timeline)))
            dropped = set(rows[: (len(rows) + 1) // 2])
            self.timeline = [event for row, event in enumerate(self.timeline) if row not in dropped]
            self.dropped_events += len(dropped)


def _until(last: StepPosition, items: Mapping[str, list[Item]]) -> dict[str, list[Item]]:
    """Return the items of each name until a position, without names that have none."""
    kept = {
        name: [each for each in series if each.position <= last] for name, series in items.items()
    }
    return {name: series for name, series in kept.items() if series}


def _bound(series: list[Item], limit: int) -> None:
    """Keep at most `limit` items and the last one."""
    if len(series) > limit + 1:
        series[:] = spread(series, [item.position[0] for item in series], max(1, limit // 2))


def _last_epoch(loop: Event, following: int | None, step: float | None) -> int | None:
    """Return the epoch of a loop's last step, after which `step` steps are done in all.

    `following` is the epoch of the step after it, which is one more if the epoch was complete.
    """
    begin, epoch = to_number(loop.get("step")), to_int(loop.get("epoch"))
    size, done = to_int(loop.get("steps_per_epoch")), to_int(loop.get("done")) or 0
    if step is None or begin is None or epoch is None or not size:
        return following
    return epoch + int(max(0.0, done % size + step - begin - 1) // size)


def _position(event: dict[str, Any]) -> StepPosition | None:
    return None if to_number(event.get("step")) is None else step_position(event)


def describe(event: Event, kind: str, before: Event) -> tuple[str, str]:
    """Return the text and severity of an event; `before` is the previous start, empty if none."""
    if kind in STARTS:
        text, severity = _describe_start(event, kind, before), INFO
    elif kind in DESCRIPTIONS:
        usual, template = DESCRIPTIONS[kind]
        rank, host = event.get("rank"), event.get("host")
        worker = f"worker {rank} on {host}" if host else f"worker {rank}"
        fields = defaultdict(lambda: None, {**event, "worker": worker})
        if kind == "failed":
            fields["error"] = _first_line(event.get("error"))
            fields["when"] = f"at step {event['step']}" if "step" in event else "at the start"
        text = template.format_map(fields) if isinstance(template, str) else template(event)
        severity = BAD if event.get("error") else usual
    else:
        text = kind.replace("_", " ") + _describe_fields(event)
        severity = BAD if kind.endswith(("failed", "rejected")) else INFO
    return text[:LONGEST_TEXT], severity


def _describe_start(event: Event, kind: str, before: Event) -> str:
    workers, workers_before = len(started_workers(event)), len(started_workers(before))
    count, lanes = counted(workers, "worker"), event.get("lanes")
    if kind == "started":
        return ", ".join(
            [f"started with {count}", *([counted(lanes, "lane")] if isinstance(lanes, int) else [])]
        )
    text = f"resumed at step {event.get('step')} with {count}"
    if before and workers_before != workers:
        text += f": resized from {workers_before} to {count}"
    return text


def cause(failures: Sequence[Event]) -> dict[str, str | None] | None:
    """Return the text and traceback of the failure that caused the others, None without any.

    The text is one line. It names a worker only if the error is that worker's own: all workers
    raise an error such as NaN, and a hang is reported by a worker that waited for another.
    """
    primary = [
        failure
        for failure in failures
        if not failure.get("is_secondary", _is_of(failure, "WorldError"))
    ]
    failure = next(iter([*primary, *failures]), None)
    if failure is None:
        return None
    text, trace = _first_line(failure.get("error")), to_text(failure.get("traceback"))
    others = [other for other in primary if other != failure]
    is_shared = any(_first_line(other.get("error")) == text for other in others)
    if not is_shared and not _is_of(failure, "HangError"):
        host = failure.get("host")
        text += f" (worker {failure.get('rank')}{f' on {host}' if host else ''})"
    return {"text": text[:LONGEST_TEXT], "detail": trace}


def _is_of(failure: Event, kind: str) -> bool:
    return str(failure.get("error")).startswith(kind)


def _first_line(text: object) -> str:
    return str(text).partition("\n")[0]


def _describe_stop(event: Event) -> str:
    number = event.get("signal")
    if not number:
        return f"stopped at step {event.get('step')} on request"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"stopped at step {event.get('step')} by {name}"


def _describe_loop(event: Event) -> str:
    done, steps = to_int(event.get("done")), to_int(event.get("steps"))
    total = None if steps is None else counted(steps, "step")
    if not done:
        return f"loop {event.get('name')} starts" + (f": {total}" if total else "")
    return f"loop {event.get('name')} continues after {done} {f'of {total}' if total else 'steps'}"


def _describe_sink(event: Event) -> str:
    if event.get("error"):
        return f"sink {event.get('name')} failed: {event['error']}"
    dropped = event.get("dropped")
    behind = f"sink {event.get('name')} is {event.get('behind_bytes') or 0} bytes behind"
    return behind + (f", {dropped} dropped" if dropped else "")


def _describe_snapshot(event: Event) -> str:
    score = to_float(event.get("score"))
    suffix = "" if math.isnan(score) else f", score {score:.6g}"
    return f"snapshot of step {event.get('step')}{suffix}"


def _describe_samples(event: Event) -> str | None:
    """Return the samples of an alert, and the command that repeats its step."""
    samples, lines = event.get("samples"), list[str]()
    if isinstance(samples, list) and samples:
        lines.append(f"samples {', '.join(map(str, samples))}"[:LONGEST_TEXT])
    if command := to_text(event.get("replay")):
        lines.append(command)
    return "\n".join(lines) or None


def _describe_fields(event: Event) -> str:
    fields = [
        f"{name} {value}"
        for name, value in event.items()
        if name not in {"time", "event", "step"} and isinstance(value, (str, int, float))
    ]
    return ": " + ", ".join(fields) if fields else ""


# severity, and text: a template of the event's fields, or a function
DESCRIPTIONS: Final[Mapping[str, tuple[str, str | Callable[[Event], str]]]] = {
    "finished": (GOOD, "finished after {step} steps"),
    "stopped": (INFO, _describe_stop),
    "failed": (BAD, "{worker} failed {when}: {error}"),
    "restarting": (BAD, "{worker} failed at step {step}: {reason}; restarting all workers"),
    "stalled": (BAD, "stalled: {reason}"),
    "recovered": (GOOD, "continues at step {step} after the stall"),
    "snapshot": (GOOD, _describe_snapshot),
    "snapshot_copied": (GOOD, "snapshot of step {step} copied to remote storage"),
    "snapshot_rejected": (BAD, "rejected snapshot {path}: {reason}"),
    "loop": (INFO, _describe_loop),
    "sink": (INFO, _describe_sink),
    "batch_skipped": (BAD, "skipped a batch: {reason}"),
    "loss_alert": (BAD, "{reason}"),
    "forked": (INFO, "forked from {trunk} at step {step}"),
    "profiled": (GOOD, "traced steps {first}:{step}, in {file}"),
    "images_dropped": (BAD, "{count} images were dropped because writing could not keep up"),
}
