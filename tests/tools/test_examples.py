"""`samestep examples` copies scripts that run as they are."""

from __future__ import annotations

import re

import pytest

from samestep import cli
from samestep.errors import ConfigError
from tests.docs.blocks import ROOT
from tests.docs.commands import commands_of
from tests.python import run_python


@pytest.mark.long
def test_the_first_script_runs_at_once_on_two_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    run, *others = (line for line in lines if line.startswith("  "))
    ((program, *arguments),) = commands_of(run)
    assert program == "samestep"
    done = run_python("-m", "samestep", *arguments, merges=True)
    assert done.returncode == 0, done.stdout
    assert "starting at step 0 with 2 workers" in done.stdout
    assert float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1]) > 95
    for command in others:
        ((_, name, *rest),) = commands_of(command)
        assert name in cli.COMMANDS
        assert (tmp_path / rest[-1]).exists()


def test_all_recipes_are_copied_without_what_python_compiled(tmp_path):
    cli.main(["examples", str(tmp_path / "new")])
    copied, originals = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*.*")
            if is_source(path)
        }
        for folder in (tmp_path / "new" / "recipes", ROOT / "recipes")
    )
    assert copied == originals
    assert [*tmp_path.rglob("__pycache__")] == []


def is_source(path):
    return path.is_file() and "__pycache__" not in path.parts


def test_a_directory_that_has_recipes_is_left_alone(tmp_path, capsys):
    (tmp_path / "recipes").mkdir()
    assert cli.main(["examples", str(tmp_path)]) == ConfigError.status
    assert "recipes exists already" in capsys.readouterr().err
    assert [*(tmp_path / "recipes").iterdir()] == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["examples", str(tmp_path / "file")]) == ConfigError.status
    assert "cannot be written: " in capsys.readouterr().err
