"""What a launcher's files need before workers are forked, so that none goes astray and none stays behind."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER: Final = "SAMESTEP_INTERNAL_FOLDER"
_STANDARD_FILES: Final = 3  # stdin, stdout and stderr
_LONGEST: Final = 70  # bytes of a folder's path, so that the address of a socket in it has no more than the 107 of unix(7)
_SHORT: Final = "/tmp"  # noqa: S108  what is made there has a name that cannot be guessed, and is its owner's alone


def open_standard_files() -> None:
    """Let closed standard files be open to nothing: the next file opened would take their place, and be printed to by workers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < _STANDARD_FILES:
        os.set_inheritable(file, True)  # noqa: FBT003  a name is not taken
    os.close(file)


@contextmanager
def one_folder() -> Iterator[Mapping[str, str]]:
    """Yield the variable that names workers a folder, which the first of them to use it makes, and which goes at the end of the block."""
    name = f"samestep-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) > _LONGEST:
        folder = Path(_SHORT) / name
    try:
        yield {FOLDER: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def use_one_folder() -> None:
    """Have the sockets of this process and those that it starts put into the launcher's folder, where there is one.

    By itself multiprocessing makes a folder a process, and those of killed processes stay.
    """
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001  there is no other way
