"""Run `samestep verify` on models of other packages; exit with status 1 if one differs.

usage: python -m tests.models [NAME ...] [--list] [-n 1,2,3] [--steps 3]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.models.jobs import JOBS

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = Path(__file__).with_name("train.py")
REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt").relative_to(ROOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Verify the jobs that the command line selects; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.models",
        description="Run samestep verify, with a killed worker, on models of other packages.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="jobs to verify (default: all)")
    add("--list", action="store_true", help="print the names of the jobs and exit")
    add("-n", "--workers", default="1,2,3", help="worker counts (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps to compare (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in JOBS]:
        parser.error(f"no job has the name {unknown[0]!r}; --list prints the names")
    names = arguments.names or list(JOBS)
    if arguments.list:
        _print("\n".join(names))
        return 0
    needed = sorted({package for name in names for package in JOBS[name].packages})
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        parser.error(
            f"missing packages: {', '.join(missing)}; install them with "
            f"`pip install -r {REQUIREMENTS}`"
        )
    start, failures = time.monotonic(), {}
    _print(", ".join(f"{package} {metadata.version(package)}" for package in ["torch", *needed]))
    for name in names:
        began = time.monotonic()
        status, output = verify(name, arguments.workers, arguments.steps)
        different = "DIFFERENT" if "\nDIFFERENT" in output else f"failed, status {status}"
        result = different if status else "the same"
        _print(f"{name:20} {result:24} {time.monotonic() - began:5.0f} s")
        if status:
            failures[name] = output
    for name, output in failures.items():
        _print(f"\n{name}:\n{output}")
    _print(
        f"\n{len(names) - len(failures)} of {len(names)} jobs have the same bits with "
        f"{arguments.workers} workers and after a kill ({time.monotonic() - start:.0f} s)"
    )
    return 1 if failures else 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def verify(name: str, workers: str, steps: int) -> tuple[int, str]:
    """Verify one job in a process of its own; return the exit status and the output."""
    command = [sys.executable, "-m", "samestep", "verify", "-n", workers, f"--steps={steps}"]
    command += ["--kill", str(SCRIPT), name]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
