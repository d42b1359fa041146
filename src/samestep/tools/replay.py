"""`samestep replay`: repeat a step of a run on fewer workers, and show what each lane did in it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from samestep.config import flag_name
from samestep.errors import ConfigError, RecordError, SnapshotError, VerifyError
from samestep.host import GREEN, RED, colored, counted, interrupts_deferred, printable
from samestep.launch.local import as_text
from samestep.record import read_events, read_history
from samestep.record.chain import Chain, Row
from samestep.record.events import parse_events
from samestep.record.source import STARTS, begins_anew
from samestep.terminal import starting
from samestep.tools import (
    add_script,
    command_of,
    damage_explained,
    first_failure,
    first_of,
    started,
    table,
)

if TYPE_CHECKING:  # --help must not load torch
    from samestep.plugins.replay import Request

# options that results depend on; they are those of the record
OPTIONS: Final = (
    *("lanes", "seed", "precision", "exchange_dtype", "device", "threads", "deterministic"),
    *("process_group", "nonfinite_loss", "skip_batches", "exclude"),
)
# turned off; a lane that is checked again would be shown and debugged twice
QUIET: Final = ("snapshot_every", "hot_every", "system_every", "check_every", "recheck_every")
SHARED: Final = (
    "the loss is that of all lanes, so it does not tell which samples are to blame; --lane shows"
    " those of one lane"
)
SHOWN_SAMPLES: Final = 8  # of a lane that is not looked at closely


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep replay` to its parser."""
    add = parser.add_argument
    add("run", type=Path, help="directory of the run, which is only read")
    step = "step to repeat, as the record, the page and errors number it: the first one is 0"
    add("--step", type=int, required=True, metavar="N", help=step)
    lane = "lane to show the samples of (default: the one with the highest loss)"
    add("--lane", type=int, metavar="LANE", help=lane)
    add("--worker-count", type=int, default=1, metavar="N", help="workers to use (default: 1)")
    debug = "call breakpoint() before the passes of --lane, for a debugger in the terminal"
    add("--debug", action="store_true", help=debug)
    state = "train on to the next snapshot, and compare its state"
    add("--compare-state", action="store_true", help=state)
    add_script(parser, "training script of the run")


def main(options: argparse.Namespace) -> int:
    """Repeat the step; return 0 if all steps are those of the record, and 1 if any differs."""
    command = command_of(options)
    with damage_explained(options.run):
        record = RecordedRun.read(options.run, options.step)
        record.choose_end(to_next_snapshot=options.compare_state)
        lanes, flags = int(record.start["lanes"]), record.flags()
    if options.lane is not None and not 0 <= options.lane < lanes:
        raise ConfigError(f"--lane must be a lane from 0 to {lanes - 1}, got {options.lane}")
    if not 1 <= options.worker_count <= lanes:
        count = options.worker_count
        raise ConfigError(f"--worker-count must be from 1 to the {lanes} lanes, got {count}")
    if options.debug and (options.lane is None or options.worker_count != 1):
        raise ConfigError("--debug needs --lane, and a single worker")
    from samestep.plugins.replay import Request

    with TemporaryDirectory(prefix="samestep-replay-") as name:
        folder = Path(name)
        request = Request(
            step=options.step,
            folder=name,
            lane=options.lane,
            debug=options.debug,
            saves_state=record.next_snapshot is not None,
        )
        status = run_again(record, command, options.worker_count, flags, request)
        report = Report(record, folder, request)
        if not report.reports:
            failure = "" if options.debug else f":\n{first_failure(folder)}"
            reason = f"the script ended with status {status} before step {options.step}{failure}"
            raise VerifyError(reason)
        report.print(options.worker_count)
        if status:
            failure = "" if options.debug else f":\n{first_failure(folder)}"
            print(f"the script ended with status {status} after that{failure}")
        return int(report.differs)


