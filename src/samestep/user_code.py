"""Whose code a file, class or frame is: the user's, or that of samestep, Python or a package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary
from typing import Any, Final

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
    return _may_be_users(path) or (
        not path.startswith(SAMESTEP) and path.startswith(_package_of(program))
    )


def _may_be_users(path: str) -> bool:
    """Return whether a file is the user's own, whatever program runs."""
    return not path.startswith(NOT_USERS) and not is_of_package(path)


class ImportedModules:
    """The modules that may be the user's, found without looking twice at those of packages.

    A worker that looked at each of the 2,000 modules that it shares with the process it was forked
    from would copy the memory of all of them, because Python counts references in the objects.
    """

    def __init__(self) -> None:
        self._users = set[str]()  # names
        self._last = ""  # the name of the newest module of a package

    def note(self) -> None:
        """Look at the modules imported since the last call, before this process is forked."""
        newest_first = self._new_names()
        users = {n for n in newest_first if (file := _file_of(n)) and _may_be_users(file)}
        self._users |= users
        self._last = next((name for name in newest_first if name not in users), self._last)

    def files_in(self, folder: Path) -> set[Path]:
        """Return the user's files in a folder that this process has imported as modules."""
        # a program that is part of a package makes the modules of that package the user's
        is_package = is_of_package(_file_of("__main__"))
        names = [*sys.modules] if is_package else [*self._users, *self._new_names()]
        files = {_file_of(name) for name in names}
        return {Path(f) for f in files if f.startswith(f"{folder}{os.sep}") and is_users(f)}

    def _new_names(self) -> list[str]:
        """Return the names of modules imported after the last one that was noted, newest first."""
        while True:
            with suppress(RuntimeError):  # another thread imports a module meanwhile
                return list(takewhile(self._last.__ne__, reversed(sys.modules)))


def _file_of(name: str) -> str:
    """Return the file of an imported module, "" if it has none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file if isinstance(file, str) else ""


imported_modules: Final = ImportedModules()


def _package_of(program: str) -> str:
    """Return the folder or file of a program below a folder of packages, NUL if it is in none."""
    ends = [program.rfind(folder) + len(folder) for folder in PACKAGES if folder in program]
    if not ends:
        return "\0"  # in no path
    name, separator, _ = program[max(ends) :].partition(os.sep)
    return f"{program[: max(ends)]}{name}{separator}"


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a hook of PyTorch is a function of samestep, also one in a `partial`."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith("samestep.")


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
