"""`samestep verify` accepts a good script, and reports the first difference of a faulty one."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import samestep as ss
from samestep.cli import main
from samestep.errors import RecordError
from samestep.tools.trace import read_traces
from tests.python import start_python

SCRIPT = str(Path(__file__).with_name("script.py"))


@pytest.fixture
def verify(capsys):
    """Return a function that verifies the script and returns the exit status and the output."""

    def run(*arguments, way):
        status = main(["verify", *arguments, SCRIPT, way])
        return status, "".join(capsys.readouterr())

    return run


def test_a_good_script_passes_even_if_a_worker_is_killed(verify):
    status, printed = verify("-n", "1,2,1x2", "--lanes", "4", "--steps", "4", "--kill", way="good")
    assert status == 0
    table = [line.split() for line in printed.splitlines() if re.match(r" +\d+  ", line)]
    assert [row[0] for row in table] == ["0", "1", "2", "3", "4"]
    assert [len({*hashes}) for _, *hashes in table] == [1] * 5
    assert [len(hashes) for _, *hashes in table] == [4] * 5
    assert len({hashes[0] for _, *hashes in table}) == 5
    assert "4 lanes" in printed
    runs = "n=1, n=2, n=1x2, n=1x2, killed after step 1, n=1, killed after step 3, n=1x2"
    assert re.search(f"the same at every step: {runs}", printed)


@pytest.mark.parametrize(
    ("way", "first", "cause"),
    [
        (
            "unseeded",
            "step 1: 'metric loss' differs between n=1 and n=2",
            "Likely cause: a lane draws from the generator loss_fn: unseeded, which samestep does",
        ),
        (
            "depends on the rank",
            "step 2: 'optimizer/state/0/momentum_buffer' differs between n=1 and n=2",
            "after step 2; it was changed by code that runs on only some workers",
        ),
        pytest.param(
            "counts calls",
            "step 1: 'metric loss' differs",
            "Likely cause: a lane changes the attribute Counter.calls, which stays on its worker",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "rank 0 goes forward",
            "step 2: 'model/0.running_mean' differs",
            "Likely cause: Sequential/0.running_mean differs between workers 0 and 1 of n=2 after",
            marks=pytest.mark.long,
        ),
        (
            "builds early",
            "step 0: 'model/weight' differs",
            "Usual cause: the state before the first step: a model or optimizer built before",
        ),
        pytest.param(
            "ends early", "step 3: n=2 never reached it", "number of steps", marks=pytest.mark.long
        ),
    ],
)
def test_a_faulty_script_fails_at_its_first_difference(way, first, cause, verify):
    status, printed = verify("--steps", "3", way=way)
    assert status == 1
    assert f"DIFFERENT, first at {first}" in printed
    assert cause in printed


def test_what_starts_over_after_a_kill_is_named(verify):
    status, printed = verify("--steps", "3", "--kill", way="counts steps")
    assert status == 1
    assert "differs between n=1 and n=2, killed after step 1, n=1" in printed
    assert re.search(r"Likely cause: steps_taken.*: not tracked, so it starts over", printed)


def test_the_best_weights_in_a_variable_are_named_where_the_script_loads_them(verify):
    status, printed = verify("--steps", "10", "--kill", way="keeps the best")
    assert status == 1
    assert re.search(r"first at step 9: 'model/weight' differs between n=1 and n=2, kill", printed)
    assert re.search(r"Likely cause: .*best_loss, best_weights.*: not tracked, so it", printed)
    assert "stopped before its end" not in printed


@pytest.mark.long
def test_tracked_weights_are_the_same_at_the_end_of_the_script(verify):
    status, printed = verify("--steps", "10", "--kill", way="tracks the best")
    assert (status, "stopped before its end" in printed) == (0, False)
    status, printed = verify("--steps", "2", way="tracks the best")
    assert (status, "stopped before its end" in printed) == (0, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("logs its lanes", "'logged seen' .*Usual cause: the script computed the value on rank 0"),
        ("counts loads", "Likely cause: two loads of an index from the data set Counting give"),
    ],
)
def test_faults_of_data_and_logs_have_their_own_cause(way, cause, verify):
    status, printed = verify("--steps", "2", way=way)
    assert status == 1
    assert re.search(cause, printed, re.DOTALL)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("untracked", "wrote no snapshot; it must track its model and optimizer"),
        ("no run", r"did not start a run; it must call samestep\.init"),
        ("fails", r"failed at n=1 with status 1:(?s:.*)RuntimeError: no more memory"),
    ],
)
def test_a_script_that_cannot_be_verified_is_an_error(way, message, verify):
    status, printed = verify("-n", "1", way=way)
    assert status == 1
    assert re.search(f"samestep: error: the script {message}", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2x", "-n: expected worker counts such as 1,2,4, or 1x2 for one worker with 2 devices"),
        ("-n 1,x", "got 1,x"),
        ("-n 0", "got 0"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--steps 1 --kill", "--steps must be at least 2 with --kill, got 1"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments, message, verify):
    status, printed = verify(*arguments.split(), way="good")
    assert status == 1
    assert message in printed


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_script_as_well(number, tmp_path):
    script, started = tmp_path / "endless.py", tmp_path / "pid"
    lines = ["import os, pathlib, sys, time"]
    lines += ["pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))", "time.sleep(1000)"]
    script.write_text("\n".join(lines))
    # its run is a new process
    command = ("-m", "samestep", "verify", "--steps", "1", script, started)
    printed = tmp_path / "printed"
    with printed.open("w") as file, start_python(*command, stderr=file) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == 128 + number
    if number == signal.SIGINT:
        assert printed.read_text().splitlines()[-1] == (
            "samestep: verify was interrupted; its runs were in temporary folders, which are"
            " removed"
        )
    # the launcher ends its workers before it exits
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_run_without_a_snapshot_must_track_its_model(tmp_path):
    with ss.init(dir=tmp_path):
        pass
    with pytest.raises(RecordError, match=r"wrote no snapshot; it must track .* \(run.track\)"):
        read_traces(tmp_path)
