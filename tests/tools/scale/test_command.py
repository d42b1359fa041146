"""`samestep scale` measures a script, and prints, draws and writes what it found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.tools.scale.ranges import Range
from samestep.tools.scale.timing import PARTS

SCRIPT = str(Path(__file__).parents[1] / "script.py")


@pytest.fixture
def scale(capsys):
    """Return a function that runs the command on the script and gives the exit status, and what was printed."""

    def run(*arguments, way="is good"):
        status = main(["scale", *map(str, arguments), SCRIPT, way])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_script_is_measured_and_told_what_to_expect(scale, tmp_path):
    picture, file = tmp_path / "scale.svg", tmp_path / "scale.json"
    network = ["--latency", "20e-6", "--bandwidth", "12.5e9", "--workers-per-host", "2"]
    rate = ["--learning-rate", "0.1"]
    status, printed, _ = scale(
        "-n",
        "1,2",
        "--steps",
        "8",
        "--repeats",
        "1",
        *network,
        *rate,
        "--out",
        picture,
        "--json",
        file,
    )
    assert status == 0
    rows = {row[0]: row for row in map(str.split, printed.splitlines()) if row and row[0].isdigit()}
    assert {"1", "2", "8", "64", "1024"} <= rows.keys()
    assert re.search(
        r"2 lanes, batches of 8, 0\.0026 MB of parameters, whole optimizer, on cpu", printed
    )
    assert "between hosts 20 us a message and 12.5 GB/s (as given)" in printed
    assert "workers beyond 2 lanes have nothing to do" in printed
    assert picture.read_text().startswith("<?xml")

    told = json.loads(file.read_text())
    (alone,), (together,) = told["measured"]["1"], told["measured"]["2"]
    assert list(alone["parts"]) == list(PARTS)
    assert all(sum(one["parts"].values()) > 0 for one in (alone, together))
    assert told["speed_up"]["2"]["middle"] == pytest.approx(alone["step"] / together["step"])
    assert told["same_global_batch"] == [None] * 3
    assert [larger["lanes"] for larger in told["same_lane_batch"]] == [8, 64, 1024]
    check = told["check"]
    assert check["workers"] == 2
    expected = Range(**check["step"])
    assert expected.lowest <= expected.middle <= expected.highest
    # and the exchange, and what stays
    assert expected.middle > (alone["parts"]["data"] + alone["parts"]["compute"]) / 2


def test_a_script_that_fails_is_told_once(scale):
    status, printed, told = scale("-n", "1", way="fails")
    assert status == 1
    assert printed == ""
    assert (
        "samestep: error: the script failed with 1 worker, status 1:\nworker 0 failed first: RuntimeError: no more memory"
        in told
    )
    assert told.count("Traceback") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "1,x"], "-n 1,x was given; expected numbers of workers such as 1,2,4"),
        (["-n", "0"], "-n 0 was given"),
        (
            ["-n", "4", "--lanes", "2"],
            "--lanes 2 was given with -n 4; expected at least a lane a worker",
        ),
        (["--steps", "7"], "--steps 7 was given; expected at least 8"),
        (["--repeats", "0"], "--repeats 0 was given; expected at least 1"),
        (["--latency", "1e-5"], "expected both"),
        (
            ["--latency", "nan", "--bandwidth", "1e9"],
            "--latency nan was given; expected a number above 0",
        ),
        (["--learning-rate", "-1"], "--learning-rate -1.0 was given"),
        (
            ["--out", "scale.txt"],
            "--out scale.txt was given; expected a name that ends in .svg, .png, .pdf",
        ),
        (["--out", "missing/scale.svg"], "there is no directory missing"),
        (["--json", "missing/scale.json"], "there is no directory missing"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_measured(arguments, words, scale):
    status, printed, told = scale(*arguments)
    assert status == 2
    assert words in told
    assert printed == ""
    assert "running" not in told
