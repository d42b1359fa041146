"""`samestep verify` passes a good script, and names the first step and tensor at which a bad one differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestep.cli import main

SCRIPT = str(Path(__file__).with_name("script.py"))


@pytest.fixture
def verify(capsys):
    """Return a function that verifies the script and gives the exit status and all that was printed."""

    def run(*arguments, way):
        status = main(["verify", *arguments, SCRIPT, way])
        return status, "".join(capsys.readouterr())

    return run


def test_a_good_script_passes_also_when_a_worker_is_killed(verify):
    status, printed = verify(
        "-n", "1,2,1x2", "--lanes", "4", "--steps", "4", "--kill", way="is good"
    )
    assert status == 0
    table = [line.split() for line in printed.splitlines() if re.match(r" +\d+  ", line)]
    assert [row[0] for row in table] == ["1", "2", "3", "4"]
    assert [len({*hashes}) for _, *hashes in table] == [1] * 4
    assert [len(hashes) for _, *hashes in table] == [4] * 4
    assert len({hashes[0] for _, *hashes in table}) == 4
    assert "4 lanes" in printed
    assert re.search(
        r"the same at every step: n=1, n=2, n=1x2, n=1x2, worker 0 killed, n=1 from step [0-3]",
        printed,
    )


@pytest.mark.parametrize(
    ("way", "first", "cause"),
    [
        (
            "draws",
            "step 1: 'metric loss' differs between n=1 and n=2",
            "a random generator of the script's own",
        ),
        (
            "depends on the rank",
            "step 2: 'optimizer/state/0/momentum_buffer' differs between n=1 and n=2",
            "gradients changed by one worker only",
        ),
        ("ends early", "step 3: n=2 did not make it", "number of steps"),
    ],
)
def test_a_bad_script_fails_where_it_first_differs(way, first, cause, verify):
    status, printed = verify("--steps", "3", way=way)
    assert status == 1
    assert f"DIFFERENT, first at {first}" in printed
    assert cause in printed


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("does not track", "left nothing to compare: it must track its model and optimizer"),
        ("does not start", "never called samestep.init"),
        ("fails", r"failed at n=1 with status 1:(?s:.*)RuntimeError: no more memory"),
    ],
)
def test_a_script_that_cannot_be_verified_is_told(way, words, verify):
    status, printed = verify("-n", "1", way=way)
    assert status == 1
    assert re.search(f"samestep: error: the script .*{words}", printed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2x"], "-n 2x was given; expected numbers of workers such as 1,2,4, or 1x2"),
        (["-n", "1,x"], "-n 1,x was given; expected numbers of workers"),
        (["-n", "0"], "-n 0 was given"),
        (["--steps", "0"], "--steps 0 was given; expected at least 1"),
        (["--steps", "1", "--kill"], "2 with --kill"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words, verify):
    status, printed = verify(*arguments, way="is good")
    assert status == 1
    assert words in printed
