"""Fail every call that writes, lose the power at every sync, slow calls down: nothing is lost.

usage: python -m benchmarks.durability [--sample 10 10] [--slow 300] [--seed 0] [--parallel 2]

A small run with snapshots, retention, a record and a remote copy is recorded, call by call, by a
library that is preloaded (calls.c). Then each call fails once with each error, in a new run; and
directories are made as a power loss may leave them. After each, the run is started again: it must
resume from the newest valid snapshot and end with the bits and the record of an undisturbed run.
Runs of up to three workers that stop early, on a disk where some calls of each worker are slow,
perhaps killed: a snapshot that was valid stays valid, and the end has the same bits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("calls.c")
LIBRARY = "LD_PRELOAD"


def main() -> int:
    """Run all trials, in a process with the library; return 1 if one lost something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--sample", type=int, nargs=2, metavar=("FAILURES", "LOSSES"), help="of all trials")
    add("--slow", type=int, default=300, help="runs with slow calls (default: 300)")
    add("--seed", type=int, default=0, help="of the sample and the power losses (default: 0)")
    add("--parallel", type=int, default=2, help="trials at a time (default: 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="durability-") as folder:
        # without spaces, which LD_PRELOAD would take for the ends of names
        library = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY)}/calls.so"
        if os.environ.get(LIBRARY, "").endswith("/calls.so"):
            from benchmarks.durability.trials import campaign  # loads torch

            return campaign(Path(folder), options)
        compile_it = ["gcc", "-O1", "-shared", "-fPIC", "-o", library, str(SOURCE), "-ldl"]
        subprocess.run(compile_it, check=True)
        again = [sys.executable, "-m", "benchmarks.durability", *sys.argv[1:]]
        environment = {**os.environ, LIBRARY: library}
        return subprocess.run(again, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
