"""`samestep verify`: run a script with several worker counts and compare each step bit for bit."""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import ConfigError, RecordError, VerifyError
from samestep.host import GREEN, RED, colored, interrupts_deferred
from samestep.launch.local import check_script
from samestep.terminal import starting
from samestep.tools.causes import CAUSES, LOGGED, Difference, Observation, explain
from samestep.tools.golden import CannotJudgeError, Golden, judge

STEPS: Final = 5  # that are compared
# the fourth one captures (`WARM_UP_CALLS` in plugins/graph_choice.py)
STEPS_WITH_GRAPHS: Final = 4

STOPPED: Final = (
    "Note: the script was stopped before its end, so what it does there was not compared, such as"
    " loading its best weights; use more --steps than it has"
)

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.trace import RunSize, RunTrace, ScriptTracer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep verify` to its parser."""
    add = parser.add_argument
    sizes = "worker counts to compare (default: 1,2); 1x2 is one worker with 2 devices"
    add("-n", "--workers", default="1,2", metavar="N,N,…", help=sizes)
    steps = (
        f"steps to compare (default: {STEPS}, or those of --golden); more than an epoch for what"
        " happens at its end"
    )
    add("--steps", type=int, metavar="N", help=steps)
    lanes = "lanes of every run (default: set by the script, or the largest worker count)"
    add("--lanes", type=int, metavar="N", help=lanes)
    kill = "also kill a worker in each loop and after each epoch, resume, and compare"
    add("--kill", action="store_true", help=kill)
    seed = "seed that selects the workers to kill (default: 0)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    golden = "also compare with the hashes in FILE, which is written if it does not exist"
    add("--golden", type=Path, metavar="FILE", help=golden)
    add("script", help="training script; it must track the objects to compare (run.track)")
    add("arguments", nargs="...", help="arguments of the script")


def main(options: argparse.Namespace) -> int:
    """Compare the runs; return 0 if all steps are the same, and 1 if any differs.

    With a golden file, return 2 if it is of another place. Raises `CannotJudgeError` if the script
    does not run then, `VerifyError` without a file.
    """
    parts = [part.strip() for part in options.workers.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,2})?", part) for part in parts):
        expected = "worker counts such as 1,2,4, or 1x2 for one worker with 2 devices"
        raise VerifyError(f"-n: expected {expected}, got {options.workers}")
    least_steps = 2 if options.kill else 1  # a worker is killed between two steps
    if options.steps is not None and options.steps < least_steps:
        condition = " with --kill" * options.kill
        raise VerifyError(f"--steps must be at least {least_steps}{condition}, got {options.steps}")
    check_script(options.script)
    if options.golden is None:
        return compare_sizes(options, parts)
    golden = Golden.read(options.golden) if os.path.lexists(options.golden) else None
    if golden is None:
        Golden.check_writable(options.golden)
    elif options.steps not in {None, golden.last}:
        raise ConfigError(
            f"--steps must be {golden.last}, as in {options.golden}, got {options.steps}; leave it"
            " out, or write another file"
        )
    try:
        return compare_sizes(options, parts, golden)
    except (RecordError, VerifyError) as error:
        raise CannotJudgeError(str(error)) from error


def compare_sizes(
    options: argparse.Namespace, parts: Sequence[str], golden: Golden | None = None
) -> int:
    """Run the script with each number of workers, and return the exit status."""
    with starting(), interrupts_deferred():
        from samestep.tools.trace import RunSize, ScriptTracer, kill_steps

    sizes = list(dict.fromkeys(RunSize(*map(int, part.split("x"))) for part in parts))
    by_devices = sorted(sizes, key=lambda size: size.workers * size.devices)
    largest, smallest = by_devices[-1], by_devices[0]
    last = (options.steps or STEPS) if golden is None else golden.last
    tracer = ScriptTracer([options.script, *options.arguments], last, options.lanes)
    # largest first: if the script sets no lanes, its worker count sets them for all runs
    by_size = {size: tracer.run(size) for size in reversed(by_devices[1:])}
    by_size[smallest], with_other_loaders = run_smallest(tracer, smallest, by_size.get(largest))
    runs = [by_size[size] for size in sizes]
    if options.kill:
        steps = kill_steps(by_size[largest].steps)
        if not steps:
            raise VerifyError("the run ended before a worker was killed; increase --steps")
        runs.append(tracer.run_with_kills([largest, smallest], steps, random.Random(options.seed)))
    note = ""
    if tracer.uses_graphs:
        runs.append(tracer.run(smallest, graphs=False))
        if last < STEPS_WITH_GRAPHS:
            note = (
                "Note: no lane was a CUDA graph: they are captured in the fourth step at the"
                f" earliest; use --steps {STEPS_WITH_GRAPHS}, or more"
            )
    if isinstance(with_other_loaders, VerifyError) or tracer.loaders == 0:
        note = describe_loaders(by_size[smallest], with_other_loaders, tracer) or note
    elif with_other_loaders is not None:  # in the runs that must be the same
        runs.append(with_other_loaders)
    status = print_report(runs, tracer.lanes or 0, tracer.observations, tracer.buffers, note)
    if options.golden is None or status:
        return status
    now = Golden.of(runs[0], tracer.environment, tracer.lanes or 0, last)
    return judge(options.golden, golden, now)


def run_smallest(
    tracer: ScriptTracer, size: RunSize, largest: RunTrace | None
) -> tuple[RunTrace, RunTrace | VerifyError | None]:
    """Return the smallest run; and a run or its failure with other loader processes, if it differs.

    A script that loads with loader processes should do the same without them, and the other way
    round. This costs nothing if it does: only then is the smallest run made as the script says.
    """
    if largest is None or tracer.loaders is None:  # nothing to compare, or no data set
        return tracer.run(size), None
    changed: RunTrace | VerifyError
    try:
        changed = tracer.run(size, loaders=0 if tracer.loaders else 2)
    except VerifyError as error:
        changed = error
    else:
        if are_same([largest, changed]):
            return replace(changed, title=f"n={size}", between="workers"), None
    trace = tracer.run(size)
    is_cause = isinstance(changed, VerifyError) or not are_same([trace, changed], logged=False)
    return trace, changed if is_cause else None


def are_same(runs: Sequence[RunTrace], *, logged: bool = True) -> bool:
    """Return whether all runs have the same steps with the same hashes, perhaps but for scalars."""
    hashes = [
        [
            {name: value for name, value in trace.hashes.items() if logged or LOGGED not in name}
            for trace in run.steps
        ]
        for run in runs
    ]
    return all(other == hashes[0] for other in hashes)


def describe_loaders(
    run: RunTrace, other: RunTrace | VerifyError | None, tracer: ScriptTracer
) -> str:
    """Return what is different with other loader processes than the script's, which is no fault."""
    if other is None:
        return ""
    if isinstance(other, VerifyError):
        loaders = 0 if tracer.loaders else 2
        return f"Note: with loader_workers={loaders}, it fails: {str(other).splitlines()[-1]}"
    difference = first_difference([run, other], tracer.observations, tracer.buffers)
    return f"Note: the script would not be the same with loader processes, first at {difference}"


def print_report(
    runs: Sequence[RunTrace],
    lanes: int,
    observations: Sequence[Observation] = (),
    buffers: Collection[str] = (),
    note: str = "",
) -> int:
    """Print a table of hashes, and the first difference with its causes; return the status."""
    titles = [run.title for run in runs]
    by_step = {run.title: {trace.step: trace for trace in run.steps} for run in runs}
    widths = [max(12, len(title)) for title in titles]

    def print_row(step: str, cells: list[str]) -> None:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join([step.rjust(4), *padded]))

    print(f"\n{lanes} lanes")
    print_row("step", titles)
    for step in sorted({trace.step for run in runs for trace in run.steps}):
        row = [by_step[title].get(step) for title in titles]
        print_row(str(step), [trace.digest() if trace else "-" for trace in row])
    difference = first_difference(runs, observations, buffers)
    if difference is None:
        if note:
            print(note)
        if not all(run.has_ended for run in runs):
            print(STOPPED)
        print(colored("the same at every step:", GREEN, sys.stdout), ", ".join(titles))
        return 0
    print(f"{colored('DIFFERENT', RED, sys.stdout)}, first at {difference}")
    return 1


def variables_before(step: int, run: RunTrace) -> Sequence[str]:
    """Return those that started over at the newest kill before a step, or else differ at the end.

    What a script does when it ends belongs to its last step.
    """
    kills = sorted((kill for kill in run.lost if kill < step), reverse=True)
    lost = next((run.lost[kill] for kill in kills if run.lost[kill]), ())
    return lost or (run.lost_at_end if step == run.steps[-1].step else ())


def first_difference(
    runs: Sequence[RunTrace],
    observations: Sequence[Observation] = (),
    buffers: Collection[str] = (),
) -> str | None:
    """Return the first difference of any run from the first one with its causes, None without one.

    Of several at the same step, it is that of numbers of workers, which may cause the others.
    """
    by_step = [{trace.step: trace for trace in run.steps} for run in runs]
    for step in sorted({step for steps in by_step for step in steps}):
        row = [(run, steps.get(step)) for run, steps in zip(runs, by_step, strict=True)]
        if missing := [run for run, trace in row if trace is None]:
            is_resumed = all(run.between == "resume" for run in missing)
            titles = ", ".join(run.title for run in missing)
            cause = CAUSES["resumed steps" if is_resumed else "steps"]
            return f"step {step}: {titles} never reached it\nUsual cause: {cause}"
        first_run, first = row[0]
        for run, trace in sorted(row[1:], key=lambda pair: pair[0].between != "workers"):
            if first is None or trace is None or not (names := first.differing(trace)):
                continue
            same = first.hashes.keys() - set(names)
            difference = Difference(step, names, same, run.between)
            variables = variables_before(step, run)
            lines = explain(difference, observations, buffers=buffers, variables=variables)
            between = f"{difference.first!r} differs between {first_run.title} and {run.title}"
            return "\n".join([f"step {step}: {between}", *lines])
    return None
