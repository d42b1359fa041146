"""`samestep skill`: the instructions for coding assistants, which come with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

SKILL = "skills/samestep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep skill` to its parser."""
    text = "print the folder instead, to copy or link it to where an assistant looks for skills"
    parser.add_argument("--path", action="store_true", help=text)


def main(options: argparse.Namespace) -> int:
    """Print the skill, or its folder, and return the exit status."""
    folder = folder_of(SKILL)
    print(folder if options.path else (folder / "SKILL.md").read_text(encoding="utf-8"))
    return 0


def folder_of(name: str) -> Path:
    """Return a folder of the wheel or of the clone, such as that of the documentation, docs."""
    package = Path(__file__).parents[1]
    folders = (package / name, package.parents[1] / name)
    return next(folder for folder in folders if folder.is_dir())
