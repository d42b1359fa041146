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
from pathlib import Path
from typing import Any, Final

import psutil

from samestep.config import PREFIX
from samestep.host import counted, no_garbage_collection, read_file, usable_cores
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
        load, cores = os.getloadavg()[0], counted(usable_cores(), "core")
        busy = f", while programs wanted {load:.0f} of {cores}"
        return {}, f"no result within {PROBE_SECONDS:g} s{busy}"
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
        text = f"importing torch took {seconds:.0f} s, and every start of a run waits for it: "
        cpu, queued = report.get("cpu_seconds"), report.get("queued_seconds")
        yield note(*_slow_import(text, seconds, cpu, queued))


def _slow_import(
    text: str, seconds: float, cpu: float | None, queued: float | None
) -> tuple[str, str]:
    """Return what took so long, and the remedy: a busy machine is no slow disk."""
    disk = "a virtual environment or a container image on a local disk"
    others = "run it again when other programs have ended; top shows them"
    if cpu is None or queued is None:
        both = "Python's packages are on a slow file system, or other programs keep the cores busy"
        return f"{text}{both}.", f"{others}. Otherwise, {disk}"
    waited = max(0.0, seconds - cpu - queued)
    parts = f"{cpu:.0f} s computing, {queued:.0f} s waiting for a core and {waited:.0f} s for files"
    if waited > cpu + queued:
        return f"{text}{parts}. Python's packages are on a slow file system.", disk
    return f"{text}{parts}. This machine is busy or slow.", others


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
    before = time.perf_counter(), *_core_seconds()
    with no_garbage_collection():  # as the launcher does
        torch = import_module("torch")
    after = time.perf_counter(), *_core_seconds()
    seconds, cpu, queued = (
        None if end is None or begin is None else end - begin
        for begin, end in zip(before, after, strict=True)
    )
    times = {"import_seconds": seconds, "cpu_seconds": cpu, "queued_seconds": queued}
    return {**times, "version": torch.__version__, "cuda_build": torch.version.cuda}


def _core_seconds() -> tuple[float | None, float | None]:
    """Return the seconds in which this thread has computed, and waited for a core, if known.

    A virtual machine also waits while its host runs others: that of the average core.
    """
    numbers = (read_file(Path("/proc/thread-self/schedstat")) or "").split()
    if len(numbers) < 2:
        return None, None
    stolen = psutil.cpu_times().steal / (os.cpu_count() or 1)
    return int(numbers[0]) / 1e9, int(numbers[1]) / 1e9 + stolen


if __name__ == "__main__":
    main()
