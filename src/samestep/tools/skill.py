"""`samestep skill`: the instructions for coding assistants, which come with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

SKILL = Path("skills", "samestep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep skill` to its parser."""
    text = "print the folder instead, to copy or link it to where an assistant looks for skills"
    parser.add_argument("--path", action="store_true", help=text)


def main(options: argparse.Namespace) -> int:
    """Print the skill, or its folder, and return the exit status."""
    package = Path(__file__).parents[1]
    # in a wheel, or in a clone
    folder = next(
        each / SKILL for each in (package, *package.parents[1:2]) if (each / SKILL).is_dir()
    )
    print(folder if options.path else (folder / "SKILL.md").read_text(encoding="utf-8"))
    return 0
