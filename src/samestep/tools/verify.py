"""`samestep verify`: run a script with several worker counts and compare each step bit for bit."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from samestep.errors import VerifyError
from samestep.host import GREEN, RED, colored

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.trace import Observation, StepTrace

SHOWN: Final = 5  # likely causes
AT_START: Final = (
    "the state before the first step: a model or optimizer built before ss.init, from random "
    "numbers that samestep does not seed, or from data that depends on the number of workers"
)
# by the first pattern that matches the name of the difference
CAUSES: Final = {
    "^metric ": "the forward pass: a random generator created by the script (samestep seeds those "
    "of Python, NumPy and torch), data that depends on the rank, or a different number of threads "
    "per worker",
    "running_|num_batches": "a layer that exchanges statistics between workers, such as "
    "SyncBatchNorm with more lanes than workers, or a forward pass in training mode on some "
    "workers only",
    "^plain state": "a tracked object that counts what one worker did, or contains a time or path",
    "": "the gradient or the update: a nondeterministic kernel, a model initialized from unseeded "
    "random numbers, state kept outside of lanes, or gradients changed by one worker only",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep verify` to its parser."""
    add = parser.add_argument
    sizes = "worker counts to compare (default: 1,2); 1x2 is one worker with 2 devices"
    add("-n", "--workers", default="1,2", metavar="N,N,…", help=sizes)
    add("--steps", type=int, default=5, metavar="N", help="steps to compare (default: 5)")
    lanes = "lanes of every run (default: set by the script, or the largest worker count)"
    add("--lanes", type=int, metavar="N", help=lanes)
    kill = "also kill a worker during a run, resume, and compare"
    add("--kill", action="store_true", help=kill)
    seed = "seed that selects the step and the worker to kill (default: 0)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    add("script", help="training script; it must track the objects to compare (run.track)")
    add("arguments", nargs="...", help="arguments of the script")


def main(options: argparse.Namespace) -> int:
    """Compare the runs; return 0 if all steps are the same, and 1 if any differs."""
    parts = [part.strip() for part in options.workers.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,2})?", part) for part in parts):
        raise VerifyError(
            "-n: expected worker counts such as 1,2,4, or 1x2 for one worker with 2 devices, "
            f"got {options.workers}"
        )
    least_steps = 2 if options.kill else 1  # a worker is killed between two steps
    if options.steps < least_steps:
        condition = " with --kill" * options.kill
        raise VerifyError(f"--steps must be at least {least_steps}{condition}, got {options.steps}")
    from samestep.tools.trace import RunSize, ScriptTracer

    sizes = list(dict.fromkeys(RunSize(*map(int, part.split("x"))) for part in parts))
    by_devices = sorted(sizes, key=lambda size: size.workers * size.devices)
    tracer = ScriptTracer([options.script, *options.arguments], options.steps, options.lanes)
    # largest first: if the script sets no lanes, its worker count sets them for all runs
    by_size = {size: tracer.run(size) for size in reversed(by_devices)}
    traces = {f"n={size}": by_size[size] for size in sizes}
    if options.kill:
        draw = random.Random(options.seed)
        title, trace = tracer.run_with_kill(by_devices[-1], by_devices[0], draw)
        traces[title] = trace
    return print_report(traces, tracer.lanes or 0, tracer.observations)


def print_report(
    traces: Mapping[str, list[StepTrace]], lanes: int, observations: Sequence[Observation] = ()
) -> int:
    """Print a table of hashes and the first difference with its causes; return the status."""
    by_step = {title: {trace.step: trace for trace in run} for title, run in traces.items()}
    widths = [max(12, len(title)) for title in traces]

    def print_row(step: str, cells: list[str]) -> None:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join([step.rjust(4), *padded]))

    print(f"\n{lanes} lanes")
    print_row("step", list(traces))
    difference: str | None = None
    for step in sorted({trace.step for run in traces.values() for trace in run}):
        row = {title: run.get(step) for title, run in by_step.items()}
        print_row(str(step), [trace.digest() if trace else "-" for trace in row.values()])
        difference = difference or find_difference(step, row, observations)
    if difference is None:
        print(colored("the same at every step:", GREEN, sys.stdout), ", ".join(traces))
        return 0
    print(f"{colored('DIFFERENT', RED, sys.stdout)}, first at {difference}")
    return 1


def find_difference(
    step: int, row: Mapping[str, StepTrace | None], observations: Sequence[Observation]
) -> str | None:
    """Return the first difference after a step with its causes, None if there is none.

    Observations up to this step are likelier than the usual cause of such a difference.
    """
    if missing := ", ".join(title for title, trace in row.items() if trace is None):
        cause = "a number of steps that depends on the number of workers"
        return f"step {step}: {missing} never reached it\nUsual cause: {cause}"
    (first_title, first), *others = row.items()
    for title, trace in others:
        if first and trace and (name := first.first_difference(trace)):
            between = f"{name!r} differs between {first_title} and {title}"
            earlier = [seen for seen in observations if seen.step <= step > 0]
            if texts := dict.fromkeys(seen.text for seen in earlier):
                causes = "\n".join(f"Likely cause: {text}" for text in islice(texts, SHOWN))
                return f"step {step}: {between}\n{causes}"
            cause = next(CAUSES[pattern] for pattern in CAUSES if re.search(pattern, name))
            return f"step {step}: {between}\nUsual cause: {cause if step else AT_START}"
    return None
