"""Run the tests with other versions of Python, torch and all dependencies.

usage: python -m tests.versions [--python 3.10 3.13] [--torch 2.6.0 2.13.0] [-- ARGS]
       python -m tests.versions --resolve [--python 3.10 3.13]

By default this takes every Python that uv or pyenv has and pyproject.toml allows, and the torch of
this environment, in the same build: a CUDA build is several gigabytes. The newest versions of
everything else are used, and with the first Python that has such a build of torch also the lowest
that pyproject.toml allows. A Python without one runs only the tests that need no torch. Each
combination gets an environment of its own, which is removed afterwards. ARGS are passed to pytest.
The status is 1 if tests fail with any of the combinations.

With `--resolve`, nothing is installed or run. It prints which torch each extra would get on each
Python and platform, and among how many packages, by the metadata of the index alone: with the
lowest versions that pyproject.toml allows, and with the newest. The status is 1 if any combination
has no solution, or only one that needs a compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import metadata, version
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
PYTHONS = [f"3.{minor}" for minor in range(10, 20)]
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
# Old packages cause warnings of newer ones that they use.
PYTEST = ("-m", "pytest", "-n", "3", "--dist", "worksteal", "-o", "filterwarnings=default")
NEEDS_TORCH = (
    "tests/record/test_lock.py",
    "tests/watch/browser",
    "tests/watch/test_logs.py",
    "tests/watch/test_remote.py",
    "tests/watch/test_timings.py",
)
TORCH_FREE = (
    "tests/cluster/test_cluster.py",
    "tests/cluster/test_interfaces.py",
    "tests/comm/test_hang_report.py",
    "tests/comm/test_link.py",
    "tests/comm/test_status.py",
    "tests/house/test_imports.py",
    "tests/launch/test_cluster_spec.py",
    "tests/launch/test_membership.py",
    "tests/record",
    "tests/test_config.py",
    "tests/test_host_cgroups.py",
    "tests/test_storage.py",
    "tests/tools/test_doctor.py",
    "tests/tools/test_kubernetes.py",
    "tests/watch",
    *(f"--ignore={path}" for path in NEEDS_TORCH),
    "--deselect=tests/tools/test_doctor.py::test_gpus_are_counted_by_the_driver_and_by_torch",
    "--deselect=tests/record/test_events.py::test_a_newer_format_is_refused_with_the_version_to_install",
)
RESOLUTIONS = ("lowest-direct", "highest")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
FAILURES = {"failed", "not installed", "no environment"}


def main() -> int:
    """Run all combinations and print the outcome of each."""
    _find_more()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    pythons = [
        python for python in PYTHONS if _runs(UV, "python", "find", "--no-python-downloads", python)
    ]
    same = [version("torch")]
    parser.add_argument("--python", nargs="+", default=pythons, help="default: %(default)s")
    parser.add_argument("--torch", nargs="+", default=same, help="default: %(default)s")
    parser.add_argument("--resolve", action="store_true", help="install and run nothing")
    parser.add_argument("args", nargs="*", help="for pytest")
    options = parser.parse_args()
    if options.resolve:
        extras = metadata("samestep").get_all("Provides-Extra")
        combinations = product(options.python, PLATFORMS, RESOLUTIONS, extras)
        resolved = [_resolves(*combination) for combination in combinations]
        return int(not all(resolved))
    outcomes = {}
    for torch in options.torch:
        resolutions = [*RESOLUTIONS]
        for python in options.python:
            has_torch = _has_build(python, torch)
            for resolution in resolutions if has_torch else ["highest"]:
                title = f"Python {python}, {'torch' if has_torch else 'no build of torch'} {torch}"
                title += f", {resolution} versions of the rest"
                _print(f"\n{title}\n\n")
                with tempfile.TemporaryDirectory(prefix="versions-") as name:
                    folder = Path(name)
                    if has_torch:
                        outcome = _tested(folder, python, torch, resolution, options.args)
                    else:
                        outcome = _tested_without_torch(folder, python, options.args)
                    outcomes[title] = outcome
            resolutions = ["highest"] if has_torch else resolutions
    _print("".join(f"\n{title}: {outcome}" for title, outcome in outcomes.items()) + "\n")
    return int(not FAILURES.isdisjoint(outcomes.values()))


def _resolves(python: str, platform: str, resolution: str, extra: str) -> bool:
    """Print what an extra would get from the index, and return whether it can be installed."""
    options = ("--python-version", python, "--python-platform", platform)
    options += ("--resolution", resolution, "--no-build", "--quiet", "--no-header", "--no-annotate")
    done = subprocess.run(
        (UV, "pip", "compile", *options, "--extra", extra, "pyproject.toml"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    outcome = f"torch {found.get('torch')} among {len(found)} packages"
    if done.returncode:
        outcome = f"no solution\n{done.stderr}"
    _print(f"Python {python}, {platform}, {resolution}, {extra}: {outcome}\n")
    return done.returncode == 0


def _tested(
    folder: Path, python: str, torch: str, resolution: str, arguments: Sequence[str]
) -> str:
    """Return the outcome of the tests in an environment in `folder`."""
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n")
    options = ("--resolution", resolution, "--constraint", constraints)
    extras = ".[dev,gpu,lightning,transformers]"
    return _outcome(folder, python, (*options, "--editable", extras), arguments) or "passed"


def _tested_without_torch(folder: Path, python: str, arguments: Sequence[str]) -> str:
    """Return the outcome of the tests that need no torch, or that they were skipped."""
    overrides = folder / "overrides.txt"
    overrides.write_text('torch ; sys_platform == "never"\n')
    install = ("--overrides", overrides, "--editable", ".[dev]")
    outcome = _outcome(folder, python, install, (*TORCH_FREE, *arguments))
    if outcome in {"no environment", "not installed"}:
        return f"skipped ({outcome})"
    return outcome or "passed, torch-free tests only"


def _outcome(
    folder: Path, python: str, install: Sequence[str | Path], arguments: Sequence[str]
) -> str | None:
    """Return what went wrong, if anything, in installing and running the tests."""
    environment = {**os.environ, "VIRTUAL_ENV": str(folder / "venv")}
    steps = {
        "no environment": (UV, "venv", "--quiet", "--python", python, folder / "venv"),
        "not installed": (UV, "pip", "install", "--quiet", *install),
        "failed": (folder / "venv/bin/python", *PYTEST, *arguments),
    }
    for outcome, command in steps.items():
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return outcome
    return None


def _find_more() -> None:
    """Let uv find the Pythons of pyenv, and the packages that pip finds."""
    folders = [str(path.parent) for path in PYENV.glob("versions/3.*/bin/python3")]
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])
    if links := os.environ.get("PIP_FIND_LINKS"):
        os.environ.setdefault("UV_FIND_LINKS", links)


def _has_build(python: str, torch: str) -> bool:
    """Return whether there is a build of torch for this Python."""
    with tempfile.TemporaryDirectory() as folder:  # Debian's Python refuses without --target
        options = ("--dry-run", "--no-deps", "--python", python, "--target", folder)
        return _runs(UV, "pip", "install", *options, f"torch=={torch}")


def _runs(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
