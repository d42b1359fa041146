"""The wheel works without the clone, and its metadata are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email import message_from_bytes
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.docs.blocks import ROOT
from tests.needs import needs
from tests.watch.serving import serving

TOOLS = ("build", "hatch_fancy_pypi_readme", "hatchling", "readme_renderer", "twine")
# a link or picture that is relative to the clone
RELATIVE = re.compile(r"\]\((?!https?:)|(?:href|src)=\"(?!https?:)")


def run(*command):
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Build the source archive, and the wheel from it, without network."""
    for tool in TOOLS:
        needs(tool, is_present=find_spec(tool) is not None)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def fresh(archives, tmp_path, monkeypatch):
    """Install the wheel into a new environment; return it and an empty current folder.

    Other packages come from the environment of the tests, but not the clone: a path in a `.pth`
    file does not process the `.pth` files of that path, such as that of an editable installation.
    """
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = archives.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "of_the_tests.pth").write_text("\n".join(others))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setattr(sys, "executable", str(python))
    return python.parent


@pytest.mark.long
def test_an_installed_wheel_trains_evaluates_verifies_reports_and_watches(fresh):
    samestep, python = fresh / "samestep", fresh / "python"
    where = run(python, "-c", "import samestep; print(samestep.__file__)")
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert run(samestep, "--version") == run(python, "-m", "samestep", "--version")
    assert "recipes/circle.py" in run(samestep, "examples")
    trained = run(samestep, "run", "-n", 2, "--stop-after", 50, "recipes/circle.py")
    assert "starting at step 0 with 2 workers" in trained
    resumed = run(samestep, "run", "recipes/circle.py")
    assert "starting at step 50 with 1 workers" in resumed
    assert re.search(r"accuracy 9\d\.", resumed)
    checked = run(samestep, "verify", "-n", "1,2", "--steps", 2, "recipes/circle.py")
    assert "the same at every step: n=1, n=2" in checked
    run(samestep, "report", "runs/points")
    assert "<title>" in Path("report.html").read_text()
    with serving("runs") as served:
        assert "<title>" in served.get("/").text
        assert served.get("/page/main.js").status_code == 200
        assert served.json("/api/runs")["runs"]
    digits = ("recipes/vit/digits.yaml", "--dir", "runs/digits")
    run(samestep, "run", "--stop-after", 1, "-m", "recipes.vit.train", *digits)


@pytest.mark.long
def test_archives_are_complete_and_an_index_can_show_them(archives):
    (wheel,), (source,) = archives.glob("*.whl"), archives.glob("*.tar.gz")
    shown = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "twine", "check", "--strict", wheel, source]
    checked = subprocess.run(command, env=shown, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = message_from_bytes(archive.read(metadata)).get_payload(decode=True).decode()
    data = ("recipes/circle.py", "skills/samestep/SKILL.md", "tools/adopt/rules.md")
    for name in ("py.typed", "watch/page/index.html", *data):
        assert f"samestep/{name}" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"samestep"}
    assert [name for name in names if "test" in name and "recipes" not in name] == []
    assert text.lstrip().startswith("# samestep\n")
    assert RELATIVE.findall(text) == []
    assert "<!--" not in text
    from readme_renderer.markdown import render

    page = render(text)  # as an index does; twine accepts what it cannot render
    fences = re.findall(r"^```\w", text, re.MULTILINE)
    assert page.count("<pre") == len(fences)
    assert page.count("<table") > 1
    assert "```" not in page


def test_every_extra_is_among_those_tested_with_the_lowest_versions():
    installed = re.search(r'"\.\[([\w,]+,[\w,]+)\]"', (ROOT / "tests" / "versions.py").read_text())
    tested = set(installed[1].split(","))
    extras: dict[str, set[str]] = {}
    for requirement in requires("samestep"):
        text, _, condition = requirement.partition(";")
        if extra := re.search(r"extra == ['\"](\w+)['\"]", condition):
            extras.setdefault(extra[1], set()).add(text.strip())
    assert tested <= set(extras)
    assert set.union(*extras.values()) == set.union(*(extras[name] for name in tested))
