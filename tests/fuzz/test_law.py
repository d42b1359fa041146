from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import law
from tests.fuzz.__main__ import breaches
from tests.fuzz.campaign import names
from tests.fuzz.law import Law
from tests.fuzz.target import Target
from tests.workers import run_workers

INPUTS = 60  # of each target


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def raise_(error):
    raise error


def hang(folder):
    while True:
        pass


CRIMES = {
    "another error": (lambda folder: raise_(KeyError("lost")), "KeyError: 'lost'"),
    "a hang": (hang, "HangError: it took more than"),
    "much memory": (lambda folder: bytearray(law.MOST_BYTES + 2**24), "MiB of memory"),
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


@pytest.mark.parametrize("crime", CRIMES)
def test_the_law_is_enforced(crime, monkeypatch, tmp_path):
    commit, told = CRIMES[crime]
    if commit is hang:
        monkeypatch.setattr(law, "LONGEST_SECONDS", 0.2)
    [breach] = run_workers(lambda: Law(tmp_path).breach(lambda: commit(tmp_path), (ValueError,)), 1)
    assert told in breach


def test_what_is_allowed_is_no_breach(tmp_path):
    (tmp_path / "there").write_text("text")

    def body():
        judge = Law(tmp_path)
        return [
            judge.breach(lambda: raise_(ValueError("no")), (ValueError,)),
            judge.breach((tmp_path / "there").read_text, ()),
        ]

    assert run_workers(body, 1) == [[None, None]]


def test_a_process_that_crashes_is_told_and_the_next_input_is_read(monkeypatch):
    def crash_at_two(seed, numbers, only):
        for number in numbers:
            yield number, "target", None
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, "target", f"breach {number}"

    monkeypatch.setattr("tests.fuzz.__main__.run", crash_at_two)
    assert list(breaches(0, range(1, 4))) == [
        ("target", 1, "breach 1"),
        ("target", 2, "it ended its process with status -9"),
        ("target", 3, "breach 3"),
    ]


def test_a_reader_that_fails_now_and_then_is_found_and_its_input_can_be_made_again(monkeypatch):
    target = Target(
        "picky",
        lambda random: random.randrange(10),
        lambda given: given == 7 and raise_(KeyError(given)),
        (ValueError,),
    )
    monkeypatch.setattr("tests.fuzz.campaign.targets", lambda folder: [target])
    found = list(breaches(5, range(100)))
    assert 0 < len(found) < 50
    assert all("KeyError: 7" in breach for _, _, breach in found)
    assert list(breaches(5, [found[-1][1]], "picky")) == found[-1:]


def test_whatever_reads_files_keeps_the_law():
    assert list(breaches(1, range(INPUTS * len(names())))) == []
