"""Runs that somebody else wrote to harm who opens them, and programs with limited memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.watch.writing import scalars, started, write

TERABYTE: Final = 2**40
MEMORY: Final = 3 * 2**20  # KiB of addresses; what the programs need without an attack fits
LIMITED: Final = ("sh", "-c", f'ulimit -v {MEMORY}; exec "$@"', "sh")  # starts a program
SECONDS: Final = 120.0
ESCAPE: Final = "\x1b]0;owned\x07"


def _links_out(run: Path) -> None:
    (run.parent.parent / "secret.jsonl").write_text('{"event":"secret","time":1}\n')
    (run / "events.jsonl").symlink_to("../../secret.jsonl")


def _links_to_a_device(run: Path) -> None:
    (run / "events.jsonl").symlink_to("/dev/zero")


def _is_a_pipe(run: Path) -> None:
    os.mkfifo(run / "events.jsonl")


def _declares_a_terabyte(run: Path) -> None:
    write(run, started())
    os.truncate(run / "events.jsonl", TERABYTE)


def _is_newer(run: Path) -> None:
    write(run, started(format=99, samestep=ESCAPE))


def _has_large_notes(run: Path) -> None:
    write(run, started(), scalars(0, loss=1.0))
    (run / "notes.json").touch()
    os.truncate(run / "notes.json", TERABYTE)


def _has_a_million_names(run: Path) -> None:
    write(run, started(), scalars(0, **{f"s{number}": 1 for number in range(1_000_000)}))


def _has_millions_of_workers(run: Path) -> None:
    write(run, started(), scalars(0, loss=1.0))
    many = '{"time":1,"event":"%s","step":%d,"workers":[%s]}\n'
    with (run / "events.jsonl").open("a") as file:
        workers = ",".join(["{}"] * 3_000_000)
        file.writelines(many % (kind, 0, workers) for kind in ("started", "timing"))


def _is_deep(run: Path) -> None:
    deep = '{"time":1,"event":"started","config":{"lanes":%s1%s}}\n'
    (run / "events.jsonl").write_text(
        "".join(deep % ("[" * depth, "]" * depth) for depth in (100_000, 900))
    )


def _has_large_images(run: Path) -> None:
    image = {"event": "image", "step": 0, "name": "a", "path": "images/a.png"}
    write(run, started(), {**image, "width": 1, "height": 1, "bytes": 1})
    (run / "images").mkdir()
    (run / "images" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    os.truncate(run / "images" / "a.png", TERABYTE)


# by the name of the run, with what is said of those that cannot be read
UNREADABLE: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "links-out": (_links_out, "not a regular file"),
    "device": (_links_to_a_device, "not a regular file"),
    "pipe": (_is_a_pipe, "not a regular file"),
    "terabyte": (_declares_a_terabyte, "a line of more than"),
    f"newer-{ESCAPE}": (_is_newer, "must have format"),
}
LARGE: Final[dict[str, Callable[[Path], None]]] = {
    "deep": _is_deep,
    "pictures": _has_large_images,
    "names": _has_a_million_names,
    "notes": _has_large_notes,
    "workers": _has_millions_of_workers,
}


def write_runs(folder: Path) -> None:
    """Write a good run between bad ones of every kind."""
    write(folder / "good", started(), scalars(0, loss=0.123))
    for name, attack in (
        {name: attack for name, (attack, _) in UNREADABLE.items()} | LARGE
    ).items():
        (folder / name).mkdir()
        attack(folder / name)


def run_limited(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program, such as `-m samestep`, with limited memory and time."""
    return subprocess.run(
        [*LIMITED, sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
