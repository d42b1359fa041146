"""The command: run all checks and print their findings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from samestep.config import PREFIX
from samestep.errors import ConfigError
from samestep.host import GREEN, RED, colored, counted
from samestep.tools.doctor.cluster import check_directory, check_interfaces, check_launcher
from samestep.tools.doctor.probe import check_measurements, measure
from samestep.tools.doctor.resources import (
    check_locked_memory,
    check_processors,
    check_shared_memory,
)
from samestep.tools.doctor.software import check_gpus, check_torch, present_gpus
from samestep.tools.doctor.system import Case, Finding, System

CHECKS: Final[Sequence[Callable[[Case], Iterator[Finding]]]] = (
    *(check_torch, check_gpus, check_processors, check_shared_memory, check_locked_memory),
    *(check_interfaces, check_launcher, check_directory, check_measurements),
)
SEVERITIES: Final = ("problem", "note")  # the most urgent first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep doctor` to its parser."""
    parser.epilog = "Exit status: 0 if no problem was found, 1 otherwise."
    directory = "directory of the run (default: SAMESTEP_DIR, or the current directory)"
    parser.add_argument("--dir", type=Path, help=directory)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    workers = (
        "number of workers that will run on this machine (default: one per GPU, or one per core)"
    )
    parser.add_argument("-n", "--workers", type=int, help=workers)


def main(options: argparse.Namespace) -> int:
    """Run `samestep doctor` and return its exit status. Raises `ConfigError` for wrong use."""
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"-n must be at least 1, got {options.workers}")
    system = System()
    directory = options.dir or Path(system.environment.get(f"{PREFIX}DIR", ""))
    torch, failure = measure(gpus=present_gpus(system) > 0)
    workers = options.workers or default_workers(system)
    findings = examine(Case(system, directory.absolute(), workers, torch, failure))
    is_healthy = not any(finding.severity == "problem" for finding in findings)
    if options.json:
        report = {"healthy": is_healthy, "workers": workers, "findings": [*map(asdict, findings)]}
        text = json.dumps(report, indent=1)
    else:  # variables may hold any bytes
        text = as_text(findings).encode(errors="backslashreplace").decode()
        verdict, end, rest = text.partition("\n")
        text = colored(verdict, GREEN if is_healthy else RED, sys.stdout) + end + rest
    sys.stdout.write(f"{text}\n")
    return 0 if is_healthy else 1


def default_workers(system: System) -> int:
    """Return one worker per GPU, or one per core."""
    return present_gpus(system) or system.usable_cores()


def examine(case: Case) -> list[Finding]:
    """Return the findings of all checks, the most urgent first."""
    findings = [finding for check in CHECKS for finding in check(case)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def as_text(findings: Sequence[Finding]) -> str:
    """Return the verdict and the findings."""
    problems = sum(finding.severity == "problem" for finding in findings)
    lines = [f"{counted(problems, 'problem')} to fix" if problems else "no problems"]
    for number, finding in enumerate(findings):
        lines += [""] * (number == 0)
        lines += [f"{finding.severity:7}  {finding.text}", f"{'':7}  do: {finding.fix}"]
    return "\n".join(lines)
