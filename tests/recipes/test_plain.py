"""What docs/from-one-device.md and docs/real-jobs.md say about the plain scripts is so."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from recipes.one_device import autocast
from recipes.settings import SettingsError
from tests.needs import needs

RECIPES = Path(recipes.__file__).parent
DOCS = RECIPES.parent / "docs"
PAGE = (DOCS / "from-one-device.md").read_text()
REAL = ("vit", "stain", "detect", "gpt", "atari")


def scripts(recipe):
    return [(RECIPES / recipe / name).read_text() for name in ("plain.py", "train.py")]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_both_scripts():
    assert blocks("python")[:2] == scripts("first")  # the third has its losses in the loop


def test_the_page_shows_their_difference():
    names = [f"recipes/first/{name}.py" for name in ("plain", "train")]
    lines = difflib.unified_diff(
        *(text.splitlines(keepends=True) for text in scripts("first")), *names, n=1
    )
    assert blocks("diff") == ["".join(lines)]


def test_every_line_that_comes_is_explained():
    explained = [
        part
        for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
        for part in re.findall(r"`(.*?)`", row)
    ]
    diff = [(line[:1], line[1:].strip()) for line in blocks("diff")[0].splitlines()[2:]]
    gone = {line for mark, line in diff if mark == "-"}  # or only indented
    came = [line for mark, line in diff if mark == "+" and line and line not in gone]
    unexplained = [
        line for line in came if not any(part.partition("…")[0] in line for part in explained)
    ]
    assert unexplained == ["from torch.utils.data import TensorDataset", "import samestep as ss"]


@pytest.mark.parametrize("recipe", REAL)
def test_the_page_counts_changed_lines(recipe):
    needs("diff")
    files = [RECIPES / recipe / name for name in ("plain.py", "train.py")]
    lines = subprocess.run(
        ["diff", "-wd", *files], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    gone, come = (sum(line.startswith(mark) for line in lines) for mark in "<>")
    page = (DOCS / "real-jobs.md").read_text()
    (row,) = re.findall(rf"^\| \[{recipe}\].*", page, re.MULTILINE)
    assert f"| {gone} | {come} |" in row


@pytest.mark.parametrize("recipe", ["first", *REAL])
def test_a_plain_script_is_short_and_knows_nothing_of_samestep(recipe):
    text, _ = scripts(recipe)
    assert "samestep" not in text
    assert len(text.splitlines()) < 150


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param("vit/plain.py", marks=pytest.mark.long), "vit/train.py"]
)
def test_a_script_that_is_started_by_its_path_finds_the_package(script, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(RECIPES / script), "--help"]
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert "optimizer.learning_rate=0.001" in output


def test_plain_scripts_refuse_float16_because_they_have_no_scaler():
    with pytest.raises(SettingsError, match=r"^plain\.py does not scale its loss"):
        autocast("float16")
