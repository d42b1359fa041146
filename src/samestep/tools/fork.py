"""`samestep fork`: a new run that shares the first steps of another one, bit for bit."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.config import flag_name
from samestep.errors import ConfigError, RecordError, VerifyError
from samestep.host import counted
from samestep.launch.local import add_options, as_text, given_options
from samestep.masking import MASK
from samestep.record import chain, read_events, read_history
from samestep.record.events import FILE_NAME, to_json
from samestep.record.files import FOLDER
from samestep.record.orders import order_files
from samestep.record.source import STARTS, STEP_EVENTS, open_source, step_position
from samestep.storage import sync, write_atomically
from samestep.tools import OUTPUT, add_script, command_of, damage_explained, first_failure, started
from samestep.tools.replay import RecordedRun, differing_rows, means_of

EVENT: Final = "forked"  # in the record of a fork: where it left the trunk, and which run that is
OF_TRUNK: Final = ("lanes", "seed")  # options that no fork can change
OF_COMMAND: Final = ("resume", "read_only")  # those that it sets itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep fork` to its parser."""
    add = parser.add_argument
    add("run", type=Path, help="directory of the run to fork, the trunk, which is only read")
    steps = "steps of the trunk that the fork has; it goes on with the next one"
    add("--at", type=int, required=True, metavar="STEPS", help=steps)
    arguments = "arguments of the trunk's script, if its record masks a secret in them"
    add("--trunk-args", metavar="ARGS", help=arguments)
    add_start(parser)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that start a new run in `--dir` from another one."""
    add = parser.add_argument
    add("-n", "--workers", type=int, default=1, metavar="N", help="workers (default: 1)")
    later = "only prepare --dir, and print the command that starts the run there"
    add("--no-start", action="store_true", help=later)
    add_options(parser)
    add_script(parser, "training script of the new run")


def main(options: argparse.Namespace) -> int:
    """Prepare the fork and start it; return its exit status."""
    target = Target.of(options)
    with damage_explained(options.run):
        record = RecordedRun.read(options.run, options.at, is_end=True)
        target.check(record)
    with target.prepared() as folder:
        if record.first_step == options.at and record.snapshot is not None:
            take(record.snapshot, folder)
        else:
            repeat(record, trunk_command(record, options), folder)
        branch(record, folder)
    return target.start()


@dataclass(frozen=True)
class Target:
    """A new run: its directory, the options of `samestep run`, and the command of its script."""

    trunk: Path
    directory: Path
    flags: Mapping[str, Any]
    workers: int
    command: Sequence[str]
    starts: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Target:
        """Read the arguments of `add_start`. Raises `ConfigError`."""
        command = command_of(options)
        flags = given_options(options)
        directory = flags.pop("dir", None)
        if directory is None:
            raise ConfigError("--dir is missing: pass a new directory for the new run")
        for name in OF_COMMAND:
            if name in flags:
                raise ConfigError(f"{flag_name(name)} is none of a new run; leave it out")
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"--dir must be new or empty, and {directory} is not")
        if directory.resolve().is_relative_to(options.run.resolve()):
            raise ConfigError(
                f"--dir must be outside of {options.run}, where nothing is written, got {directory}"
            )
        return cls(
            options.run, directory, flags, options.workers, command, starts=not options.no_start
        )

    def check(self, record: RecordedRun) -> None:
        """Raise `ConfigError` for options and workers that do not fit the run."""
        lanes = int(record.start["lanes"])
        trunk = {**record.start["config"], "lanes": lanes}
        for name in OF_TRUNK:
            if self.flags.get(name, trunk[name]) != trunk[name]:
                raise ConfigError(
                    f"{flag_name(name)} must be {trunk[name]}, as in {self.trunk}, got"
                    f" {self.flags[name]}: it is fixed for all steps of a run"
                )
        if not 1 <= self.workers <= lanes:
            raise ConfigError(f"-n must be from 1 to the {lanes} lanes, got {self.workers}")

    @contextmanager
    def prepared(self) -> Iterator[Path]:
        """Give the block a new folder, which becomes the directory if the block succeeds."""
        parent = self.directory.absolute().parent
        folder = parent / f".{self.directory.name}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
        try:
            yield folder
            folder.rename(self.directory)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def start(self) -> int:
        """Start the run in place of this process, or print how to start it."""
        flags = [f"{flag_name(name)}={as_text(value)}" for name, value in self.flags.items()]
        words = ["run", "-n", str(self.workers), "--dir", str(self.directory), *flags]
        words += self.command
        begin = "starting, and to go on after a stop" if self.starts else "to go on"
        print(f"{begin}: samestep {shlex.join(words)}", flush=True)
        if self.starts:
            os.execv(sys.executable, [sys.executable, "-m", "samestep", *words])  # noqa: S606
        return 0


def trunk_command(record: RecordedRun, options: argparse.Namespace) -> list[str]:
    """Return the script and the arguments of the trunk. Raises `ConfigError` if they are unknown.

    The script is that of the record, or the new one if both have the same name.
    """
    script, *arguments = shlex.split(str(record.start.get("command", ""))) or [""]
    if options.trunk_args is not None:
        arguments = shlex.split(options.trunk_args)
    elif any(MASK in word for word in arguments):
        raise ConfigError(
            "the arguments of the trunk have a secret, which its record masks; pass all of them:"
            f" --trunk-args {shlex.quote(shlex.join(arguments))}"
        )
    new, old = Path(options.script), Path(script)
    if options.module:
        name = old.with_suffix("").as_posix().removesuffix("/__main__")
        if f"/{name}".endswith(f"/{options.script.replace('.', '/')}"):
            return ["-m", options.script, *arguments]
    elif not old.is_file() and new.name == old.name:
        return [options.script, *arguments]
    if not script or not old.is_file():
        raise ConfigError(
            f"the script of the trunk, {script or 'which its record does not name'}, is needed to"
            f" repeat its steps from {record.first_step} on; start this command where it is, or"
            " fork at a snapshot"
        )
    return [script, *arguments]


def take(snapshot: Path, folder: Path) -> None:
    """Copy a snapshot, with which the run in a folder begins."""
    from samestep.snapshot.owner import Owner, store
    from samestep.snapshot.read import check

    shutil.copytree(snapshot, folder / snapshot.name)
    manifest = check(folder / snapshot.name)  # the trunk may have removed it meanwhile
    label = manifest.info.get("run") or {}
    names = secrets.token_hex(8), secrets.token_hex(8)
    origin = (str(label["id"]), manifest.step) if "id" in label else None
    store(folder, Owner(names[0], holder=names[1], origin=origin, adopts=origin is None))


def repeat(record: RecordedRun, command: Sequence[str], folder: Path) -> None:
    """Repeat the trunk's steps from its snapshot on in a folder, and compare them with its record.

    Raises `VerifyError` if they differ.
    """
    place = "the beginning" if record.snapshot is None else record.snapshot.name
    steps = counted(record.end - record.first_step, "step")
    print(f"repeating {steps} of {record.directory} from {place} …", file=sys.stderr, flush=True)
    with started(command, 1, folder, record.flags()) as process:
        status = process.wait()
    from samestep.run.environment import differences
    from samestep.snapshot.read import directory_name, inspect

    if status or not (folder / directory_name(record.end)).exists():
        raise VerifyError(
            f"the steps of the trunk cannot be repeated: {shlex.join(command)} ended with status"
            f" {status}:\n{first_failure(folder)}"
        )
    inspect(folder / directory_name(record.end))
    (start, *_) = [event for event in read_events(folder) if event["event"] in STARTS]
    lines = differences(record.start.get("environment", {}), start["environment"])
    was, now = record.means, means_of(folder)
    differing = [step for step in now.keys() & was.keys() if repr(now[step]) != repr(was[step])]
    lines = f"not as in the record:\n{lines}" if lines else ""
    if differing:
        what = f"have other bits than those of {record.directory}, first at step {min(differing)}"
    else:
        what = _other_chain(record, folder)
    if what:
        raise VerifyError(
            f"the repeated steps {what}; start the fork at a snapshot, or with the program of the"
            f" trunk. {lines}".rstrip()
        )
    if lines:
        print(lines, file=sys.stderr)


def _other_chain(record: RecordedRun, folder: Path) -> str:
    """Return in what the chain of repeated steps differs, "" if it does not, or one has none."""
    trunk = record.directory
    heads = [head_after(each, record.end) for each in (trunk, folder)]
    if None in heads or heads[0] == heads[1]:
        return ""
    with closing(chain.Chain.open(trunk)) as old, closing(chain.Chain.open(folder)) as new:
        parts = differing_rows(old, new, range(max(old.first, new.first), record.end))
    parts.pop("head", None)
    if parts:
        step = min(parts.values())
        named = " and ".join(part for part in chain.Row._fields if parts.get(part) == step)
        return f"have another chain than those of {trunk}, first at step {step} in: {named}"
    return f"begin with another head than those of {trunk}"


def head_after(directory: Path, steps: int) -> bytes | None:
    """Return the head of a run's chain after some steps, None if it has none."""
    with suppress(RecordError, IndexError), closing(chain.Chain.open(directory)) as rows:
        return rows.head_after(steps)
    return None


