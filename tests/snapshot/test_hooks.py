from __future__ import annotations

import logging
import threading
from contextlib import closing

import pytest

from samestep.errors import ConfigError
from samestep.record.sinks.function import find_function
from samestep.snapshot.hooks import FunctionHook
from samestep.snapshot.manifest import NAME
from tests.jobs import steps_of
from tests.snapshot.saving import save_once, small_state


@pytest.fixture
def directory(tmp_path):
    for step in (1, 2):
        save_once(tmp_path, step, small_state(step), workers=2)
    return tmp_path


def transferred(directory, function, *steps):
    """Have the snapshots of these steps transferred; return what is reported."""
    told = []
    with closing(
        FunctionHook(function, lambda kind, **fields: told.append((kind, fields)))
    ) as transfer:
        for name in steps_of(*steps):
            transfer.on_commit(directory / name)
        transfer.finish()
    return told


def test_every_file_is_passed_and_the_manifest_last(directory):
    paths = []
    assert transferred(directory, paths.append, 1, 2) == []
    assert [path.parent.name for path in paths] == [
        name for name in steps_of(1, 2) for _ in range(3)
    ]
    assert [path.name == NAME for path in paths] == [False, False, True] * 2
    assert set(paths) == set(directory.glob("*/*"))


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(3)])
def test_a_function_that_fails_is_told_and_asked_again_at_the_next_snapshot(
    directory, caplog, error
):
    paths = []

    def fail_once(path):
        paths.append(path)
        if len(paths) == 2:
            raise error

    with caplog.at_level(logging.WARNING, "samestep"):
        told = transferred(directory, fail_once, 1, 2)
    reason = f"{type(error).__name__}: {error}"
    assert told == [("transfer_failed", {"path": str(paths[1]), "reason": reason})]
    assert f"transfer failed for {paths[1]}: {reason}" in caplog.text
    assert [path.parent.name for path in paths] == [*steps_of(1, 1), *steps_of(2, 2, 2)]


def test_a_snapshot_that_is_gone_is_left_out(directory):
    paths = []
    assert transferred(directory, paths.append, 7, 1) == []
    assert {path.parent.name for path in paths} == set(steps_of(1))


def test_training_does_not_wait_for_the_function(directory):
    is_saved, was_asked = threading.Event(), threading.Event()

    def wait(_):
        was_asked.set()
        is_saved.wait(20)

    with closing(FunctionHook(wait, lambda *_, **__: None)) as transfer:
        transfer.on_commit(directory / steps_of(1)[0])
        assert was_asked.wait(20)
        transfer.on_commit(directory / steps_of(2)[0])
        is_saved.set()
        transfer.finish()


def test_a_function_is_found_by_its_name():
    assert find_function("shutil:rmtree").__name__ == "rmtree"
    assert find_function("pathlib:Path.unlink").__name__ == "unlink"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:send",
            "expected the module:function to be there for import: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            "shutil:send",
            "expected the module:function to be there for import: AttributeError: module 'shutil' has no attribute 'send'",
        ),
        ("math:pi", "expected a function of a file's path, and it is float"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(name, message):
    with pytest.raises(ConfigError) as caught:
        find_function(name)
    assert str(caught.value).startswith(f"transfer={name!r} was given; {message}")
