"""`samestep doctor`: tell what this machine has, measure it, and say what to change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.config import PREFIX
from samestep.errors import ConfigError
from samestep.tools.doctor import (
    cores,
    gpus,
    launchers,
    limits,
    measured,
    memory,
    network,
    show,
    software,
    storage,
)
from samestep.tools.doctor.case import Case
from samestep.tools.doctor.system import System

if TYPE_CHECKING:
    import argparse

    from samestep.tools.doctor.section import Section

PARTS: Final = (software, cores, gpus, memory, limits, network, launchers, storage, measured)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep doctor` to its parser; `main` takes what it parses."""
    parser.epilog = "Exit status: 0 when nothing must be changed, 1 otherwise."
    parser.add_argument(
        "--dir", type=Path, help="where a run is to keep its files (default: SAMESTEP_DIR, or here)"
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer times")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        help="workers of a run on this machine (default: one a GPU, or one a core)",
    )


def main(options: argparse.Namespace) -> int:
    """Run `samestep doctor` and return its exit status. Raises `ConfigError` for wrong use."""
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"-n {options.workers} was given; expected at least 1")
    system = System()
    found = gpus.find_gpus(system)
    directory = options.dir or Path(system.environment.get(f"{PREFIX}DIR", ""))
    place = system.folder(directory).path
    told, failure = measured.measure(place, quick=options.quick, gpus=bool(found))
    workers = options.workers or usual_workers(system, len(found))
    sections = examine(Case(system, directory.absolute(), workers, found, told, failure))
    healthy = not any(
        finding.tone == "change" for section in sections for finding in section.findings
    )
    if options.json:
        json.dump(
            {
                "healthy": healthy,
                "workers": workers,
                "sections": [asdict(section) for section in sections],
            },
            sys.stdout,
            indent=1,
        )
        sys.stdout.write("\n")
    else:
        text = show.as_text(sections)
        # variables may hold any bytes
        sys.stdout.write(f"{text.encode(errors='backslashreplace').decode()}\n")
    return 0 if healthy else 1


def examine(case: Case) -> list[Section]:
    """Return what was found, in the order in which it is told."""
    return [part.examine(case) for part in PARTS]


def usual_workers(system: System, gpus: int) -> int:
    """Return the workers of a run where nothing else is said: one a GPU, or one a core."""
    return gpus or max(1, int(cores.usable_cores(system) or 1))