def branch(record: RecordedRun, folder: Path, **fields: Any) -> None:
    """Give the run in a folder the record of the trunk's first steps, and where it left them."""
    trunk, steps, run = record.directory, record.end, record.start.get("run")
    head = head_after(trunk, steps)
    if head is None and (trunk / chain.FILE).exists():
        text = f"{trunk / chain.FILE} does not reach step {steps}, where the fork's begins anew"
        print(text, file=sys.stderr)
    for left in (folder / FOLDER, folder / OUTPUT):  # of the repeated steps
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    (folder / FOLDER).mkdir()
    with (folder / FILE_NAME).open("w", encoding="utf-8") as file:
        for event in events_until(trunk, steps):
            if event["event"] == "image":
                copy_image(trunk, folder, str(event.get("path")))
            file.write(f"{to_json(event)}\n")
        names = {"step": steps, "trunk": str(trunk.resolve()), "run": run}
        names |= {"chain": None if head is None else head.hex(), **fields}
        file.write(f"{to_json({'time': time.time(), 'event': EVENT, **names})}\n")
    sync(folder / FILE_NAME)
    for order in order_files(trunk):
        shutil.copy(order, folder / FOLDER)
    if head is not None:
        with closing(chain.Chain.open(trunk)) as rows:
            size = chain.ROW_BYTES * (1 + steps - rows.first)  # the header is as long as a row
        with (trunk / chain.FILE).open("rb") as file:
            write_atomically(folder / chain.FILE, file.read(size))


def events_until(directory: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a run's first steps, without those that came after them."""
    is_later = False
    for event in read_history(directory):
        step = event.get("step")
        if isinstance(step, (int, float)):
            of_step = event.get("event") in STEP_EVENTS
            is_later = step_position(event) > (steps, False) if of_step else step > steps
        if not is_later:
            yield event


def copy_image(trunk: Path, folder: Path, path: str) -> None:
    """Copy an image of the trunk, unless it is missing there."""
    with suppress(RecordError):
        content = open_source(trunk).read_image(path)
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