@dataclass
class RecordedRun:
    """What the record of a run says about a step and those before it.

    `start` is the start of the run that made the step, `snapshot` the newest one before it (None:
    the run's beginning), at `first_step`. `means` has the logged means of each step from there on,
    and `alert` the last alert of the step. `next_snapshot` is the one whose state is compared,
    after `end` steps.
    """

    directory: Path
    step: int
    start: Mapping[str, Any]
    snapshot: Path | None
    first_step: int
    workers: int
    means: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    alert: Mapping[str, Any] = field(default_factory=dict)
    end: int = 0
    next_snapshot: Path | None = None

    @classmethod
    def read(cls, directory: Path, step: int, *, is_end: bool = False) -> RecordedRun:
        """Read the record of a run. Raises `SamestepError` if it cannot be repeated to the step.

        `--at` of `samestep fork` `is_end`: the number of complete steps, of which the snapshot may
        be. All of its bytes are read then.
        """
        option, more = ("--at", 1) if is_end else ("--step", 0)
        step -= more
        starts: list[Mapping[str, Any]] = []
        alert: Mapping[str, Any] = {}
        reached = -1
        for event in read_events(directory):
            at = event.get("step")
            if event.get("event") == "loss_alert" and at == step:
                alert = event
            if event.get("event") in STARTS:
                if begins_anew(event):
                    starts, reached, alert = [], -1, {}  # another history
                starts.append(event)
            elif isinstance(at, int) and event.get("event") in {"timing", "failed", "loss_alert"}:
                reached = max(reached, at)
        if not starts:
            raise RecordError(f"{directory} has no record of a run")
        covering = [start for start in starts if start["step"] <= step]
        if step < 0 or not covering or (step > reached and step > starts[-1]["step"]):
            first, last = starts[0]["step"] + more, max(reached, 0) + more
            raise ConfigError(
                f"{option} must be a step from {first} to {last}, as in the record, got"
                f" {step + more}"
            )
        snapshot, first, workers = cls._find_start(directory, step + more, starts, is_read=is_end)
        means = {at: values for at, values in means_of(directory).items() if at >= first}
        start, end = covering[-1], step + 1
        return cls(directory, step, start, snapshot, first, workers, means, alert, end)

    @staticmethod
    def _find_start(
        directory: Path, step: int, starts: Sequence[Mapping[str, Any]], *, is_read: bool
    ) -> tuple[Path | None, int, int]:
        """Return the snapshot to begin with, its step and the workers that wrote it.

        If it `is_read`, all of its bytes are, and damaged ones are named.
        """
        with starting(), interrupts_deferred():
            from samestep.snapshot.read import check, inspect, list_snapshots, step_of

        paths = [path for path in list_snapshots(directory) if (step_of(path) or 0) <= step]
        origin = starts[0].get("snapshot")
        # of another run, from which this one began
        paths = [*([Path(origin)] if origin and starts[0]["step"] <= step else []), *paths]
        for path in reversed(paths):
            try:
                manifest = check(path) if is_read else inspect(path)
            except SnapshotError as error:
                if is_read:
                    print(f"skipped: {error}", file=sys.stderr)
            else:
                return path, manifest.step, manifest.workers
        if starts[0]["event"] == "started":
            return None, 0, 0
        raise SnapshotError(
            f"{directory} has no snapshot before step {step}, and the run began with {origin},"
            " which cannot be read; put it back, or choose a later step"
        )

    def choose_end(self, *, to_next_snapshot: bool) -> None:
        """Choose the snapshot whose state is compared: that after the step, or the next one."""
        from samestep.snapshot.read import inspect, list_snapshots, step_of

        self.end = self.step + 1
        for path in list_snapshots(self.directory):
            at = step_of(path) or 0
            if at == self.end or (at > self.end and to_next_snapshot):
                with suppress(SnapshotError):
                    inspect(path)
                    self.next_snapshot, self.end = path, at
                    return

    def flags(self) -> list[str]:
        """Return the flags of `samestep run` that repeat the run up to the end."""
        config = {**self.start["config"], "lanes": self.start["lanes"]}
        if config.get("nonfinite_loss") == "stop":  # none was, until this step
            config["nonfinite_loss"] = "continue"
        flags = {name: config[name] for name in OPTIONS if name in config}
        flags |= dict.fromkeys(QUIET)
        flags["resume"] = "never" if self.snapshot is None else str(self.snapshot.resolve())
        flags["stop_after"] = self.end
        return [f"{flag_name(name)}={as_text(value)}" for name, value in flags.items()]


