from __future__ import annotations

import pytest

from samestep.launch import missing
from samestep.launch.missing import advice_on, recipes_folder
from tests.docs.blocks import ROOT


def asked(name, script, *, as_module=False):
    return advice_on(ModuleNotFoundError(name=name), str(script), as_module=as_module)


@pytest.mark.parametrize("name", ["recipes", "recipes.settings"])
def test_a_script_that_imports_its_own_package_is_a_module(name, tmp_path, monkeypatch):
    script = tmp_path / "recipes" / "vit" / "train.py"
    said = f"it is the package of the script; write -m recipes.vit.train instead of {script}"
    assert asked(name, script) == f"{said}, in the folder {tmp_path}"
    monkeypatch.chdir(tmp_path)
    assert asked(name, script) == said
    assert asked(name, "recipes.vit.train", as_module=True) == ""


def test_the_innermost_folder_of_the_name_is_the_package(tmp_path):
    script = tmp_path / "a" / "b" / "a" / "train.py"
    assert "write -m a.train instead" in asked("a", script)
    assert "write -m b.a.train instead" in asked("b.c", script)


@pytest.mark.parametrize(
    ("script", "extra"),
    [
        ("recipes/vit/train.py", "vit"),
        ("recipes/stain/test.py", "stain"),
        ("recipes/first/train.py", "vit"),
        ("recipes.detect.train", "detect"),
        ("recipes.check", "vit"),
    ],
)
def test_a_package_that_a_recipe_needs_is_in_an_extra(script, extra, monkeypatch):
    as_module = not script.endswith(".py")
    in_clone = f"pip install -c constraints.txt -e '.[{extra}]' in {ROOT}"
    said = f"the recipe needs the extra {extra}: "
    assert asked("PIL.Image", script, as_module=as_module) == said + in_clone
    monkeypatch.setattr(missing, "recipes_folder", lambda: (ROOT, False))
    in_wheel = f"pip install 'samestep[{extra}]'"
    assert asked("PIL", script, as_module=as_module) == said + in_wheel


def test_other_scripts_and_modules_get_no_advice(tmp_path):
    assert asked("PIL", tmp_path / "train.py") == ""
    assert asked(None, tmp_path / "train.py") == ""
    assert asked("samestep.nothing", ROOT / "recipes" / "vit" / "train.py") == ""
    assert asked("train", tmp_path / "train.py") == ""


def test_the_recipes_are_in_the_clone():
    assert recipes_folder() == (ROOT / "recipes", True)
