"""`samestep scale` measures a script, and prints and writes the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.host import usable_cores
from samestep.tools.scale.timing import PARTS

SCRIPT = str(Path(__file__).parents[1] / "script.py")


@pytest.fixture
def scale(capsys):
    """Return a function that runs the command on the script: exit status, stdout and stderr."""

    def run(*arguments, way="good"):
        status = main(["scale", *map(str, arguments), SCRIPT, way])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.long
def test_a_script_is_measured_and_more_workers_are_forecast(scale, tmp_path):
    file = tmp_path / "scale.json"
    flags = ("-n", "1,2", "--lanes", "4", "--steps", "8", "--repeats", "1", "--json", file)
    status, printed, _ = scale(*flags)
    assert status == 0
    rows = {row[0]: row for row in map(str.split, printed.splitlines()) if row and row[0].isdigit()}
    assert {"1", "2"} <= rows.keys()
    assert "4 lanes, batches of 8, on cpu" in printed

    results = json.loads(file.read_text())
    (alone,), (together,) = results["measured"]["1"], results["measured"]["2"]
    assert list(alone["parts"]) == list(PARTS)
    assert all(sum(timing["parts"].values()) > 0 for timing in (alone, together))
    assert results["speedup"]["2"]["middle"] == pytest.approx(alone["step"] / together["step"])
    if usable_cores() < 2:
        assert "No forecast" in printed
        return
    assert rows["4"][-1].endswith("%")
    of_lanes = together["parts"]["data"] + together["parts"]["compute"]
    expected = of_lanes / 2 + max(0.0, together["step"] - of_lanes)
    assert results["forecast"]["steps"]["4"]["middle"] == pytest.approx(expected)


def test_a_failing_script_is_reported_once(scale):
    status, printed, errors = scale("-n", "1", way="fails")
    assert status == 1
    assert printed == ""
    assert (
        "samestep: error: the script failed with 1 worker, status 1:\n"
        "worker 0 failed first: RuntimeError: no more memory" in errors
    )
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 1,x", "-n: expected worker counts such as 1,2,4, got 1,x"),
        ("-n 0", "-n: expected worker counts such as 1,2,4, got 0"),
        ("-n 4 --lanes 2", "--lanes must be at least the number of workers (4), got 2"),
        ("--steps 7", "--steps must be at least 8, because the first and last are left out, got 7"),
        ("--repeats 0", "--repeats must be a positive number, got 0"),
        ("--lanes -1", "--lanes must be a positive number, got -1"),
        ("--json missing/scale.json", "--json: the directory missing does not exist"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_measured(arguments, message, scale):
    status, printed, errors = scale(*arguments.split())
    assert status == 2
    assert message in errors
    assert printed == ""
    assert "running" not in errors
