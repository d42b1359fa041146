"""`samestep adopt`: the plan of how a training script moves to samestep, by file and line."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

from samestep.errors import ConfigError
from samestep.host import printable
from samestep.tools.adopt.entries import Entry
from samestep.tools.adopt.rules import KINDS, Kind, calls
from samestep.tools.adopt.scan import Scan
from samestep.tools.adopt.source import read_sources
from samestep.tools.skill import folder_of

WIDTH: Final = 80  # columns
MOST_PLACES: Final = 8  # that are listed with one advice
TITLES: Final = {
    "goes": "GOES: remove it",
    "changes": "CHANGES: write this instead",
    "breaks": "BREAKS the same steps on other workers, or after a resume",
    "unseen": "CANNOT SEE: look at these places yourself",
    "prove": "PROVE it",
}
COUNTED: Final[dict[Kind, str]] = {
    "goes": "to remove",
    "changes": "to write anew",
    "breaks": "that break sameness",
    "unseen": "to look at",
}
WRAP: Final = textwrap.TextWrapper(
    *(WIDTH, " " * 4, " " * 4), break_long_words=False, break_on_hyphens=False
)
PROOF: Final = "once it is moved: the steps of 1 and 2 workers, and after a kill, must be the same"
LINK: Final = "verify.md"
START: Final = "import samestep"  # is written first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep adopt` to its parser."""
    parser.epilog = (
        "It reads the script and the modules of its folder, and neither runs nor changes them. Exit"
        " status: 0 if the plan is complete, 1 if something could not be seen, 2 if the script"
        " cannot be read."
    )
    parser.add_argument("script", type=Path, help="training script of PyTorch")
    parser.add_argument("--json", action="store_true", help="print a list of entries as JSON")


def main(options: argparse.Namespace) -> int:
    """Print the plan; return 0 if it is complete, and 1 if something could not be seen."""
    entries = plan(options.script)
    if options.json:
        text = json.dumps([asdict(entry) for entry in entries], indent=1)
    else:
        text = "\n".join(as_text(entries))
    sys.stdout.write(f"{printable(text)}\n")
    return int(any(entry.kind == "unseen" for entry in entries))


def plan(script: Path) -> list[Entry]:
    """Return the entries of a script's plan, by kind; the last one says how to prove the result.

    Raises `ConfigError` if the script cannot be read.
    """
    sources, missing = read_sources(script)
    imported = [name.means for name in sources[0].imports]
    is_done = "samestep" in {name.partition(".")[0] for name in imported}
    try:
        entries = [] if is_done else Scan(sources, missing).entries.all
    except RecursionError as error:
        raise ConfigError(f"{script} is nested too deeply; expected a training script") from error
    order = {str(source.path): number for number, source in enumerate(sources)}  # the script first
    entries.sort(key=lambda entry: (KINDS.index(entry.kind), order[entry.file], entry.line))
    entries.sort(key=lambda entry: not entry.write.startswith(START))
    takes_arguments = any(map(calls("parsers").fullmatch, imported))
    command = f"samestep verify -n 1,2 --kill {script}{' ARGUMENTS' * takes_arguments}"
    say = "this already uses samestep; " * is_done + PROOF
    return [*entries, Entry("prove", str(script), 1, "verify", say, command, LINK)]


def as_text(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of a plan for people: places with one advice are listed together."""
    counts = Counter(entry.kind for entry in entries)
    parts = ", ".join(f"{counts[kind]} {text}" for kind, text in COUNTED.items())
    if len(entries) > 1:
        yield f"{entries[-1].file}: {parts}\ndocs/ is {folder_of('docs')}\n"
    for kind, of_kind in groupby(entries, lambda entry: entry.kind):
        yield f"{TITLES[kind]}\n"
        together: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in of_kind:
            write = entry.write if entry.write != entry.name else ""  # the line only moves
            together.setdefault((entry.say, write, entry.link), []).append(entry)
        for (say, write, link), group in together.items():
            places = [f"  {entry.file}:{entry.line}  {entry.name}" for entry in group]
            places = places if kind in COUNTED else []
            yield from (place[:WIDTH].rstrip() for place in places[:MOST_PLACES])
            if rest := len(places[MOST_PLACES:]):
                yield f"  … and {rest} more places, which --json lists"
            yield from (f"      {line}" for line in write.splitlines() if line != "...")
            text = f"{say[:1].upper()}{say[1:]}. docs/{link}" if say else f"docs/{link}"
            yield f"{WRAP.fill(text)}\n"
