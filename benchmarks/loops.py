"""The loops of docs/loops as plain DDP and with samestep: samples per second on two workers.

usage: python -m benchmarks.loops [NAME ...] [--rounds 3] [--epochs 16]

Both train on gloo, in turn. A worker of samestep has one lane, or a lane for each micro-batch. The
first ten steps are not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.turns import in_turn, torchrun

FOLDER = Path(__file__).parents[1] / "docs/loops"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.endswith("_ddp"))
LANES = {"gpt": 4}  # with two micro-batches per worker; else one lane per worker
WARMUP = 10  # steps


def main() -> None:
    """Run the comparison, or one script."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("names", nargs="*", default=NAMES, help="loops (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script (default: 3)")
    epochs = "times the steps that the scripts make (default: 16)"
    parser.add_argument("--epochs", type=int, default=16, help=epochs)
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        train(options.script)
        return
    for name in options.names:
        scripts = {"DDP": f"{name}_ddp", "samestep": name}
        contenders = {
            title: partial(measure, script, options.epochs) for title, script in scripts.items()
        }
        runs = in_turn(contenders, options.rounds)
        ddp, samestep = (statistics.median(runs[title]) for title in scripts)
        print(f"| {name} | {ddp:,.0f} | {samestep:,.0f} | {samestep / ddp:.2f} |", flush=True)


def measure(script: str, epochs: int) -> float:
    """Run a script with more steps on two workers; return its samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        text = (FOLDER / f"{script}.py").read_text()
        path.write_text(
            re.sub(r"^((?:EPOCHS|STEPS) = \d+)$", rf"\1 * {epochs}", text, flags=re.MULTILINE)
        )
        job = ["benchmarks.loops", "--script", str(path)]
        lanes = str(LANES.get(script, 2))
        with_samestep = [sys.executable, "-m", "samestep", "run", "-n", "2", "--lanes", lanes]
        command = torchrun(2, *job) if script.endswith("_ddp") else [*with_samestep, "-m", *job]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=environment
        )
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
        return float(re.findall(r"^samples per second: (.*)$", done.stdout, re.MULTILINE)[0])


def train(script: Path) -> None:
    """Run a script in this worker, and print the samples per second on rank 0."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    times: dict[int, list[float]] = {}  # of each optimizer's steps

    def note(optimizer: Any, *_: Any) -> None:
        times.setdefault(id(optimizer), []).append(time.perf_counter())

    register_optimizer_step_post_hook(note)
    with contextlib.redirect_stdout(None):
        variables = runpy.run_path(str(script), run_name="__main__")
    if os.environ["RANK"] == "0":
        measured = next(iter(times.values()))[WARMUP:]
        steps_per_second = (len(measured) - 1) / (measured[-1] - measured[0])
        rate = steps_per_second * variables["BATCH_SIZE"]
        print("samples per second:", json.dumps(rate), flush=True)
    if "samestep" not in sys.modules:
        os._exit(0)  # threads of gloo may abort a process that ends in order


if __name__ == "__main__":
    main()
