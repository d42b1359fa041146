"""Whose code a file, class or frame is."""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import sysconfig
import types
from pathlib import Path
from traceback import FrameSummary

import pytest
import torch

import samestep as ss
from samestep.user_code import ImportedModules, is_callers, is_installed, is_users

PURELIB = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("path", "users", "callers"),
    [
        ("/home/user/train.py", True, True),
        ("/home/user/my-packages/train.py", True, True),
        ("/home/user/samestep_jobs/train.py", True, True),
        ("<ipython-input-1>", True, True),
        ("<string>", True, True),
        ("<frozen runpy>", False, False),
        (json.__file__, False, False),
        (f"{PURELIB}/transformers/trainer.py", False, True),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False, True),
        (ss.__file__, False, False),
        (torch.__file__, False, False),
        (f"{Path(torch.__file__).parent}/utils/data/dataloader.py", False, True),
    ],
)
def test_files_of_the_user_and_of_packages(path, users, callers):
    assert is_users(path) == users
    assert is_callers(FrameSummary(path, 1, "fn")) == callers


def test_a_path_that_only_begins_like_that_of_python_or_samestep_is_the_users():
    assert is_users(f"{Path(os.__file__).parent}_of_user/train.py")
    assert is_users(f"{Path(ss.__file__).parent}_jobs/train.py")


def test_classes_of_samestep_python_and_packages_are_installed():
    installed = (list, collections.OrderedDict, argparse.Namespace, torch.nn.Linear, ss.Patience)
    assert all(map(is_installed, installed))
    assert not is_installed(type("Own", (torch.nn.Linear,), {"__module__": __name__}))


@pytest.mark.parametrize(
    ("main", "own", "other"),
    [
        (f"{PURELIB}/jobs/nested/train.py", "jobs/models.py", "jobs_of_others/models.py"),
        (f"{PURELIB}/train.py", "train.py", "train/models.py"),
    ],
)
def test_an_installed_package_that_runs_as_a_program_is_the_users(monkeypatch, main, own, other):
    assert not is_users(f"{PURELIB}/{own}")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", main, raising=False)
    assert is_users(main)
    assert is_users(f"{PURELIB}/{own}")
    assert not is_users(f"{PURELIB}/{other}")
    assert not is_users(torch.__file__)
    assert not is_users(ss.__file__)
    assert not is_users(json.__file__)


def test_samestep_is_not_the_users_if_it_runs_as_a_program(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", ss.__file__, raising=False)
    assert not is_users(ss.__file__)


def import_as(monkeypatch, name, file):
    """Put a module that was loaded from a file behind those that are imported."""
    module = types.ModuleType(name)
    module.__file__ = str(file)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, name, module)


def test_imported_files_of_the_user_are_found_before_and_after_a_note(monkeypatch, tmp_path):
    imported = ImportedModules()
    import_as(monkeypatch, "own_before", tmp_path / "before.py")
    import_as(monkeypatch, "own_removed", tmp_path / "removed.py")
    import_as(monkeypatch, "package_before", f"{PURELIB}/package.py")
    assert imported.files_in(tmp_path) == {tmp_path / "before.py", tmp_path / "removed.py"}
    imported.note()
    import_as(monkeypatch, "own_after", tmp_path / "part" / "after.py")
    import_as(monkeypatch, "of_others", tmp_path.with_name("others") / "before.py")
    import_as(monkeypatch, "package_after", f"{PURELIB}/package.py")
    monkeypatch.delitem(sys.modules, "own_removed")
    expected = {tmp_path / "before.py", tmp_path / "part" / "after.py"}
    assert imported.files_in(tmp_path) == expected
    imported.note()
    assert imported.files_in(tmp_path) == expected
    monkeypatch.delitem(sys.modules, "package_after")  # the newest one that was noted
    assert imported.files_in(tmp_path) == expected


def test_modules_of_a_package_that_runs_as_a_program_are_found_after_a_note(monkeypatch):
    import_as(monkeypatch, "jobs.models", f"{PURELIB}/jobs/models.py")
    imported = ImportedModules()
    imported.note()
    folder = Path(PURELIB, "jobs")
    main = str(folder / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", main, raising=False)
    assert imported.files_in(folder) == {folder / "models.py", folder / "train.py"}


def test_a_fork_does_not_look_again_at_modules_of_packages(monkeypatch):
    looked_at = []

    class Module(types.ModuleType):
        @property
        def __file__(self):
            looked_at.append(self.__name__)
            return json.__file__

    monkeypatch.setitem(sys.modules, "before", Module("before"))
    imported = ImportedModules()
    imported.note()
    assert looked_at == ["before"]
    monkeypatch.setitem(sys.modules, "after", Module("after"))
    imported.files_in(Path(os.sep))
    assert looked_at == ["before", "after"]
