"""Measurements in a separate process, because importing torch may fail or hang.

`python -m samestep.tools.doctor.probe [--gpus]` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from samestep.config import PREFIX
from samestep.host import no_garbage_collection
from samestep.launch.local import count_gpus
from samestep.tools.doctor.system import Case, Finding, note

PROBE_SECONDS: Final = 60.0  # usually, it takes a tenth of it
SLOW_IMPORT_SECONDS: Final = 15.0


def measure(*, gpus: bool) -> tuple[dict[str, Any], str]:
    """Return the report of the process, and the reason if there is none."""
    command = [sys.executable, "-m", "samestep.tools.doctor.probe", *["--gpus"] * gpus]
    # a run reports wrong variables
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    try:
        options: dict[str, Any] = {"env": environment, "timeout": PROBE_SECONDS}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        # libraries may have printed something before the report
        report: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {}, f"no result within {PROBE_SECONDS:g} s"
    except OSError as error:
        return {}, f"a process could not be started ({error})"
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        status = f"a process that imports torch exited with status {done.returncode}"
        return {}, f"{status}: {last}" if last else status
    return report, ""


def check_measurements(case: Case) -> Iterator[Finding]:
    """Report a slow import of torch."""
    report = case.torch
    if (seconds := report.get("import_seconds", 0)) > SLOW_IMPORT_SECONDS:
        yield note(
            f"importing torch took {seconds:.0f} s, and every start of a run waits for "
            "it: Python's packages are on a slow file system.",
            "a virtual environment or a container image on a local disk",
        )


def main() -> None:
    """Print the properties of torch as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    report = describe_torch()
    report["gpus"] = count_gpus() if options.gpus else None
    print(json.dumps(report), flush=True)
    os._exit(0)  # an ordinary exit takes half a second to tear torch down


def describe_torch() -> dict[str, Any]:
    """Import torch and return how long that takes, its version and the CUDA it is built for."""
    began = time.perf_counter()
    with no_garbage_collection():  # as the launcher does
        torch = import_module("torch")
    seconds = time.perf_counter() - began
    build = torch.version.cuda
    return {"import_seconds": seconds, "version": torch.__version__, "cuda_build": build}


if __name__ == "__main__":
    main()
