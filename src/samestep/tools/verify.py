"""`samestep verify`: run a script at several numbers of workers and compare every step, bit for bit."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple

from samestep.errors import VerifyError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from samestep.tools.trace import StepTrace


class Size(NamedTuple):
    """How many devices a run has: `workers`, each with `devices`; written as 4, or 1x2."""

    workers: int
    devices: int = 1

    def __str__(self) -> str:
        return str(self.workers) if self.devices == 1 else f"{self.workers}x{self.devices}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    sizes = "numbers of workers to compare (default: 1,2); 1x2 is one worker with 2 devices"
    parser.add_argument("-n", "--workers", default="1,2", metavar="N,N,…", help=sizes)
    parser.add_argument("--steps", type=int, default=5, help="steps to compare (default: 5)")
    parser.add_argument(
        "--lanes",
        type=int,
        help="lanes of every run (default: the script's own, or the largest number of workers)",
    )
    parser.add_argument(
        "--kill", action="store_true", help="also kill a worker in the middle, resume, and compare"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the step and the worker of --kill (default: 0)"
    )
    parser.add_argument(
        "script", help="the training script; it must track what is to be compared (run.track)"
    )
    parser.add_argument("arguments", nargs="...", help="the script's own arguments")


def main(options: argparse.Namespace) -> int:
    """Run the comparison; returns 0 when all steps are the same everywhere, 1 when any differs."""
    sizes = _sizes(options.workers)
    # a kill falls between two steps
    if options.steps < 1 or (options.kill and options.steps < 2):
        raise VerifyError(
            f"--steps {options.steps} was given; expected at least 1, and 2 with --kill"
        )
    # it needs torch, and the command line prints its help without it
    from samestep.tools.job import Job

    job = Job([options.script, *options.arguments], options.steps, options.lanes)
    traces: dict[str, list[StepTrace]] = {}
    by_devices = sorted(sizes, key=lambda size: size.workers * size.devices)
    # the largest first: where the script leaves lanes open, it fixes them for all
    for size in reversed(by_devices):
        traces[f"n={size}"] = job.trace(size)
    columns = [f"n={size}" for size in sizes]
    if options.kill:
        name, trace = job.trace_with_kill(
            by_devices[-1], by_devices[0], random.Random(options.seed)
        )
        traces[name] = trace
        columns.append(name)
    return report({column: traces[column] for column in columns}, job.lanes or 0)


def _sizes(text: str) -> list[Size]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,2})?", part) for part in parts):
        raise VerifyError(
            f"-n {text} was given; expected numbers of workers such as 1,2,4, or 1x2 for one worker with 2 devices"
        )
    return list(dict.fromkeys(Size(*map(int, part.split("x"))) for part in parts))


def report(traces: dict[str, list[StepTrace]], lanes: int) -> int:
    """Print a table of hashes, and the first difference with its usual cause; returns the exit status."""
    columns = list(traces)
    steps = sorted({trace.step for column in traces.values() for trace in column})
    by_step = {column: {trace.step: trace for trace in some} for column, some in traces.items()}
    widths = [max(12, len(column)) for column in columns]
    print(f"\n{lanes} lanes")
    print(
        "  ".join(
            ["step", *(column.ljust(width) for column, width in zip(columns, widths, strict=True))]
        )
    )
    difference: str | None = None
    for step in steps:
        row = {column: by_step[column].get(step) for column in columns}
        cells = [trace.digest() if trace else "-" for trace in row.values()]
        print(
            "  ".join(
                [
                    str(step).rjust(4),
                    *(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)),
                ]
            )
        )
        difference = difference or first_difference(step, row)
    if difference is None:
        print(f"the same at every step: {', '.join(columns)}")
        return 0
    print(f"DIFFERENT, first at {difference}")
    return 1


def first_difference(step: int, row: Mapping[str, StepTrace | None]) -> str | None:
    """Say which run did not make a step that another made, or what differs first after it, and the usual cause."""
    there = {column: trace for column, trace in row.items() if trace is not None}
    if missing := [column for column in row if column not in there]:
        return f"step {step}: {', '.join(missing)} did not make it\nUsual cause: a number of steps that depends on the number of workers"
    (first_column, first), *others = there.items()
    for column, trace in others:
        if name := first.first_difference(trace):
            return f"step {step}: {name!r} differs between {first_column} and {column}\nUsual cause: {usual_cause(name)}"
    return None


def usual_cause(name: str) -> str:
    """Say what usually makes this the first thing that differs."""
    if name.startswith("metric "):
        return (
            "the forward pass: a random generator of the script's own (samestep keys those of Python, NumPy and torch), "
            "data that depends on the rank, or another number of threads a worker"
        )
    if any(word in name for word in ("running_", "num_batches")):
        return "a layer that exchanges statistics between workers by itself, such as SyncBatchNorm with more lanes than workers"
    if name.startswith("plain state"):
        return "a tracked object that counts what one worker did, or keeps a time or a path"
    return (
        "the gradient or the update: a kernel that is not deterministic, a model built from unkeyed random numbers, "
        "state kept outside of lanes, or gradients changed by one worker only"
    )
