"""`samestep examples`: copy the recipes, which come with the package, to start from them."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from samestep.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep examples` to its parser."""
    where = "directory that gets a directory `recipes` (default: the current one)"
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", default=Path(), type=Path, help=where
    )


def main(arguments: argparse.Namespace) -> int:
    """Copy the recipes, print how to start the first one, and return the exit status."""
    copy = arguments.directory / "recipes"
    if copy.exists():
        raise ConfigError(f"{copy} exists already; expected a directory without `recipes`")
    package = Path(__file__).parents[1]
    recipes = package / "recipes"  # in a wheel
    if not recipes.is_dir():
        recipes = package.parents[1] / "recipes"  # in a clone
    try:
        shutil.copytree(recipes, copy, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise ConfigError(f"{copy} cannot be written: {error}") from error
    first = copy / "circle.py"
    print(
        f"wrote {copy}/; its first script trains for some seconds:\n"
        f"  samestep run -n 2 {first}\n"
        f"  samestep verify -n 1,2 --kill {first}\n"
        "  samestep report runs/points"
    )
    return 0
