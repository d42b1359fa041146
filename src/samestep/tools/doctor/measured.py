"""What was measured, by a process that imports torch: started here, and told of with medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from samestep.config import PREFIX
from samestep.tools.common import format_bytes
from samestep.tools.doctor.section import Section, change, good, note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding

MEGABYTE: Final = 1_000_000
MOST_SECONDS: Final = 60.0  # for all of it; mostly it takes a tenth
STOP_SECONDS: Final = 5.0
SLOW_WRITE: Final = 100e6  # bytes a second: a snapshot of 1 GB takes longer than ten seconds
SLOW_SYNC_SECONDS: Final = 0.05  # a snapshot waits for several of them
SLOW_IMPORT_SECONDS: Final = 15.0
WRITE, SYNC, IMPORT = "file written and synced", "small file written and synced", "import of torch"
EXCHANGE, ALL_REDUCE = "exchange of gradients", "all-reduce by gloo"


def measure(directory: Path, *, quick: bool, gpus: bool) -> tuple[dict[str, Any], str]:
    """Return what a process with torch told of it and measured; where it told nothing, why."""
    command = [
        sys.executable,
        "-m",
        "samestep.tools.doctor.probe",
        str(directory),
        *["--quick"] * quick,
        *["--gpus"] * gpus,
    ]
    # a wrong one is told elsewhere
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                out, complaints = process.communicate(timeout=MOST_SECONDS)
            except BaseException as error:
                _stop(process)  # it ends its workers then
                if isinstance(error, subprocess.TimeoutExpired):
                    return {}, f"it took longer than {MOST_SECONDS:g} s"
                raise
        # before it libraries may have said something
        told: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
    except OSError as error:
        return {}, f"a process could not be started ({error})"
    except ValueError:
        lines = complaints.strip().splitlines()
        return (
            {},
            f"a process that imports it ended with status {process.returncode}{': ' + lines[-1] if lines else ''}",
        )
    return told, ""


def examine(case: Case) -> Section:
    """Tell of what was measured."""
    return Section("measured", figures(case), list(_judge(case)))


def figures(case: Case) -> dict[str, dict[str, Any]]:
    """Return medians with the lowest and highest, by what was done."""
    return {
        f"{row['name']}, {_amount(row['bytes'])}" if row["bytes"] else row["name"]: {
            "bytes": row["bytes"] or None,
            "times": len(row["seconds"]),
            "median_seconds": statistics.median(row["seconds"]),
            "lowest_seconds": min(row["seconds"]),
            "highest_seconds": max(row["seconds"]),
        }
        for row in case.torch.get("measured", ())
        if row["seconds"]
    }


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= MEGABYTE else f"{nbytes / 1e3:.3g} kB"


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _judge(case: Case) -> Iterator[Finding]:
    """Figures alone change nothing but the text: a machine that is busy at the moment is not to fail its examination."""
    if "workers_error" in case.torch:
        yield change(
            f"two workers on this host could not start or talk: {case.torch['workers_error']}.",
            "mend what stands above first; then samestep run -n 2 with any script says more",
        )
    yield from _judge_disk(case, _medians(case))
    yield from _judge_talk(_medians(case))


def _medians(case: Case) -> dict[str, tuple[float, int]]:
    """Return the median seconds and the bytes by what was done, of the largest size."""
    rows = sorted(case.torch.get("measured", ()), key=lambda row: row["bytes"])
    return {
        row["name"]: (statistics.median(row["seconds"]), row["bytes"])
        for row in rows
        if row["seconds"]
    }


def _judge_disk(case: Case, medians: Mapping[str, tuple[float, int]]) -> Iterator[Finding]:
    local = "--dir on a local disk, with --remote for a copy elsewhere"
    if WRITE in medians:
        seconds, nbytes = medians[WRITE]
        rate = nbytes / seconds
        if rate < SLOW_WRITE:
            yield note(
                f"{case.directory} takes {format_bytes(rate)} a second: a snapshot of 1 GB needs {1e9 / rate:.0f} s beside training.",
                local,
            )
        else:
            yield good(f"{case.directory} takes {format_bytes(rate)} a second")
    if SYNC in medians and medians[SYNC][0] > SLOW_SYNC_SECONDS:
        yield note(
            f"a small file needs {medians[SYNC][0] * 1e3:.0f} ms to be safe on that disk, and a snapshot waits for several.",
            local,
        )
    if IMPORT in medians and medians[IMPORT][0] > SLOW_IMPORT_SECONDS:
        yield note(
            f"importing torch took {medians[IMPORT][0]:.0f} s, which every start waits for: Python's packages lie on a slow file system.",
            "a virtual environment or a container image on a local disk",
        )


def _judge_talk(medians: Mapping[str, tuple[float, int]]) -> Iterator[Finding]:
    if EXCHANGE in medians and ALL_REDUCE in medians:
        (own, nbytes), (gloo, _) = medians[EXCHANGE], medians[ALL_REDUCE]
        yield good(
            f"two workers add up {_amount(nbytes)} of gradients in {own * 1e3:.1f} ms; gloo's all-reduce takes {gloo * 1e3:.1f} ms"
        )
