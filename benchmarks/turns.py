"""Measure contenders in turn, and format their medians as tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from benchmarks.measure import spread

Measured = TypeVar("Measured")
Row = dict[str, list[float]]  # values of each contender, one per round


def samestep(workers: int, *module: str) -> list[str]:
    """Return the command that runs a module with samestep."""
    return [sys.executable, "-m", "samestep", "run", "-n", str(workers), "-m", *module]


def torchrun(workers: int, *module: str, restarts: int = 0) -> list[str]:
    """Return the command that runs a module with torchrun on this host."""
    how = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *how, "-m", *module]


def in_turn(
    contenders: Mapping[str, Callable[[], Measured]], rounds: int
) -> dict[str, list[Measured]]:
    """Measure all contenders once per round, each round starting with another one."""
    names = list(contenders)
    measurements: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measurements[name].append(contenders[name]())
    return measurements


def figure(name: str, measurements: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """Return one figure of every contender's runs."""
    return {contender: [run[name] for run in runs] for contender, runs in measurements.items()}


def table(
    title: str,
    rows: Mapping[str, Row],
    *,
    more_is_better: bool = False,
    no_peers: Sequence[str] = (),
) -> str:
    """Return medians with their range as a Markdown table: sizes by contenders.

    The last column compares the first contender to its best peer. `no_peers` are not compared.
    """
    names = list(dict.fromkeys(chain.from_iterable(rows.values())))
    ours, *peers = [name for name in names if name not in no_peers]
    lines = [[title, *names], ["---"] * (len(names) + 1)]
    lines += [
        [label, *(spread(row[name]).strip() if name in row else "" for name in names)]
        for label, row in rows.items()
    ]
    if peers:
        verdicts = [
            _verdict(
                row,
                ours,
                [name for name in peers if name in row],
                more_is_better=more_is_better,
            )
            for row in rows.values()
        ]
        lines = [
            [*cells, last]
            for cells, last in zip(lines, [f"{ours} / best peer", "---", *verdicts], strict=True)
        ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _verdict(row: Row, ours: str, peers: Sequence[str], *, more_is_better: bool) -> str:
    if not peers:
        return ""
    best = (max if more_is_better else min)(peers, key=lambda name: statistics.median(row[name]))
    ratios = [
        own_value / peer_value for own_value, peer_value in zip(row[ours], row[best], strict=True)
    ]
    loses = (statistics.median(ratios) > 1) != more_is_better
    return f"{spread(ratios).strip()} of {best}{': loses' if loses else ''}"
