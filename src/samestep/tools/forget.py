"""`samestep forget`: train again without some samples, from before their first use."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, DataError
from samestep.host import counted, interrupts_deferred
from samestep.terminal import starting
from samestep.tools import damage_explained
from samestep.tools.fork import Target, add_start, branch, take
from samestep.tools.replay import RecordedRun

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.plans import History

NOT_UNDONE: Final = """\
It cannot undo what the samples have changed outside of these steps: a setting or a model that an
evaluation with them has chosen, statistics and vocabularies that were computed before the run,
backups and copies of weights, and other runs that began with this one's snapshots."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep forget` to its parser."""
    add = parser.add_argument
    add("run", type=Path, help="directory of the run that has used the samples; it is only read")
    samples = "indices of the samples: one per line, a .npy array, or JSON, a list or lists by loop"
    add("--samples", type=Path, required=True, metavar="FILE", help=samples)
    add_start(parser)


def main(options: argparse.Namespace) -> int:
    """Prepare the run without the samples and start it; return its exit status."""
    target = Target.of(options)
    if "exclude" in target.flags:
        raise ConfigError("--exclude is none of samestep forget, which has --samples")
    with starting(), interrupts_deferred():
        from samestep.data.exclude import NAME, merged, read_loops, write_loops
        from samestep.tools.plans import History

    with damage_explained(options.run):
        history = History(options.run)
        try:
            given = read_loops(options.samples)
        except DataError as error:
            raise ConfigError(f"--samples: {error}") from error
        samples = samples_by_loop(given, history, options.samples)
        for loop, size in sizes_by_loop(history).items():
            if len(samples.get(loop, ())) == size:
                raise ConfigError(
                    f"--samples {options.samples} has all {size} samples of loop {loop!r}; leave"
                    " some to train with"
                )
        first = first_use(history, samples)
        steps = history.end if first is None else first
        record = snapshot_before(options.run, steps)
        target.check(record)
    begin = 0 if record.snapshot is None else record.first_step
    describe(history, first, begin)
    with target.prepared() as folder:
        if record.snapshot is not None:
            take(record.snapshot, folder)
        before = options.run / NAME
        write_loops(folder, merged([samples, *([read_loops(before)] if before.exists() else [])]))
        branch(replace(record, end=begin), folder, forgets=sum(map(len, samples.values())))
    return target.start()


def samples_by_loop(given: Mapping[str, Any], history: History, path: Path) -> Mapping[str, Any]:
    """Return the samples to forget by the loops of a run. Raises `ConfigError` if that is unclear.

    `given` are those of the file at `path`, of the only loop if its name is empty.
    """
    samples = {loop: own for loop, own in given.items() if len(own)}
    names = sorted({stretch.loop for stretch in history.loops()})
    if not samples:
        raise ConfigError(f"--samples {path} has no samples; it needs at least one")
    if "" in samples:
        if len(names) != 1:
            raise ConfigError(
                f"--samples {path} does not say of which loop the samples are, and the loops of the"
                f" run are: {', '.join(names)}; write a JSON file with lists by loop, as in"
                ' {"train": [96]}'
            )
        samples = {names[0]: samples[""]}
    return samples


def sizes_by_loop(history: History) -> dict[str, int]:
    """Return the number of samples of each loop, at its newest start, but for streams."""
    from samestep.tools.plans import sizes_of

    plans = {stretch.loop: stretch.recorded for stretch in history.loops()}
    return {loop: sum(sizes_of(plan).values()) for loop, plan in plans.items() if plan is not None}


def first_use(history: History, samples: Mapping[str, Any]) -> int | None:
    """Return the first step that has used any of the samples, None if there is none."""
    from samestep.tools.plans import uses

    if history.first:
        raise ConfigError(
            f"{history.directory} began at step {history.first} with {history.origin}, whose steps"
            " may have used the samples; forget them in that run first"
        )
    found = (next(uses(history, own, loop), None) for loop, own in samples.items())
    return min((use.step for use in found if use is not None), default=None)


def snapshot_before(directory: Path, steps: int) -> RecordedRun:
    """Return a run with its newest snapshot of at most so many steps, None if it has none."""
    record = RecordedRun.read(directory, max(steps, 1), is_end=True)
    if record.first_step > steps:  # after the first step, whose samples are to be forgotten
        return replace(record, snapshot=None, first_step=0)
    return record


def describe(history: History, first: int | None, begin: int) -> None:
    """Print what is repeated, and what that does not undo."""
    repeated = history.end - begin
    share = repeated / max(1, history.end)
    used = "no step has used the samples" if first is None else f"step {first} used them first"
    place = f"goes back to the snapshot of step {begin}" if begin else "begins anew"
    print(
        f"{used}: the new run {place}, and repeats {counted(repeated, 'step')} of {history.end}"
        f" ({share:.0%})"
    )
    print(NOT_UNDONE, flush=True)
