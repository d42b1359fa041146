"""`samestep scale` measures a script, and prints, draws and writes the results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.errors import ConfigError
from samestep.tools.scale import check_can_draw
from samestep.tools.scale.model import PARTS, Range

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
def test_a_script_is_measured_and_larger_runs_are_predicted(scale, tmp_path):
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
        r"2 lanes, batches of 8, 0\.0026 MB of parameters, unsharded optimizer, on cpu", printed
    )
    assert "between hosts: 20 us per message, 12.5 GB/s (as given)" in printed
    assert "samestep starts at most one worker per lane (2)" in printed
    assert picture.read_text().startswith("<?xml")

    results = json.loads(file.read_text())
    (alone,), (together,) = results["measured"]["1"], results["measured"]["2"]
    assert list(alone["parts"]) == list(PARTS)
    assert all(sum(one["parts"].values()) > 0 for one in (alone, together))
    assert results["speedup"]["2"]["middle"] == pytest.approx(alone["step"] / together["step"])
    assert results["same_global_batch"] == [None] * 3
    assert [larger["lanes"] for larger in results["same_lane_batch"]] == [8, 64, 1024]
    check = results["check"]
    assert check["workers"] == 2
    expected = Range(**check["step"])
    assert expected.lowest <= expected.middle <= expected.highest
    # it also includes the exchange and the constant
    assert expected.middle > (alone["parts"]["data"] + alone["parts"]["compute"]) / 2


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
        ("--latency 1e-5", "expected both --latency and --bandwidth"),
        ("--latency nan --bandwidth 1e9", "--latency must be a positive number, got nan"),
        ("--learning-rate -1", "--learning-rate must be a positive number, got -1.0"),
        ("--out scale.txt", "expected a name that ends in one of .svg, .png, .pdf, got scale.txt"),
        ("--out missing/scale.svg", "--out: the directory missing does not exist"),
        ("--json missing/scale.json", "--json: the directory missing does not exist"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_measured(arguments, message, scale):
    status, printed, errors = scale(*arguments.split())
    assert status == 2
    assert message in errors
    assert printed == ""
    assert "running" not in errors


def test_drawing_without_matplotlib_explains_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[plot\]"'):
        check_can_draw(tmp_path / "scale.svg")
