"""The check of all image files before the first step, so that no fault ends a run hours later.

The workers share the files. What is known of a file is kept in the run's directory and reused
while its size and time of change are the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import __version__ as pillow_version
from tqdm import tqdm

import samestep as ss
from recipes.image_files import (
    Facts,
    ImageError,
    ImageFileSettings,
    inspect,
    largest_value,
    listed_path,
    printable,
    read_text,
)

CACHE_FILE = "checked-files.json"
LEFT_OUT_FILE = "left-out.txt"
VERSION = 2  # of the cache
THREADS = min(8, 2 * (os.cpu_count() or 1))
CHUNK = 512  # files of a worker between two exchanges, for which others wait
FULL_CHUNK = 32  # the same if all pixels are read
SHOWN_FAULTS = 5
SHOWN_CLASSES = 10
MEASURED = 8  # files with 16 bits whose largest pixel is shown
BAR_AFTER = 1.0  # seconds

Files = Mapping[str, Sequence[Path]]  # by part, such as train and val
FaultOf = Callable[[str, int, Facts], str | None]


class Fault(NamedTuple):
    """A file that cannot be used."""

    part: str
    index: int
    text: str
    kind: str


class FileCheck:
    """Checks the files of a data set as `settings.check` says, once per start.

    All workers of `run` call `usable` together. `say` prints a line; without it, `run.print` does,
    or nothing.
    """

    def __init__(
        self,
        settings: ImageFileSettings,
        directory: Path | None = None,
        run: ss.Run | None = None,
        say: Callable[[str], object] | None = None,
        *,
        collect: bool = False,
    ) -> None:
        self.settings, self.directory, self.run = settings, directory, run
        self.say = say or (run.print if run is not None else lambda _: None)
        self.collect = collect  # do not raise: the caller reads `faults`
        self.faults: list[Fault] = []
        self._files: Files = {}
        self.is_main = run is None or run.is_main
        self.is_writing = self.is_main and not (run is not None and run.config.read_only)

    def usable(
        self,
        files: Files,
        *,
        fault_of: FaultOf | None = None,
        least_side: tuple[str, int] = ("", 0),
    ) -> dict[str, list[int]]:
        """Return the indices of each part's files that are left.

        `fault_of` returns what is wrong with the part, index and facts of a readable file, and
        `least_side` is the name of a size in pixels to which smaller images are enlarged. Raises
        `ImageError` for files that cannot be used, unless `settings.broken` is "skip".
        """
        self._files, left_out = files, self._listed_out(files)
        if self.settings.check != "none":
            self.faults = self._faults_of(files, left_out, fault_of, least_side)
            self._judge(left_out)
            if not self.collect:
                self._keep(LEFT_OUT_FILE, self.list_of_faults() if self.faults else None)
        for fault in self.faults:
            left_out[fault.part].add(fault.index)
        return {
            part: [index for index in range(len(paths)) if index not in left_out[part]]
            for part, paths in files.items()
        }

    def list_of_faults(self) -> bytes:
        """Return the list of unusable files for `data.leave_out`, with reasons as comments."""
        root, lines = getattr(self.settings, "path", None), []
        for fault in self.faults:
            path = self._files[fault.part][fault.index]
            inside = root is not None and path.is_relative_to(root)
            lines.append(b"# " + printable(fault.text).encode())
            lines.append(os.fsencode(path.relative_to(root) if inside else path.absolute()))
        return b"\n".join([*lines, b""])

    def _listed_out(self, files: Files) -> dict[str, set[int]]:
        """Return the indices of each part's files that `data.leave_out` lists, and print both."""
        left_out: dict[str, set[int]] = {part: set() for part in files}
        if self.settings.leave_out is None:
            return left_out
        root = getattr(self.settings, "path", None) or Path()
        text = read_text(self.settings.leave_out, "surrogateescape")
        names = [line for line in map(str.strip, text.split("\n")) if line and line[0] != "#"]
        listed = {listed_path(root, name).absolute(): name for name in names}
        unknown = set(listed)
        for part, paths in files.items():
            absolute_paths = [path.absolute() for path in paths]
            left_out[part] = {index for index, path in enumerate(absolute_paths) if path in listed}
            if count := len(left_out[part]):
                self.say(f"{part}: data.leave_out lists {count} of {len(absolute_paths)} files")
            unknown.difference_update(absolute_paths)
        if strange := sorted(listed[path] for path in unknown if not path.exists()):
            of_all = f"{len(strange)} of {len(names)} names are not found"
            self.say(f"data.leave_out: {of_all} in {root}, first: {printable(strange[0])}")
        return left_out

    def _faults_of(
        self,
        files: Files,
        left_out: Mapping[str, set[int]],
        fault_of: FaultOf | None,
        least_side: tuple[str, int],
    ) -> list[Fault]:
        """Inspect all files; the result is that of rank 0 on all workers."""
        places = [
            (part, index)
            for part, paths in files.items()
            for index in range(len(paths))
            if index not in left_out[part]
        ]
        paths = [files[part][index] for part, index in places]
        facts = self._facts_of(paths)
        faults: list[Fault] = []
        if self.is_main:
            for (part, index), file_facts in zip(places, facts, strict=True):
                text = file_facts.fault or (fault_of and fault_of(part, index, file_facts))
                if text:
                    faults.append(Fault(part, index, text, file_facts.kind or "broken"))
            for part in files:
                readable = [
                    (path, file_facts)
                    for (place, _), path, file_facts in zip(places, paths, facts, strict=True)
                    if place == part and not file_facts.fault
                ]
                self._say_conversions(part, readable, least_side)
            self._say_copies(places, paths, facts)
        return faults if self.run is None else self.run.broadcast(faults)

    # The facts of files

    def _facts_of(self, paths: Sequence[Path]) -> list[Facts]:
        """Return the facts of all files on rank 0, from the cache or by reading them."""
        full = self.settings.check == "full"
        cache, stamps, todo = {}, [], []
        if self.is_main:
            cache = self._read_cache()
            stamps = [_stamp(path) for path in paths]
            for number, (path, stamp) in enumerate(zip(paths, stamps, strict=True)):
                kept = cache.get(os.fspath(path))
                if kept is None or kept[0] != stamp or (full and not (kept[1] or kept[2].fault)):
                    todo.append(number)
        if self.run is not None:
            todo = self.run.broadcast(todo)
        inspected = self._inspect([paths[number] for number in todo], full)
        try:
            for number, facts in zip(todo, inspected, strict=True):
                if self.is_main:
                    cache[os.fspath(paths[number])] = (stamps[number], full, facts)
        finally:  # also what was read before the check was interrupted
            if todo and self.is_main:
                names = map(os.fspath, paths)
                self._write_cache({name: cache[name] for name in names if name in cache})
        return [cache[os.fspath(path)][2] for path in paths] if self.is_main else []

    def _inspect(self, paths: Sequence[Path], full: bool) -> Iterator[Facts]:
        """Yield the facts of all files, chunk by chunk; each worker reads its share of a chunk."""
        rank, workers = (0, 1) if self.run is None else (self.run.rank, self.run.world_size)
        inspect_file = partial(inspect, settings=self.settings, full=full)
        bar = self._bar(len(paths))
        with ThreadPoolExecutor(THREADS if full else 1) as pool:
            size = workers * (FULL_CHUNK if full else CHUNK)
            for start in range(0, len(paths), size):
                chunk = paths[start : start + size]
                shares = [list(pool.map(inspect_file, chunk[rank::workers]))]
                if self.run is not None:
                    shares = self.run.all_gather(shares[0])
                for number in range(len(chunk)):
                    yield shares[number % workers][number // workers]
                if bar is not None:
                    bar.update(len(chunk))
        if bar is not None:
            bar.close()

    def _bar(self, total: int) -> tqdm[Any] | None:
        if not (sys.stderr.isatty() if self.run is None else self.run.has_terminal):
            return None
        words = "checking image files"
        return tqdm(total=total, unit="file", desc=words, delay=BAR_AFTER, leave=False)

    def _read_cache(self) -> dict[str, tuple[list[int] | None, bool, Facts]]:
        """Return the stamp, whether all pixels were read, and the facts by path."""
        if self.directory is None:
            return {}
        try:
            content = json.loads((self.directory / CACHE_FILE).read_bytes())
            if content["key"] != self._key():
                return {}
            return {
                path: (stamp, full, Facts(*facts))
                for path, (stamp, full, facts) in content["files"].items()
            }
        except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # the files are read again

    def _write_cache(self, cache: Mapping[str, tuple[list[int] | None, bool, Facts]]) -> None:
        # what the system could not read, it may read at the next start
        kept = {path: entry for path, entry in cache.items() if entry[2].kind in {"", "broken"}}
        self._keep(CACHE_FILE, json.dumps({"key": self._key(), "files": kept}).encode())

    def _keep(self, name: str, content: bytes | None) -> None:
        """Write a file of the directory, or remove it; a failure is printed and no error."""
        if self.directory is None or not self.is_writing:
            return
        file, part = self.directory / name, self.directory / f".{name}.{os.getpid()}.tmp"
        try:
            if content is None:
                file.unlink(missing_ok=True)
                return
            self.directory.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(file)  # check.py may write the same file
        except OSError as error:
            self.say(f"{name} was not written: {error}")

    def _key(self) -> list[Any]:
        """Return what the facts depend on besides the files."""
        return [VERSION, pillow_version, self.settings.bits, self.settings.most_pixels]

    # What is said and refused

    def _judge(self, left_out: Mapping[str, set[int]]) -> None:
        """Raise `ImageError` for faults that are not skipped; record those that are."""
        if not self.faults or self.collect:
            return
        unreadable = [fault for fault in self.faults if fault.kind == "unreadable"]
        if self.settings.broken == "error" or unreadable:
            raise ImageError(self._message(unreadable or self.faults))
        for part, count in Counter(fault.part for fault in self.faults).items():
            total = len(self._files[part]) - len(left_out[part])
            if count > self.settings.broken_limit * total:
                limit = f"data.broken_limit={self.settings.broken_limit:g}"
                raise ImageError(
                    f"{part}: {count} of {total} files are broken, more than {limit} allows, "
                    f"first: {self._first(part)}; recipes/check.py lists all of them"
                )
            self.say(f"{part}: left out {count} of {total} files, first: {self._first(part)}")

    def _first(self, part: str) -> str:
        return next(fault.text for fault in self.faults if fault.part == part)

    def _message(self, faults: Sequence[Fault]) -> str:
        if len(faults) == 1:
            return f"{faults[0].text}; data.broken=skip trains without broken files"
        total = sum(map(len, self._files.values()))
        lines = [f"{len(faults)} of {total} image files cannot be used:"]
        lines += [f"  {fault.text}" for fault in faults[:SHOWN_FAULTS]]
        lines.append(
            "recipes/check.py lists all of them; data.broken=skip trains without broken files"
        )
        return "\n".join(lines)

    def _say_conversions(
        self, part: str, readable: Sequence[tuple[Path, Facts]], least_side: tuple[str, int]
    ) -> None:
        """Print how many files of a part are not read as they are."""
        settings, (name, side) = self.settings, least_side
        wide = [path for path, facts in readable if facts.mode.startswith("I")]
        kinds: dict[str, list[Path]] = {
            "turned by their EXIF orientation": [path for path, facts in readable if facts.turned],
            f"laid on {settings.background}, as they have transparency (data.background)": [
                path for path, facts in readable if facts.transparent
            ],
            "read as their first frame": [path for path, facts in readable if facts.frames],
            f"smaller than {name}={side} and enlarged": [
                path for path, facts in readable if min(facts.width, facts.height) < side
            ],
            f"16-bit and divided by {2**settings.bits - 1} (data.bits={settings.bits})": wide,
        }
        for words, paths in kinds.items():
            if paths:
                self.say(
                    f"{part}: {len(paths)} of {len(readable)} images are {words}, "
                    f"first: {printable(paths[0])}"
                )
        if wide and (needed := _bits_of(wide[:MEASURED])) < settings.bits:
            self.say(
                f"{part}: the first {len(wide[:MEASURED])} of the 16-bit images have pixels of at "
                f"most {needed} bits and would be dark; set data.bits={max(8, needed)} if all have"
            )

    def _say_copies(
        self, places: Sequence[tuple[str, int]], paths: Sequence[Path], facts: Sequence[Facts]
    ) -> None:
        """Print how many files have the bytes of another one, if `check` is "full"."""
        by_digest: dict[str, list[int]] = defaultdict(list)
        for number, file_facts in enumerate(facts):
            if file_facts.digest:
                by_digest[file_facts.digest].append(number)
        groups: dict[str, list[list[int]]] = defaultdict(list)
        for numbers in by_digest.values():
            if len(numbers) > 1:
                parts = dict.fromkeys(places[number][0] for number in numbers)
                groups[" and ".join(parts)].append(numbers)
        for parts, copies in groups.items():
            first = " and ".join(printable(paths[number]) for number in copies[0][:2])
            count = sum(len(numbers) - 1 for numbers in copies)
            self.say(f"{parts}: files with the content of another: {count}, first: {first}")


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return the number of each class, or its range for many classes."""
    if len(counts) <= SHOWN_CLASSES:
        return ", ".join(f"{name} {count}" for name, count in counts.items())
    low, high = min(counts.values()), max(counts.values())
    return f"{len(counts)} classes with {low if low == high else f'{low} to {high}'} each"


def _stamp(path: Path) -> list[int] | None:
    """Return the size of a file and when it and its entry were changed, None if there is none.

    A file that replaces another one has its own entry, even with the size and time of the other.
    """
    try:
        state = path.stat()
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _bits_of(paths: Sequence[Path]) -> int:
    """Return the bits of the largest pixel of images; 16 if one cannot be read."""
    try:
        return max(largest_value(path) for path in paths).bit_length()
    except Exception:  # noqa: BLE001  of many types; the image itself is reported elsewhere
        return 16
