"""`samestep which`: which steps of a run have used a sample, and which samples a step has used."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.host import counted, interrupts_deferred, printable
from samestep.terminal import starting
from samestep.tools import damage_explained, table

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.plans import History, Stretch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep which` to its parser."""
    add = parser.add_argument
    add("run", type=Path, help="directory of the run, which is only read")
    of = parser.add_mutually_exclusive_group(required=True)
    sample = "indices of samples in the data set; of a mixture, also rows such as code:96"
    of.add_argument("--sample", metavar="INDEX,INDEX,…", help=sample)
    step = "step whose samples to print; the first step is 0"
    of.add_argument("--step", type=int, metavar="N", help=step)
    loop = "name of the loop whose samples are meant (default: all loops)"
    add("--loop", metavar="NAME", help=loop)


def main(options: argparse.Namespace) -> int:
    """Print the uses of samples, or the samples of a step; return 0."""
    with starting(), interrupts_deferred():
        from samestep.tools.plans import History

    with damage_explained(options.run):
        history = History(options.run)
        if options.step is not None:
            lines = _of_step(history, options.step, options.loop)
        else:
            lines = _of_samples(history, options.sample, options.loop)
        for line in lines:
            print(printable(line))
    return 0


def _of_step(history: History, step: int, loop: str | None) -> Iterator[str]:
    """Yield the samples of a step by lane."""
    stretch = history.at(step)
    if loop not in {None, stretch.loop}:
        raise ConfigError(f"step {step} is one of loop {stretch.loop!r}, not of {loop!r}")
    plan, at = stretch.plan(), step - stretch.first + stretch.epoch_step
    skipped = ", skipped: no gradient was used" * (step in history.skipped)
    yield f"step {step}: step {at} of epoch {stretch.epoch} of loop {stretch.loop!r}{skipped}"
    for lane in range(plan.lanes):
        indices = plan.indices(stretch.epoch, at, lane).tolist()
        names = [_name(index, stretch) for index in indices]
        yield f"lane {lane}: {' '.join(names) or 'no samples'}"


def _of_samples(history: History, text: str, loop: str | None) -> Iterator[str]:
    """Yield a table of all uses of samples."""
    from samestep.tools.plans import uses

    stretches = history.loops(loop)
    samples = [_index(word, stretches) for word in text.split(",")]
    found = list(uses(history, samples, loop))
    of = f"sample{'s' * (len(samples) > 1)} {text}"
    made = sum(stretch.stop - stretch.first for stretch in stretches)
    steps = counted(len({use.step for use in found}), "step")
    yield f"{of}: used in {steps} of {made}" + (f" of loop {loop!r}" if loop else "")
    if found:
        rows = [["step", "epoch", "lane", "sample", "loop"]]
        marks = ["made by"]
        for use in found:
            stretch = history.at(use.step)
            cells = [str(use.step), str(use.epoch), str(use.lane), _name(use.sample, stretch)]
            rows.append([*cells, use.loop])
            skipped = ", skipped: no gradient was used" * (use.step in history.skipped)
            marks.append(f"{_start(history, stretch)}{skipped}")
        for line, mark in zip(table(rows), marks, strict=True):
            yield f"{line}  {mark}"
    if history.first:
        yield f"steps before {history.first} are those of {history.origin}, in its run's record"


def _start(history: History, stretch: Stretch) -> str:
    """Return which start made the steps of a stretch."""
    start = history.starts[stretch.start]
    how = f"resumed at step {start['step']}" if start["event"] == "resumed" else "the first"
    trunk = history.trunks.get(str(start.get("run")))
    of = f" of {trunk}" if trunk else ""
    return f"start {stretch.start + 1}{of} ({how}), {counted(len(start['workers']), 'worker')}"


def _name(index: int, stretch: Stretch) -> str:
    """Return the name of a sample: its index, or in a mixture its source and row."""
    from samestep.tools.plans import first_rows

    first = first_rows(stretch.recorded)
    source = [name for name in first if first[name] <= index][-1]
    return f"{source}:{index - first[source]}" if len(first) > 1 else str(index)


def _index(word: str, stretches: Sequence[Stretch]) -> int:
    """Return the index of a sample that is written as a number or as SOURCE:ROW."""
    from samestep.tools.plans import first_rows, sizes_of

    source, _, row = word.strip().rpartition(":")
    if not re.fullmatch(r"\d{1,99}", row, re.ASCII):
        expected = "indices such as 96 or 96,97, or rows of a mixture such as code:96"
        raise ConfigError(f"--sample: expected {expected}, got {word!r:.80}")
    if not source:
        return int(row)
    for stretch in stretches:
        sizes = sizes_of(stretch.recorded)
        if source in sizes and int(row) < sizes[source]:
            return first_rows(stretch.recorded)[source] + int(row)
    raise ConfigError(f"--sample: the run has no source with a row {word!r}")
