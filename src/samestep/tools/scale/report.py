"""The report of `samestep scale`: tables and sentences for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from samestep.host import counted
from samestep.tools import table
from samestep.tools.scale.study import Study
from samestep.tools.scale.timing import PARTS, Range

BUSY: Final = 0.5  # of the machine's capacity
WIDTH: Final = 100  # columns; the tables are narrower


def report_lines(study: Study) -> Iterator[str]:
    """Yield the lines of the report: verdict, measurements, bottleneck and forecast."""
    for number, section in enumerate((_verdict, _measurements, _bottleneck, _forecast)):
        lines = list(section(study))
        yield from [""] * (number > 0 and bool(lines))
        for line in lines:
            indent = line[: len(line) - len(line.lstrip())]
            yield from textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _verdict(study: Study) -> Iterator[str]:
    fewest, greatest = study.fewest_workers, study.most_workers
    if greatest == fewest:
        yield "No verdict: it needs at least two worker counts, for example -n 1,2."
        yield from _warning(study)
        return
    best = max(study.timings, key=lambda workers: study.speedup(workers).middle)
    if best > fewest:
        factor = study.speedup(best).middle / fewest
        efficiency = f"{study.speedup(best).middle / best:.0%}"
        yield f"Use {best} workers: {_digits(factor)} times as fast as {fewest} ({efficiency})."
    else:
        factor = study.speedup(greatest).middle / fewest
        workers = counted(fewest, "worker")
        yield f"Stay with {workers}: {greatest} are {_digits(factor)} times as fast."
    compared = study.speedup(best if best > fewest else greatest)
    if compared.lowest < fewest < compared.highest:
        yield "These runs differ more among themselves: increase --repeats or --steps to be sure."
    yield from _warning(study)


def _warning(study: Study) -> Iterator[str]:
    """Yield what makes the verdict uncertain."""
    if study.load > BUSY * study.capacity:
        yield f"This machine was busy (load {study.load:.1f}): measure again when it is idle."


def _measurements(study: Study) -> Iterator[str]:
    workload, capacity = study.workload, study.capacity
    batch = "" if workload.batch_size is None else f", batches of {workload.batch_size}"
    yield f"{counted(workload.lanes, 'lane')}{batch}, on {workload.device}"
    runs = counted(max(map(len, study.timings.values())), "interleaved run")
    yield f"Milliseconds per step, median of {runs} per worker count (lowest to highest):"
    sizes = sorted(study.timings)
    yield from _speedups((n, study.step(n), study.speedup(n)) for n in sizes)
    yield "The parts of a step:"
    medians = {n: [milliseconds(study.part(n, name).middle) for name in PARTS] for n in sizes}
    yield from table([["workers", *PARTS], *([str(n), *medians[n]] for n in sizes)])
    if oversubscribed := [str(n) for n in study.timings if n > capacity]:
        counts = ", ".join(oversubscribed)
        yield (
            f"This machine has capacity for {counted(capacity, 'worker')}. Measurements "
            f"with {counts} workers, which share cores or GPUs, are excluded from the forecast."
        )


def _bottleneck(study: Study) -> Iterator[str]:
    most_workers = study.most_workers
    if most_workers == study.fewest_workers:
        return
    bottleneck = study.bottleneck()
    if bottleneck is None:
        yield f"{most_workers} workers are within 5% of the ideal; there is no bottleneck yet."
    else:
        waiting = bottleneck.part == "waiting"
        part = "waiting for slower workers" if waiting else bottleneck.part
        excess = f"{milliseconds(bottleneck.seconds)} ms per step above its ideal share"
        yield f"Bottleneck of {most_workers} workers: {part}, {excess}. Remedy:"
        yield f"  {bottleneck.remedy}."


def _forecast(study: Study) -> Iterator[str]:
    lanes, forecast = study.workload.lanes, study.forecast
    if forecast is None:
        yield (
            "No forecast: it needs runs of at least two workers that do not share cores or GPUs, "
            "for example -n 1,2 on two cores."
        )
        return
    yield (
        f"Forecast of milliseconds per step, if more workers are as fast as these "
        f"{max(study.within_capacity)} (lowest to highest):"
    )
    yield (
        f"  {_time_range(forecast.per_lane)} x lanes per worker, for data and compute, + "
        f"{_time_range(forecast.constant)} for the rest"
    )
    if steps := [(n, forecast.step(n)) for n in study.forecast_workers()]:
        yield from _speedups((n, step, study.speedup_of(step)) for n, step in steps)
    yield (
        f"More than {counted(lanes, 'worker')} need more lanes (--lanes). A network between hosts "
        "is not included."
    )


def _speedups(rows: Iterable[tuple[int, Range, Range]]) -> Iterator[str]:
    """Yield a table of numbers of workers, with the seconds of a step and the speedup of each."""
    head = ["workers", "step", "speedup", "efficiency"]
    cells = (
        [str(n), _time_range(step), _factor(speedup), f"{speedup.middle / n:.0%}"]
        for n, step, speedup in rows
    )
    return table([head, *cells])


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with at least three digits."""
    return _digits(seconds * 1000)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _factor(factor: Range) -> str:
    middle, lowest, highest = map(_digits, (factor.middle, factor.lowest, factor.highest))
    return middle if factor.lowest == factor.highest else f"{middle} ({lowest} to {highest})"


def _time_range(seconds: Range) -> str:
    lowest, highest = milliseconds(seconds.lowest), milliseconds(seconds.highest)
    return f"{milliseconds(seconds.middle)} ({lowest} to {highest})"
