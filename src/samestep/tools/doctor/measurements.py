"""Measurements of the probe process, and what they say about a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from samestep.config import PREFIX
from samestep.tools.doctor.system import Case, Finding, note, problem

PROBE_SECONDS: Final = 60.0  # for all measurements, which usually take a tenth of it
STOP_SECONDS: Final = 5.0
SLOW_IMPORT_SECONDS: Final = 15.0


def measure(*, quick: bool, gpus: bool) -> tuple[dict[str, Any], str]:
    """Return the report of the probe process, and the reason if there is none."""
    command = [sys.executable, "-m", "samestep.tools.doctor.probe"]
    command += ["--quick"] * quick + ["--gpus"] * gpus
    # another check reports wrong variables
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        with process:
            try:
                output, errors = process.communicate(timeout=PROBE_SECONDS)
            except BaseException as error:
                _stop(process)  # which stops its workers
                if isinstance(error, subprocess.TimeoutExpired):
                    return {}, f"no result within {PROBE_SECONDS:g} s"
                raise
        # libraries may have printed something before the report
        report: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except OSError as error:
        return {}, f"a process could not be started ({error})"
    except ValueError:
        last = errors.strip().rpartition("\n")[2]
        status = f"a process that imports torch exited with status {process.returncode}"
        return {}, f"{status}: {last}" if last else status
    return report, ""


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def check_measurements(case: Case) -> Iterator[Finding]:
    """Report two workers that cannot communicate, and a slow import of torch."""
    report = case.torch
    if "workers_error" in report:
        yield problem(
            f"two workers of this host could not start or connect: {report['workers_error']}.",
            "fix the problems above first; then samestep run -n 2 with any script shows more",
        )
    if (seconds := report.get("import_seconds", 0)) > SLOW_IMPORT_SECONDS:
        yield note(
            f"importing torch took {seconds:.0f} s, and every start of a run waits for "
            "it: Python's packages are on a slow file system.",
            "a virtual environment or a container image on a local disk",
        )
