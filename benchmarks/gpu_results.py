"""The results of the GPU benchmark as Markdown, inserted into a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import spread, values_in

BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


@dataclass(frozen=True)
class ProofResult:
    """The outcome of a proof as text."""

    title: str
    verdict: str
    failed: bool


@dataclass
class Speeds:
    """The speeds of contenders by round. Others are compared to the one named `floor`."""

    title: str
    floor: str
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    complaints: dict[str, str] = field(default_factory=dict)

    def add(self, contender: str, printed: str, complaint: str) -> None:
        """Add the output of a contender, or its error."""
        if complaint:
            self.complaints[contender] = complaint
        self.rounds[contender].append(
            {name: values[-1] for name, values in values_in(printed).items()}
        )

    @property
    def failed(self) -> bool:
        """Return whether any contender failed."""
        return bool(self.complaints)

    def rows(self) -> list[str]:
        """Return one row of a table per contender."""
        return [
            f"| {name} | {self._complaint(name) or self._figures(name)} |" for name in self.rounds
        ]

    def _complaint(self, name: str) -> str:
        failed = (
            name
            if name in self.complaints
            else self.floor
            if self.floor in self.complaints
            else None
        )
        return f"failed: {cell(self.complaints[failed])} | | | | |" if failed else ""

    def _figures(self, name: str) -> str:
        runs, floor = self.rounds[name], self.rounds[self.floor]
        ratios = [
            run["samples_a_second"] / beside["samples_a_second"]
            for run, beside in zip(runs, floor, strict=True)
        ]
        gigabytes = max(run["gigabytes"] for run in runs)
        speeds = spread([run["samples_a_second"] for run in runs], 0).strip()
        # absent without a GPU
        parts = [
            spread([run[name] for run in runs], 1).strip() if name in runs[0] else ""
            for name in ("launch_ms", "gpu_ms", "us_a_launch")
        ]
        return f"{speeds} | {spread(ratios).strip()} | {' | '.join(parts)} | {gigabytes:.2f}"


def cell(text: str) -> str:
    """Return text that is valid in a cell of a table."""
    return text.replace("|", "/")


def markdown(machine: str, proofs: Sequence[ProofResult], speeds: Sequence[Speeds]) -> str:
    """Return all results as tables."""
    lines = [f"{machine}.", "", "| proof | outcome |", "|---|---|"]
    lines += [
        f"| {proof.title} | {'**failed**: ' if proof.failed else ''}{cell(proof.verdict)} |"
        for proof in proofs
    ]
    for comparison in speeds:
        rounds = max(map(len, comparison.rounds.values()))
        lines += [
            "",
            f"{comparison.title}; median of {rounds} rounds (range), ratios of adjacent runs.",
            "",
        ]
        lines += [
            (
                f"| contender | samples a second | of {comparison.floor} | ms to launch a step |"
                " ms of the GPU | us to launch a kernel | GB at the most |"
            ),
            "|---|---|---|---|---|---|---|",
            *comparison.rows(),
        ]
    return "\n".join([*lines, ""])


def insert(text: str, into: Path) -> None:
    """Replace the results in a file. Raises `SystemExit` if it has no place for results."""
    page = into.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"{into} has no place for results: a line {BEGIN.strip()}, then a line {END.strip()}"
        )
    into.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
