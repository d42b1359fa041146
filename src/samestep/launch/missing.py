"""What to do about a module that a script does not find."""

from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path

RECIPES = "recipes"


def recipes_folder() -> tuple[Path, bool]:
    """Return the folder of the recipes, and whether it is in a clone rather than in a wheel."""
    package = Path(__file__).parents[1]
    in_wheel = package / RECIPES
    return (in_wheel, False) if in_wheel.is_dir() else (package.parents[1] / RECIPES, True)


def advice_on(error: ModuleNotFoundError, script: str, *, as_module: bool) -> str:
    """Return what to do if a script, or a module like that of `python -m`, lacks a module.

    It is "" if that is not known.
    """
    name = (error.name or "").partition(".")[0]
    path = Path(*script.split(".")) if as_module else Path(script).resolve().with_suffix("")
    packages = path.parts[:-1]
    if name in packages and not as_module:
        start = len(packages) - 1 - packages[::-1].index(name)
        module, folder = ".".join(path.parts[start:]), Path(*packages[:start])
        where = "" if folder == Path.cwd() else f", in the folder {folder}"
        return f"it is the package of the script; write -m {module} instead of {script}{where}"
    if RECIPES not in packages or name in {RECIPES, "samestep"}:
        return ""
    extras = metadata("samestep").get_all("Provides-Extra") or []
    recipe = packages[-1]
    extra = recipe if recipe in extras and recipe != RECIPES else "vit"  # has what others need
    folder, is_clone = recipes_folder()
    install = f"pip install 'samestep[{extra}]'"
    if is_clone:
        install = f"pip install -c constraints.txt -e '.[{extra}]' in {folder.parent}"
    return f"the recipe needs the extra {extra}: {install}"