def run_again(
    record: RecordedRun,
    command: Sequence[str],
    workers: int,
    flags: Sequence[str],
    request: Request,
) -> int:
    """Run the script in the folder of the request, until the step is done; return its status."""
    place = "the start" if record.snapshot is None else record.snapshot.name
    if record.snapshot is not None:
        place += f" (written by {counted(record.workers, 'worker')})"
    steps = counted(record.end - record.first_step, "step")
    text = f"repeating {steps} from {place} on {counted(workers, 'worker')} …"
    print(text, file=sys.stderr, flush=True)
    folder, variables = Path(request.folder), request.environment
    with started(
        command, workers, folder, flags, variables, is_interactive=request.debug
    ) as process:
        return process.wait()


class Report:
    """What a repeated step did, and how it differs from the record."""

    def __init__(self, record: RecordedRun, folder: Path, request: Request) -> None:
        self._record, self._folder, self._request = record, folder, request
        files = [_json(path) for path in sorted(folder.glob("replay-*.json"))]
        reports = [report for file in files for report in file["reports"]]
        self.reports: list[dict[str, Any]] = sorted(
            reports, key=lambda report: (report["call"], report["lane"])
        )
        self._worst = dict(files[0]["worst"]) if files else {}
        self._skipped = files[0]["skipped"] if files else ""
        self.differs = False

    def print(self, workers: int) -> None:
        """Print the report, and note whether anything differs from the record."""
        record = self._record
        for line in self._compare():
            print(line)
        if self._skipped:
            print(f"the batch was skipped: {self._skipped}")
        calls = sorted({report["call"] for report in self.reports})
        for call in calls:
            of = f", call {call} of run.backward" if len(calls) > 1 else ""
            print(f"\nstep {record.step}{of}")
            reports = [report for report in self.reports if report["call"] == call]
            _print_table(reports)
            for report in reports:
                self._print_lane(report)
            if self._worst.get(call) is None:
                print(SHARED)

    def _compare(self) -> Iterator[str]:
        """Yield lines about the program, the environment, the means and the state."""
        from samestep.run.environment import differences

        record, folder = self._record, self._folder
        (start, *_) = [e for e in read_events(folder) if e["event"] in STARTS]
        lines = differences(record.start.get("environment", {}), start["environment"])
        if lines:
            yield f"not as in the record, so bits may differ:\n{lines}"
        else:
            yield "program and environment: as in the record"
        yield from self._compare_means(means_of(folder))
        yield from self._compare_state()

    def _verdict(self, *, differs: bool) -> str:
        """Note whether something differs from the record, and return that as text."""
        self.differs |= differs
        text, color = ("DIFFERENT", RED) if differs else ("the same bits", GREEN)
        return colored(text, color, sys.stdout)

    def _compare_means(self, repeated: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
        steps = sorted(repeated.keys() & self._record.means.keys())
        differing = differing_means(self._record.means, repeated)
        verdict = self._verdict(differs=bool(differing))
        if differing:
            step, name = differing[0]
            was, now = self._record.means[step][name], repeated[step].get(name)
            yield f"means: {verdict}, first at step {step}: {name!r} was {was!r} and is {now!r}"
        elif steps:
            yield f"means: {verdict} at {counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
        else:
            yield "means: the record has none to compare (run.log of what run.backward returns)"
        yield from self._compare_alert()

    def _compare_alert(self) -> Iterator[str]:
        """Compare the lanes' losses with those of an alert; a run that stopped has no means."""
        was, call = self._record.alert.get("losses") or [], self._record.alert.get("call")
        reports = [report for report in self.reports if report["call"] == call]
        now = {report["lane"]: report["metrics"].get("loss") for report in reports}
        if not was or not now:
            return
        differing = [lane for lane, loss in was if repr(loss) != repr(now.get(lane))]
        where = (
            f", first in lane {differing[0]}" if differing else f" in {counted(len(was), 'lane')}"
        )
        yield f"losses of the alert: {self._verdict(differs=bool(differing))}{where}"

    def _compare_state(self) -> Iterator[str]:
        from samestep.snapshot.read import directory_name
        from samestep.tools.trace import differing_state

        record = self._record
        path = record.next_snapshot
        if path is None:
            end = record.step + 1
            yield f"state: no snapshot of step {end} to compare it with (see --compare-state)"
            return
        try:
            names = differing_state([path, self._folder / directory_name(record.end)])
        except SnapshotError as error:
            yield f"state: not compared: {error}"
            return
        where = f"from {path.name} in {first_of(names)}" if names else f"as {path.name}"
        yield f"state: {self._verdict(differs=bool(names))} {where}"

    def _print_lane(self, report: Mapping[str, Any]) -> None:
        """Print where a lane's first non-finite value is, and its samples."""
        lane, samples = report["lane"], report["samples"]
        title = f"lane {lane}"
        if report["nonfinite"]:
            print(f"{title}: first value that is not finite: {printable(report['nonfinite'])}")
        if lane != self._worst.get(report["call"]):
            return
        if not samples:
            print(f"{title}: the samples have no indices")
            return
        order = ""
        if any(value is not None for sample in samples for value in sample[2:]):
            order = ", the most unusual one first"
        print(f"{title}, {counted(len(samples), 'sample')}{order}:")
        for index, name, largest, loss in sorted(samples, key=_unusual, reverse=True):
            parts = [f"  sample {index}", *([printable(name)] if name else [])]
            parts += [f"loss {loss:.6g}"] if loss is not None else []
            parts += [f"largest input {largest:.6g}"] if largest is not None else []
            print(", ".join(parts))


def _unusual(sample: Sequence[Any]) -> tuple[float, float]:
    """Return a key that sorts samples by their loss, then by their largest input."""
    _, _, largest, loss = sample
    return tuple(  # type: ignore[return-value]
        -math.inf if value is None else math.inf if not math.isfinite(value) else value
        for value in (loss, largest)
    )


def _print_table(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each lane: its items, metrics, gradient norms and samples."""
    metrics = list(dict.fromkeys(name for report in reports for name in report["metrics"]))
    norms = list(dict.fromkeys(name for report in reports for name in report["norms"]))
    head = ["lane", "worker", "items", *metrics, *(f"gradient ({name})" for name in norms)]
    rows = [[*head, "samples"]]
    for report in reports:
        indices = [str(sample[0]) for sample in report["samples"]]
        more = " …" if len(indices) > SHOWN_SAMPLES else ""
        values = [_mean(report["metrics"].get(name)) for name in metrics]
        values += [_mean(report["norms"].get(name)) for name in norms]
        place = [str(report["lane"]), str(report["worker"]), f"{report['count']:g}"]
        rows.append([*place, *values, " ".join(indices[:SHOWN_SAMPLES]) + more])
    for line, row in zip(table([row[:-1] for row in rows]), rows, strict=True):
        print(f"{line}  {printable(row[-1])}".rstrip())


def means_of(directory: Path) -> dict[int, dict[str, float]]:
    """Return the logged means of each step in a run's record."""
    means: dict[int, dict[str, float]] = {}
    for event in read_history(directory):
        if event.get("event") == "scalars" and not event.get("between"):
            values = {name: event["values"][name] for name in event["low"]}
            means.setdefault(int(event["step"]), {}).update(values)
    return means


def differing_means(
    was: Mapping[int, Mapping[str, float]], now: Mapping[int, Mapping[str, float]]
) -> list[tuple[int, str]]:
    """Return the steps and names of means that have other bits now, or are missing in a step."""
    return [
        (step, name)
        for step in sorted(was.keys() & now.keys())
        for name in was[step]
        if repr(was[step][name]) != repr(now[step].get(name))
    ]


def differing_rows(first: Chain, second: Chain, steps: Sequence[int]) -> dict[str, int]:
    """Return the first of some steps at which each part of the rows of two chains differs."""
    found: dict[str, int] = {}
    for step in reversed(steps):
        was, now = first[step], second[step]
        found |= {part: step for part in Row._fields if getattr(was, part) != getattr(now, part)}
    return found


def _mean(value: Any) -> str:
    """Return a metric as text: a number, or [sum, entries] of one with an entry per item."""
    if isinstance(value, list):
        value = value[0] / value[1] if len(value) == 2 and value[1] else None
    return "-" if value is None else f"{value:.6g}"


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file of `to_json`, with NaN and infinities."""
    (content,) = parse_events([path.read_bytes()])
    return content
