"""`samestep examples`: copy the recipes, which come with the package, to start from them."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from samestep.errors import ConfigError
from samestep.launch.missing import RECIPES, recipes_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep examples` to its parser."""
    where = "directory that gets a directory `recipes` (default: the current one)"
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", default=Path(), type=Path, help=where
    )


def main(arguments: argparse.Namespace) -> int:
    """Copy the recipes, print how to start the first one, and return the exit status."""
    copy = arguments.directory / RECIPES
    if copy.exists():
        raise ConfigError(f"{copy} exists already; expected a directory without `recipes`")
    recipes, _ = recipes_folder()
    try:
        shutil.copytree(recipes, copy, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise ConfigError(f"{copy} cannot be written: {error}") from error
    first = copy / "circle.py"
    where = "" if arguments.directory == Path() else f" in {arguments.directory}"
    print(
        f"wrote {copy}/; its first script trains for some seconds:\n"
        f"  samestep run -n 2 {first}\n"
        f"  samestep verify -n 1,2 --kill {first}\n"
        "  samestep report runs/points\n"
        f"others need an extra, such as samestep[vit], and are started as modules{where}:\n"
        "  samestep run -n 2 -m recipes.vit.train recipes/vit/digits.yaml"
    )
    return 0
