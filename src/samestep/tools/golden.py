"""A file of a script's hashes after each step, against which later versions are checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, VerifyError
from samestep.host import printable
from samestep.storage import read_regular, write_atomically
from samestep.tools import differing, first_of

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.trace import RunTrace

FORMAT: Final = 1
LARGEST_BYTES: Final = 2**26
# where the same program may have other bits; other packages only make the data
PLACE: Final = ("torch", "cuda", "cudnn", "devices", "threads", "oneDNN")
CANNOT_COMPARE: Final = 2  # exit status: on another machine
CANNOT_JUDGE: Final = 125  # the script does not run; git bisect then skips the commit


class CannotJudgeError(VerifyError):
    """A script does not run, so it is neither the same as a golden file nor another one."""

    status = CANNOT_JUDGE


@dataclass(frozen=True)
class Golden:
    """The hashes of the first steps of a script by name, and the `place` in which it ran.

    `steps` has the number of complete steps as text. `last` is that after which the script was to
    be stopped.
    """

    place: Mapping[str, str]
    lanes: int
    last: int
    steps: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, run: RunTrace, environment: Mapping[str, str], lanes: int, last: int) -> Golden:
        """Return what a run did, of which the start has recorded its `environment`."""
        place = {name: environment[name] for name in PLACE}
        steps = {
            str(trace.step): {name: digest[:16] for name, digest in trace.hashes.items()}
            for trace in run.steps
        }
        return cls(place, lanes, last, steps)

    @classmethod
    def read(cls, path: Path) -> Golden:
        """Read a file. Raises `ConfigError` if `write` has not written it."""
        try:
            return _parse(json.loads(read_regular(path, LARGEST_BYTES, follows_links=True)))
        except (
            AttributeError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(
                f"--golden: cannot read {path} ({type(error).__name__}: {error}); restore it, or"
                " remove it to have it written again"
            ) from error

    @staticmethod
    def check_writable(path: Path) -> None:
        """Raise `ConfigError`, before the runs, if a new file cannot be written to its folder."""
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            folder = path.parent
            raise ConfigError(f"--golden: {folder} must be a folder that can be written to")

    def write(self, path: Path) -> None:
        """Write a durable file. Raises `ConfigError` if that is not possible."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)
        try:
            write_atomically(path, f"{text}\n".encode())
        except OSError as error:
            raise ConfigError(f"--golden: cannot write {path}: {error.strerror}") from error

    def other_place(self, now: Golden) -> str:
        """Return how the place of a run differs from that of the file, "" if it does not."""
        names = [name for name in PLACE if self.place.get(name) != now.place[name]]
        return "; ".join(
            f"{name} was {printable(str(self.place.get(name)))} and is {now.place[name]}"
            for name in names
        )

    def difference(self, now: Golden) -> str:
        """Return the first difference of a run in the same place, "" without one."""
        if self.lanes != now.lanes:
            return f"lanes were {self.lanes} and are {now.lanes}"
        for step in sorted({*self.steps, *now.steps}, key=int):
            old, new = self.steps.get(step), now.steps.get(step)
            if old is None or new is None:
                return f"step {step}: only {'the run' if old is None else 'the file'} has it"
            if names := differing(old, new):
                return f"step {step}: {first_of(names)}"
        return ""


def _parse(content: Any) -> Golden:
    if (file_format := content.pop("format")) != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {file_format!r:.80}")
    golden = Golden(**content)
    mappings = [golden.place, *golden.steps.values()]
    texts = [text for mapping in mappings for pair in mapping.items() for text in pair]
    numbers = (golden.lanes, golden.last)
    if not all(isinstance(text, str) for text in texts) or not golden.steps:
        raise ValueError("place and steps must have names with texts")
    if any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"lanes and last must be at least 1, got {numbers!r:.80}")
    if not all(step.isascii() and step.isdecimal() for step in golden.steps):
        raise ValueError(f"steps must be numbers, got {list(golden.steps)!r:.80}")
    return golden


def judge(path: Path, golden: Golden | None, now: Golden) -> int:
    """Compare a run with the file, or write the file if there was none; return the exit status."""
    if golden is None:
        now.write(path)
        print(f"wrote {path}")
        return 0
    if place := golden.other_place(now):
        print(f"cannot be compared with {path} here: {place}")
        return CANNOT_COMPARE
    if difference := golden.difference(now):
        print(f"not as in {path}, first at {difference}")
        return 1
    print(f"as in {path}")
    return 0
