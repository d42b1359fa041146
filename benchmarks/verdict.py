"""Summaries of measured figures: text per job, and tables for docs/performance.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from benchmarks.contenders import CONTENDERS
from benchmarks.jobs import JOBS
from benchmarks.measure import spread

REFERENCE = "plain"
SPEED, MEMORY = "samples_a_second", "memory_megabytes"

# Figures by name, one dict per round, by contender; and those by job.
Runs = dict[str, list[dict[str, float]]]
Results = dict[str, Runs]


def ratios(
    measurements: Mapping[str, Sequence[Mapping[str, float]]], name: str, other: str = REFERENCE
) -> list[float]:
    """Return the speed of a contender relative to another, by round."""
    return [
        run[SPEED] / other_run[SPEED]
        for run, other_run in zip(measurements[name], measurements[other], strict=True)
    ]


def best(measurements: Runs, roles: Collection[str]) -> str | None:
    """Return the contender with the highest median speed among some roles, or None."""
    names = [name for name in measurements if CONTENDERS[name].role in roles]
    return max(
        names, key=lambda name: median(run[SPEED] for run in measurements[name]), default=None
    )


def describe(job: str, measurements: Runs) -> str:
    """Return a job's figures, one line per contender."""
    rounds = len(measurements[REFERENCE])
    heading = f"{JOBS[job].title}, global batch {JOBS[job].batch_size}, {rounds} rounds"
    lines = [heading, f"  {'':26} {'samples a second':28} {'over the plain loop':24} MB per worker"]
    for name, runs in measurements.items():
        speed, memory = (spread([run[figure] for run in runs]) for figure in (SPEED, MEMORY))
        lines.append(
            f"  {CONTENDERS[name].title:26} {speed:28} "
            f"{spread(ratios(measurements, name)):24} {memory}"
        )
    return "\n".join(lines)


def tables(results: Results) -> str:
    """Return two Markdown tables with one column per job: relative speeds, and memory."""
    names = list(next(iter(results.values())))
    speeds = {
        CONTENDERS[name].title: [
            _brief(ratios(measurements, name)) for measurements in results.values()
        ]
        for name in names
    }
    for title, roles in {
        "samestep / best peer": {"peer"},
        "samestep / best, tuned or not": {"peer", "tuned peer"},
    }.items():
        speeds[title] = [_over_best(measurements, roles) for measurements in results.values()]
    memories = {
        CONTENDERS[name].title: [
            f"{median(run[MEMORY] for run in measurements[name]):.0f}"
            for measurements in results.values()
        ]
        for name in names
    }
    return "\n\n".join(
        [
            _table("speed over the plain loop", results, speeds),
            _table("MB a worker", results, memories),
        ]
    )


def _over_best(measurements: Runs, roles: Collection[str]) -> str:
    ours, peer = best(measurements, {"ours"}), best(measurements, roles)
    if ours is None or peer is None:
        return ""
    over = ratios(measurements, ours, peer)
    return f"{_brief(over)}, {CONTENDERS[peer].title}{': loses' if median(over) < 1 else ''}"


def _brief(values: Sequence[float]) -> str:
    return spread(values).strip()


def _table(corner: str, jobs: Collection[str], rows: Mapping[str, Sequence[str]]) -> str:
    heads = [f"{JOBS[job].title} ({JOBS[job].batch_size})" for job in jobs]
    lines = [
        [corner, *heads],
        ["---"] * (1 + len(heads)),
        *([title, *cells] for title, cells in rows.items()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
