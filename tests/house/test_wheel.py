"""The wheel works without the clone, and its metadata are complete."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from email import message_from_bytes
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.commands import commands_of
from tests.needs import needs
from tests.watch.serving import serving

TOOLS = ("build", "hatch_fancy_pypi_readme", "hatchling", "readme_renderer", "twine")
# a link or picture that is relative to the clone
RELATIVE = re.compile(r"\]\((?!https?:)|(?:href|src)=\"(?!https?:)")


def run(*command, statuses=(0,)):
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode in statuses, f"{command}: {done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Build the source archive, and the wheel from it, without network."""
    for tool in TOOLS:
        needs(tool, is_present=find_spec(tool) is not None)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """Install README's first packages into a new environment; return its folder of programs.

    samestep comes from the folder of the archives, as from an index. Other packages are those of
    the environment of the tests, which pip finds installed if they satisfy the wheel.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # that of Python is too old for torch, and hides the other one
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
    others = folder / "others"
    others.mkdir()
    for packages in filter(Path.is_dir, (Path(path) for path in sys.path)):
        for package in packages.iterdir() if packages.name.endswith("-packages") else ():
            if "samestep" not in package.name and package.suffix != ".pth":
                (others / package.name).symlink_to(package)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "of_the_tests.pth").write_text(str(others))
    (command,) = re.findall(
        r"^pip install '(.*?)'", (ROOT / "README.md").read_text(), re.MULTILINE
    )[:1]
    index = "--no-index", "--find-links", archives, "--constraint", ROOT / "constraints.txt"
    printed = run(python, "-m", "pip", "install", *index, command)
    assert re.findall(r"^Successfully installed (.*)", printed, re.MULTILINE) == [
        f"samestep-{version('samestep')}"
    ]
    return python.parent


@pytest.fixture
def fresh(installed, tmp_path, monkeypatch):
    """Return the programs of the new environment, in an empty folder."""
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{installed}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(installed / "python"))
    return installed


def first_commands():
    """Return the arguments of the commands of samestep in README's first block."""
    block = next(block for block in blocks_of(ROOT / "README.md") if block.language == "sh")
    commands = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    return [arguments for program, *arguments in commands if program == "samestep"]


@pytest.mark.long
def test_an_installed_wheel_trains_evaluates_verifies_reports_and_watches(fresh):
    samestep, python = fresh / "samestep", fresh / "python"
    where = run(python, "-c", "import samestep; print(samestep.__file__)")
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert run(samestep, "--version") == run(python, "-m", "samestep", "--version")
    first, train = first_commands()
    assert first == ["examples"]
    assert "recipes/circle.py" in run(samestep, *first)
    assert re.search(r"accuracy", run(samestep, *train))
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


# pages whose commands are typed one after the other, in one folder
BOOKS = {
    "readme": ["README.md"],
    "index": ["docs/index.md"],
    "skill": [
        f"skills/samestep/{name}.md" for name in ("SKILL", "names", "run", "verify", "deliver")
    ],
}
# how a command begins that is not run from the wheel, and why
NOT_RUN = {
    "python3 -m venv": "the environment exists before",
    "source": "as above",
    "pip install": "as above; other packages are not downloaded",
    "make": "needs a clone",
    "sbatch": "needs a Slurm cluster",
    "samestep run --hosts": "needs other machines with ssh",
    "samestep run --nodes": "needs other machines",
}
STATUSES = {"doctor": (0, 1)}  # 1 if this machine could be set up better
INLINE = re.compile(r"`(samestep \w+ [^`]+\.(?:py|yaml))`")


def commands_of_book(name):
    """Return the words of each command in the blocks and the text of some pages, once."""
    commands = []
    for page in (ROOT / path for path in BOOKS[name]):
        blocks = [block for block in blocks_of(page) if block.language == "sh"]
        commands += [words for block in blocks for words in commands_of(block.text)]
        commands += map(shlex.split, INLINE.findall(page.read_text()))
    return [*dict.fromkeys(map(tuple, commands))]


def is_run(words):
    return not " ".join(words).startswith(tuple(NOT_RUN))


def test_only_commands_with_a_reason_are_not_run_from_the_wheel():
    commands = [words for name in BOOKS for words in commands_of_book(name)]
    left = [" ".join(words) for words in commands if not is_run(words)]
    assert [start for start in NOT_RUN if not any(text.startswith(start) for text in left)] == []
    assert {words[0] for words in commands if is_run(words)} == {"samestep", "torchrun"}
    assert len(commands) - len(left) > 30


def scripts_of_book(name):
    """Return the scripts that readers of some pages have, by name."""
    given = (ROOT / "tests/docs/given.py").read_text()  # such as a data set
    scripts = {}
    for page in (ROOT / path for path in BOOKS[name]):
        for block in blocks_of(page):
            if match := re.fullmatch(r"file (\w+\.py)(, given)?", block.test):
                scripts[match[1]] = (given if match[2] else "") + block.text
    return scripts


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("book", BOOKS)
def test_commands_of_pages_run_from_the_wheel(book, fresh):
    scripts = scripts_of_book("skill") | scripts_of_book(book)
    for name, text in scripts.items():
        Path(name).write_text(text)
    for words in filter(is_run, commands_of_book(book)):
        if words[1] == "watch":
            with serving(words[2]) as served:
                assert served.json("/api/runs")["runs"]
        elif words[0] == "torchrun":  # whose script is not beside a package that is only linked
            run("python", "-m", "torch.distributed.run", *words[1:])
        else:
            run(*words, statuses=STATUSES.get(words[1], (0,)))


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
    pages = ("docs/moving.md", "docs/llms.txt", "docs/loops/imagenet.py", "docs/recipes/vit.md")
    data = ("recipes/circle.py", "skills/samestep/SKILL.md", "tools/adopt/rules.md", *pages)
    for name in ("py.typed", "watch/page/index.html", *data):
        assert f"samestep/{name}" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"samestep"}
    assert [name for name in names if "/test" in name and "recipes" not in name] == []
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
