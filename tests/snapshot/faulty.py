"""An in-process storage with injected faults, for URLs that start with faulty://."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from samestep.storage import Retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

URL = "faulty://far/run"
HASTY = Retries(tries=4, first_seconds=1e-4, longest_seconds=1e-3)


class FaultyFileSystem(MemoryFileSystem):
    """Calls `before(operation, path)`, which may raise; records successful `calls` below `URL`."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls: ClassVar[list[tuple[str, str]]] = []
    before: ClassVar[Callable[[str, str], object]] = staticmethod(lambda operation, path: None)
    lock = threading.RLock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def _call(self, operation: str, path: str) -> None:
        short = self._strip_protocol(path).removeprefix("/far/run").lstrip("/")
        type(self).before(operation, short)
        self.calls.append((operation, short))

    def ls(self, path, **kwargs):
        self._call("ls", path)
        return super().ls(path, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._call("cat_file", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def put_file(self, lpath, rpath, **kwargs):
        self._call("put_file", rpath)
        with self.lock:
            return super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._call("pipe_file", path)
        with self.lock:  # memory has no conditional writes
            return super().pipe_file(path, value, mode=mode, **kwargs)

    def cp_file(self, path1, path2, **kwargs):
        self._call("cp_file", path1)
        return super().cp_file(path1, path2, **kwargs)

    def rm(self, path, **kwargs):
        self._call("rm", path)
        return super().rm(path, **kwargs)


@contextmanager
def faulty_storage() -> Iterator[type[FaultyFileSystem]]:
    """Yield the file system behind `URL`, empty and without faults."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    try:
        yield FaultyFileSystem
    finally:
        FaultyFileSystem.store.clear()
        FaultyFileSystem.pseudo_dirs[:] = [""]
        FaultyFileSystem.calls.clear()
        FaultyFileSystem.before = staticmethod(lambda operation, path: None)


def failing(times: int, error: Exception, only: str = "") -> Callable[[str, str], None]:
    """Return a fault: the first `times` calls, or those of one operation, raise."""
    left = [times]

    def before(operation: str, _: str) -> None:
        if only in {"", operation} and left[0]:
            left[0] -= 1
            raise error

    return before
