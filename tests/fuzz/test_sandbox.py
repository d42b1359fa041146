from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import sandbox
from tests.fuzz.__main__ import violations
from tests.fuzz.campaign import names
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.target import Target
from tests.workers import run_workers


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def raise_(error):
    raise error


def hang(folder):
    while True:
        pass


VIOLATIONS = {
    "another error": (lambda folder: raise_(KeyError("lost")), "KeyError: 'lost'"),
    "a hang": (hang, "HangError: it took more than"),
    "much memory": (lambda folder: bytearray(sandbox.MOST_BYTES + 2**24), "MiB of memory"),
    "too much memory": (lambda folder: bytearray(2**40), "MemoryError"),
    "a pickle": (lambda folder: pickle.loads(pickle.dumps(Evil())), "pickle.find_class"),
    "code": (lambda folder: eval("1 + 1"), "compile"),
    "a process": (
        lambda folder: subprocess.run(
            [sys.executable, "--version"], check=True, stdout=subprocess.DEVNULL
        ),
        "subprocess.Popen",
    ),
    "a file elsewhere": (lambda folder: Path("/etc/passwd").read_text(), "open '/etc/passwd'"),
    "a path that leaves": (
        lambda folder: (folder / "../../../../../../../../etc/passwd").read_text(),
        "etc/passwd'",
    ),
    "a file written": (lambda folder: (folder / "new").write_text("mine"), "open '"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_violation_is_found(name, monkeypatch, tmp_path):
    read, text = VIOLATIONS[name]
    if read is hang:
        monkeypatch.setattr(sandbox, "MOST_CPU_SECONDS", 0.2)
    [violation] = run_workers(
        lambda: Sandbox(tmp_path).violation(lambda: read(tmp_path), (ValueError,)), 1
    )
    assert text in violation


def test_an_allowed_reader_has_no_violation(tmp_path):
    (tmp_path / "there").write_text("text")

    def body():
        judge = Sandbox(tmp_path)
        return [
            judge.violation(lambda: raise_(ValueError("no")), (ValueError,)),
            judge.violation((tmp_path / "there").read_text, ()),
        ]

    assert run_workers(body, 1) == [[None, None]]


def test_a_crash_is_a_violation_and_the_next_input_is_read(monkeypatch):
    def crash_at_two(seed, numbers, only):
        for number in numbers:
            yield number, "target", None
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, "target", f"violation {number}"

    monkeypatch.setattr("tests.fuzz.__main__.run", crash_at_two)
    assert list(violations(0, range(1, 4))) == [
        ("target", 1, "violation 1"),
        ("target", 2, "the process exited with status -9"),
        ("target", 3, "violation 3"),
    ]


def test_a_process_that_cannot_start_is_a_violation_and_the_last(monkeypatch):
    monkeypatch.setattr("tests.fuzz.__main__.run", lambda *_: iter([raise_(SystemExit(3))]))
    assert list(violations(0, range(1, 4))) == [("none", 1, "the process exited with status 3")]


def test_an_occasional_failure_is_found_and_can_be_reproduced(monkeypatch):
    target = Target(
        "picky",
        lambda random: random.randrange(10),
        lambda digit: digit == 7 and raise_(KeyError(digit)),
        (ValueError,),
    )
    monkeypatch.setattr("tests.fuzz.campaign.targets", lambda folder: [target])
    failures = list(violations(5, range(100)))
    assert 0 < len(failures) < 50
    assert all("KeyError: 7" in violation for _, _, violation in failures)
    assert list(violations(5, [failures[-1][1]], "picky")) == failures[-1:]


@pytest.mark.parametrize("inputs", [20, pytest.param(200, marks=pytest.mark.long)])
def test_all_readers_follow_the_rules(inputs):
    assert list(violations(1, range(inputs * len(names())))) == []
