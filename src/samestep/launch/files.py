"""What a launcher's files need before workers are forked, so that none goes astray and none stays behind."""

from __future__ import annotations

import os
from contextlib import contextmanager
from multiprocessing import process
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_STANDARD_FILES: Final = 3  # stdin, stdout and stderr
_FOLDER: Final = "tempdir"  # as multiprocessing has it among what a process passes on to those that it starts


def open_standard_files() -> None:
    """Let closed standard files be open to nothing: the next file opened would take their place, and be printed to by workers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < _STANDARD_FILES:
        os.set_inheritable(file, True)  # noqa: FBT003  a name is not taken
    os.close(file)


@contextmanager
def one_folder() -> Iterator[None]:
    """Have workers and their loader processes put their sockets into one folder, which goes at the end of the block.

    By itself multiprocessing makes a folder a process, and those of killed processes stay.
    """
    shared = process.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  there is no other way
    before = shared.get(_FOLDER)
    with TemporaryDirectory(prefix="samestep-", ignore_cleanup_errors=True) as folder:
        shared[_FOLDER] = folder
        try:
            yield
        finally:
            shared[_FOLDER] = before
