"""Check every pixel of a data set's image files, and print all faults and duplicates.

python recipes/check.py vit recipes/vit/imagenet-base.yaml data.path=DIR
python recipes/check.py stain recipes/stain/full.yaml data.path=DIR --write FILE
python recipes/check.py detect data.path=DIR --dir runs/cats

Pass the list that --write makes as data.leave_out. With --dir, the directory of a run, that run
need not check the files again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from recipes.file_check import FileCheck
from recipes.settings import ENDINGS, SettingsError, read, run_script

RECIPES = ("vit", "stain", "detect")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what is wrong with a data set; exit with 1 if anything is."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("settings", nargs="*", metavar="FILE.yaml|key=value", help="as in training")
    parser.add_argument("--write", type=Path, metavar="FILE", help="list of the unusable files")
    parser.add_argument("--dir", type=Path, help="directory of a run, which keeps what is read")
    flags = parser.parse_intermixed_args(arguments)
    if flags.write is not None:  # before hours of reading
        try:
            flags.write.open("ab").close()
        except OSError as error:
            parser.error(f"--write: {error}")
    sources = ["data.check=full", *flags.settings]
    if flags.recipe == "stain" and not any(source.endswith(ENDINGS) for source in sources):
        sources.append(str(Path(__file__).parent / "stain" / "tissue.yaml"))  # as in train.py
    settings = read(import_module(f"recipes.{flags.recipe}.config").Settings, sources)
    check, error = FileCheck(settings.data, flags.dir, say=print, collect=True), None
    try:
        open_data(flags.recipe, settings, check)
    except SettingsError as caught:  # of the data set as a whole
        error = caught
    for fault in check.faults:
        print(f"{fault.part}: {fault.text}")
    if flags.write is not None:
        flags.write.write_bytes(check.list_of_faults())
    print(f"files that cannot be used: {len(check.faults)}")
    if error is not None:
        raise error
    if check.faults:
        raise SystemExit(1)


def open_data(recipe: str, settings: Any, check: FileCheck) -> None:
    """Open the data set of a recipe, which lets the check read its files."""
    data = import_module(f"recipes.{recipe}.data")
    if recipe == "vit":
        data.open_images(settings.data, settings.model, check)
    elif recipe == "stain":
        data.open_strips(settings, check)
    else:
        data.open_images(settings.data, check)


if __name__ == "__main__":
    run_script(main)
