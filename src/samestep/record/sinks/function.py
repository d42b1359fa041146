"""The record passed to a user's function, file by file, as a run's snapshots are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.errors import RecordError
from samestep.record.cursor import Cursor
from samestep.record.files import FOLDER, Part, parts_of
from samestep.record.images import paths_in
from samestep.record.sinks.base import find_callable
from samestep.record.source import Source

PAUSE_SECONDS: Final = 10.0


def find_function(name: str) -> Callable[[Path], object]:
    """Return the function of the option `transfer`. Raises `ConfigError`."""
    return find_callable(name, "transfer", "module:function", "a function of a file's path")


class FunctionDestination:
    """Calls a function with the path of every image, and of every part of the events, which is a file only as long as the call lasts."""

    def __init__(self, name: str, directory: Path, source: Source, forwarded: Cursor) -> None:
        self.name, self.pause_seconds, self.dropped = name, PAUSE_SECONDS, 0
        self._directory, self._source, self._forwarded = directory, source, forwarded
        self._images: set[str] = set()  # that were passed, of a part that was not

    def begin(self) -> int:
        """Import the function, and remove what a kill left behind."""
        self._function = find_function(self.name)
        folder = self._directory / FOLDER
        for part in parts_of({path.name: path.stat().st_size for path in folder.iterdir()}):
            (self._directory / part.path).unlink()
        return self._forwarded.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Pass the images and the part."""
        for path in paths_in(lines):
            if path not in self._images:
                self._pass_image(path)
        path = Part(offset, offset + len(lines)).path
        file = self._directory / path
        try:
            file.write_bytes(lines)
            self._call(path)
        finally:
            with suppress(FileNotFoundError):  # the function may move it
                file.unlink()
        self._images.clear()
        self._forwarded.keep(self.name, offset + len(lines))

    def _pass_image(self, path: str) -> None:
        try:
            self._source.open_image(path)
        except RecordError:  # somebody removed it
            self.dropped += 1
        else:
            self._call(path)
        self._images.add(path)

    def _call(self, path: str) -> None:
        try:
            self._function(self._directory / path)
        except SystemExit as error:  # that would end this thread without a word
            raise RecordError(
                f"{self.name} exited with {error.code!r} when it was given {path}"
            ) from error

    def close(self) -> None:
        """Every call has returned."""
