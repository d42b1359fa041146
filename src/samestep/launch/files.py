"""What a launcher's files need before workers are forked, so that none goes astray and none stays behind."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FOLDER: Final = "SAMESTEP_INTERNAL_FOLDER"
_REFUSED: Final = {errno.EACCES, errno.ENOSYS, errno.EPERM}  # by seccomp profiles
_STANDARD_FILES: Final = 3  # stdin, stdout and stderr
# bytes of a folder's path, so that the address of a socket in it has no more than the 107 of
# unix(7)
_LONGEST: Final = 70
# what is made there has a name that cannot be guessed, and is its owner's alone
_SHORT: Final = "/tmp"  # noqa: S108


def unnamed_memory(name: str) -> int | None:
    """Open memory that the kernel frees however its users end; None where the kernel or this Python has none, or a sandbox refuses it."""
    try:
        return os.memfd_create(name)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def unnamed_file(name: str) -> int:
    """Open such memory or, where there is none, a temporary file that is in no directory any more."""
    file = unnamed_memory(name)
    if file is None:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    return file


def lacking_calls() -> list[str]:
    """Return which of the kernel's calls that workers need to share memory do not work here."""
    needed: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("samestep"),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    return [name for name, call in needed.items() if not _opens(call)]


def _opens(call: Callable[[], int]) -> bool:
    try:
        os.close(call())
    except (AttributeError, OSError):
        return False
    return True


def open_standard_files() -> None:
    """Let closed standard files be open to nothing: the next file opened would take their place, and be printed to by workers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < _STANDARD_FILES:
        os.set_inheritable(file, True)
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
        # there is no other way
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001
