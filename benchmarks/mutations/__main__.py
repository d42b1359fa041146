"""A negative control of `samestep verify`: it has to find faults that are planted in good scripts.

usage: python -m benchmarks.mutations [NAME ...] [--list] [--only TEXT]

Each fault is planted by the syntax tree in a loop of docs/loops, which passes without it. Verify
then runs the script with 1 and 2 workers, and with a kill where only a resume can show the fault.
A fault is found if verify names a difference, or if the run refuses what it does with an error.
Workers are forked from one process that has imported torch. Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

os.environ["OMP_NUM_THREADS"] = "1"  # a process that forks workers must not have several threads

import pytest
import torch

from benchmarks.mutations.faults import Mutation, mutations
from samestep import cli, errors
from tests.python import fork_what_tools_start, start_server, stop_server

STEPS: Final = "4"
REFUSAL: Final = re.compile(
    rf"\b(?:{'|'.join(name for name in vars(errors) if name.endswith('Error'))})\b.*"
)


def main() -> int:
    """Plant the faults, one at a time; return 1 if any was not seen, or is no program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="loops (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds whose names have a text")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if options.only in mutation.kind.name
        and mutation.loop in (options.names or [mutation.loop])
    ]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.loop}: {mutation.kind.name}")
        return 0
    torch.set_num_threads(1)
    start_server()
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patches:
        fork_what_tools_start(patches)
        for mutation in chosen:
            started = time.monotonic()
            outcome, reason = try_one(mutation)
            counts[outcome] += 1
            seconds = time.monotonic() - started
            title = f"{outcome:8}  {mutation.loop:12}  {mutation.kind.name}"
            print(f"{title}  ({seconds:.0f} s)  {reason}", flush=True)
    stop_server()
    print(f"{len(chosen)} faults: {', '.join(f'{counts[name]} {name}' for name in sorted(counts))}")
    return int(counts["not seen"] + counts["broken"] > 0)


def try_one(mutation: Mutation) -> tuple[str, str]:
    """Return how verify ended ("differs", "refused", "not seen", "broken"), and what it said."""
    with tempfile.TemporaryDirectory(prefix="samestep-mutation-") as folder:
        script = Path(folder, "train.py")
        script.write_text(mutation.script())
        return verified(script, needs_kill=mutation.kind.needs_kill)


def verified(script: Path, *, needs_kill: bool) -> tuple[str, str]:
    """Return how verify of a script ended, and the line that says why."""
    flags = ["-n", "1,2", "--steps", STEPS, *(["--kill"] if needs_kill else [])]
    printed, failures, place = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(script.parent)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(failures):
            status = cli.main(["verify", *flags, str(script)])
    finally:
        os.chdir(place)
    if status == 0:
        return "not seen", ""
    if difference := re.search("^DIFFERENT.*", printed.getvalue(), re.MULTILINE):
        return "differs", difference[0]
    if refusal := REFUSAL.search(failures.getvalue()):
        return "refused", refusal[0][:160]
    return "broken", failures.getvalue().strip()[-400:]  # the fault is no program


if __name__ == "__main__":
    sys.exit(main())
