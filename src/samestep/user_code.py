"""Whose code a file, class or frame is: the user's, or that of samestep, Python or a package."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary
from typing import Final

SAMESTEP: Final = f"{Path(__file__).parent}{os.sep}"
STANDARD: Final = f"{Path(os.__file__).parent}{os.sep}"  # packages may be below it
PACKAGES: Final = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
FROZEN: Final = "<frozen"  # modules of Python's own start
NOT_USERS: Final = (SAMESTEP, STANDARD, FROZEN)
_TORCH: Final = getattr(find_spec("torch"), "origin", None) or ""  # which is not imported here
BELOW_CALLERS: Final = (SAMESTEP, f"{Path(_TORCH).parent}{os.sep}", FROZEN)
KEPT_FILES: Final = 4096
LOADER: Final = "dataloader.py"  # torch's: shown, because the worker waits for loader processes


def is_users(path: str) -> bool:
    """Return whether a file of code is the user's own, also of a notebook or of `exec`.

    So is the package, installed or not, that runs as a program, as in `python -m package.train`.
    """
    return _is_users(path, getattr(sys.modules.get("__main__"), "__file__", None) or "")


@lru_cache(KEPT_FILES)  # asked for each function that a loss function reaches
def _is_users(path: str, program: str) -> bool:
    is_theirs = not path.startswith(NOT_USERS) and not is_of_package(path)
    return is_theirs or (not path.startswith(SAMESTEP) and path.startswith(_package_of(program)))


def _package_of(program: str) -> str:
    """Return the folder or file of a program below a folder of packages, NUL if it is in none."""
    ends = [program.rfind(folder) + len(folder) for folder in PACKAGES if folder in program]
    if not ends:
        return "\0"  # in no path
    name, separator, _ = program[max(ends) :].partition(os.sep)
    return f"{program[: max(ends)]}{name}{separator}"


def is_installed(kind: type) -> bool:
    """Return whether a class is part of samestep, Python or an installed package."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "builtins" or (path is not None and not is_users(path))


def is_callers(frame: FrameSummary) -> bool:
    """Return whether a frame is of user code or its packages, not of samestep, torch or Python."""
    path = frame.filename
    return path.endswith(LOADER) or (
        not path.startswith(BELOW_CALLERS)
        and (is_of_package(path) or not path.startswith(STANDARD))
    )


def is_of_package(path: str) -> bool:
    """Return whether a file of code is part of an installed package."""
    return any(folder in path for folder in PACKAGES)
