"""The conda recipe and the Containerfile agree with pyproject.toml and with this repository."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from importlib.metadata import metadata, requires, version
from importlib.util import find_spec

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.needs import needs

# packages that conda calls otherwise
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}
PYPROJECT = (ROOT / "pyproject.toml").read_text()
BUILD_SYSTEM = re.search(r"\[build-system\]\nrequires = (\[.*\])", PYPROJECT)


def conda_recipe():
    """Return the recipe, with the values of its context."""
    text = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    context = yaml.safe_load(text)["context"]
    for name, value in context.items():
        text = text.replace(f"${{{{ {name} }}}}", value)
    return yaml.safe_load(text)


def as_conda(requirements):
    """Return requirements of pip in conda's words, without those of extras."""
    pairs = [re.fullmatch(r"([\w-]+)(.*)", text).groups() for text in requirements]
    return {f"{CONDA_NAMES.get(name, name)} {bounds}" for name, bounds in pairs}


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_pyproject():
    recipe = conda_recipe()
    least = metadata("samestep")["Requires-Python"]
    assert recipe["package"] == {"name": "samestep", "version": version("samestep")}
    always = [text for text in requires("samestep") if "extra ==" not in text]
    run = {*as_conda(always), f"python {least}", "__linux"}
    assert set(recipe["requirements"]["run"]) == run
    host = {*as_conda(json.loads(BUILD_SYSTEM[1])), f"python {least.strip('>=')}.*", "pip"}
    assert set(recipe["requirements"]["host"]) == host
    assert recipe["about"]["summary"] == metadata("samestep")["Summary"]
    assert recipe["about"]["license"] == metadata("samestep")["License-Expression"]
    (script,) = re.findall(r"^samestep = \"(.*)\"", PYPROJECT, re.MULTILINE)
    assert recipe["build"]["python"]["entry_points"] == [f"samestep = {script}"]


def rendered(text, platform, folder):
    """Return what rattler-build makes of a recipe, without the packages that it names."""
    from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

    recipe = Stage0Recipe.from_yaml(text, recipe_dir=folder)
    platform = PlatformConfig(target_platform=platform)
    (variant,) = recipe.render(VariantConfig(), RenderConfig(platform))
    return variant.recipe.to_dict()


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64"])
def test_rattler_build_reads_the_conda_recipe_as_it_is_meant(platform, tmp_path):
    needs("rattler_build", is_present=find_spec("rattler_build") is not None)
    text = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    recipe, meant = rendered(text, platform, tmp_path), conda_recipe()
    for part in ("package", "requirements"):
        assert recipe[part] == meant[part]
    assert recipe["build"]["noarch"] == "python"
    assert recipe["build"]["python"] == meant["build"]["python"]
    assert [*recipe["tests"][0]] == ["python"]
    for wrong in ("noarchs: python", "noarch: pyhton"):
        with pytest.raises(Exception, match=r"noarchs|pyhton"):
            rendered(text.replace("noarch: python", wrong), platform, tmp_path)


def instructions():
    """Return the instructions of the Containerfile, and their arguments."""
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]


def test_the_image_has_files_of_this_repository_and_runs_without_root():
    steps = instructions()
    names = [name for name, _ in steps]
    assert names[0] == "FROM"
    sources = [
        source for name, rest in steps if name == "COPY" for source in shlex.split(rest)[:-1]
    ]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    (packed,) = re.findall(r"^only-include = (\[.*\])", PYPROJECT, re.MULTILINE)
    folders = {path.partition("/")[0] for path in json.loads(packed)}
    # to build the wheel, which leaves out folders that are missing
    assert {"pyproject.toml", "README.md", "LICENSE", *folders} <= set(sources)
    user = names.index("USER")
    assert "root" not in steps[user][1]
    assert steps[user][1] != "0"
    later = dict(steps[user:])
    assert later["RUN"] == "samestep examples"
    command = json.loads(later["CMD"])
    assert command[:2] == ["samestep", "run"]
    assert (ROOT / command[-1]).is_file()
    extras = set(re.findall(r"\[(\w+)\]'", (ROOT / "Containerfile").read_text()))
    assert extras <= set(metadata("samestep").get_all("Provides-Extra"))


@pytest.mark.long
def test_podman_builds_the_image_and_it_trains():
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed; no CI has it, because it builds 2 GB")
    run = ["podman", "build", "--tag", "samestep-test", str(ROOT)]
    subprocess.run(run, check=True)
    trained = subprocess.run(
        ["podman", "run", "--rm", "--shm-size", "1g", "samestep-test"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "accuracy" in trained.stdout
    for command, start in (("samestep skill", "---\nname: samestep"), ("id --user", "1000")):
        run = ["podman", "run", "--rm", "samestep-test", *command.split()]
        printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        assert printed.startswith(start)
