"""Run the tests with other versions of Python, torch and all dependencies.

usage: python -m tests.versions [--python 3.10 3.13] [--torch 2.6.0 2.13.0] [-- ARGS]

By default this takes every Python that uv finds and pyproject.toml allows, and the torch of this
environment, in the same build: a CUDA build is several gigabytes. The first Python gets the lowest
versions that pyproject.toml allows of everything else, the others the newest. Each combination gets
an environment of its own, which is removed afterwards. ARGS are passed to pytest. The status is 1
if tests fail with any of the combinations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
PYTHONS = [f"3.{minor}" for minor in range(10, 20)]
# Old packages cause warnings of newer ones that they use.
PYTEST = (
    "-m",
    "pytest",
    "--numprocesses",
    "3",
    "--dist",
    "worksteal",
    "-o",
    "filterwarnings=default",
)


def main() -> int:
    """Run all combinations and print the outcome of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found = [one for one in PYTHONS if _runs(UV, "python", "find", "--no-python-downloads", one)]
    same = [version("torch")]
    parser.add_argument("--python", nargs="+", default=found, help="default: %(default)s")
    parser.add_argument("--torch", nargs="+", default=same, help="default: %(default)s")
    parser.add_argument("args", nargs="*", help="for pytest")
    given = parser.parse_args()
    outcomes = {}
    for python, torch in itertools.product(given.python, given.torch):
        resolution = "lowest-direct" if python == given.python[0] else "highest"
        title = f"Python {python}, torch {torch}, {resolution} versions of the rest"
        _print(f"\n{title}\n\n")
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            outcomes[title] = _tested(Path(folder), python, torch, resolution, given.args)
    _print("".join(f"\n{title}: {outcome}" for title, outcome in outcomes.items()) + "\n")
    return int(set(outcomes.values()) != {"passed"})


def _tested(
    folder: Path, python: str, torch: str, resolution: str, arguments: Sequence[str]
) -> str:
    """Return the outcome of the tests in an environment in `folder`."""
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n")
    environment = {**os.environ, "VIRTUAL_ENV": str(folder / "venv")}
    if links := os.environ.get("PIP_FIND_LINKS"):
        environment.setdefault("UV_FIND_LINKS", links)
    install = ("--resolution", resolution, "--constraint", str(constraints), "--editable", ".[dev]")
    steps = {
        "no environment": (UV, "venv", "--quiet", "--python", python, folder / "venv"),
        "not installed": (UV, "pip", "install", "--quiet", *install),
        "failed": (folder / "venv/bin/python", *PYTEST, *arguments),
    }
    for outcome, command in steps.items():
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return outcome
    return "passed"


def _runs(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
