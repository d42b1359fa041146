from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.errors import ConfigError
from samestep.tools.golden import PLACE, Golden, judge

SCRIPT = str(Path(__file__).with_name("script.py"))
GOLDEN = Golden(
    dict.fromkeys(PLACE, "1"), 4, 2, {"0": {"model": "a", "optimizer": "b"}, "1": {"model": "c"}}
)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({}, 0, "as in "),
        ({"place": {**GOLDEN.place, "threads": "2"}}, 2, "here: threads was 1 and is 2"),
        ({"place": {**GOLDEN.place, "torch": "9"}, "lanes": 9}, 2, "torch was 1 and is 9"),
        ({"lanes": 8}, 1, "lanes were 4 and are 8"),
        ({"steps": {**GOLDEN.steps, "1": {"model": "d"}}}, 1, "step 1: 'model'"),
        ({"steps": {**GOLDEN.steps, "0": {"extra": "d"}}}, 1, "step 0: 'model' and 2 more"),
        ({"steps": {**GOLDEN.steps, "2": {"model": "c"}}}, 1, "step 2: only the run has it"),
        ({"steps": {"0": GOLDEN.steps["0"]}}, 1, "step 1: only the file has it"),
        ({"steps": {**GOLDEN.steps, "10": {}, "9": {}}}, 1, "step 9: only the run has it"),
    ],
)
def test_a_run_is_compared_with_the_file(tmp_path, capsys, change, status, text):
    path = tmp_path / "golden.json"
    assert judge(path, None, GOLDEN) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert Golden.read(path) == GOLDEN
    assert judge(path, Golden.read(path), replace(GOLDEN, **change)) == status
    assert text in capsys.readouterr().out


def changed(**values):
    content = {"format": 1, "place": {}, "lanes": 1, "last": 1, "steps": {"0": {}}}
    content |= values
    return json.dumps({name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[", "[]", "5", "null", "[" * 10_000, "{}"),
        *(changed(**{name: None}) for name in ("format", "place", "lanes", "last", "steps")),
        *(changed(format=value) for value in (2, "1")),
        *(changed(lanes=value) for value in (0, -1, 1.5, "4", True)),
        *(changed(last=value) for value in (0, True, [])),
        *(changed(steps=value) for value in ({}, [], {"0": []}, {"-1": {}}, {"0": {"a": 1}})),
        *(changed(place=value) for value in ([], {"torch": 1})),
        changed(more=1),
    ],
)
def test_a_file_that_was_not_written_as_one_is_refused(tmp_path, content):
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot read .*golden\.json .*; restore it"):
        Golden.read(path)


@pytest.mark.parametrize("place", ["missing/golden.json", ".", "file/golden.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_runs(tmp_path, capsys, place):
    (tmp_path / "file").touch()
    assert main(["verify", "--golden", str(tmp_path / place), SCRIPT, "good"]) == 2
    printed = capsys.readouterr().err
    assert "--golden: " in printed
    assert "running at" not in printed


def test_a_script_is_compared_with_what_it_did_before(tmp_path, capsys):
    path = str(tmp_path / "golden.json")
    verify = ["verify", "-n", "1", "--steps", "2", "--lanes", "2", "--golden", path, SCRIPT]
    assert main([*verify, "good"]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert main([*verify[:4], "9", *verify[5:], "good"]) == 2
    assert "--steps must be 2" in capsys.readouterr().err
    del verify[3:5]  # the file says how many
    assert main([*verify, "unseeded"]) == 1
    assert f"not as in {path}, first at step 1: 'metric loss'" in capsys.readouterr().out


@pytest.mark.long
def test_a_script_that_is_the_same_or_does_not_run(tmp_path, capsys):
    path = str(tmp_path / "golden.json")
    verify = ["verify", "--steps", "2", "--golden", path, SCRIPT]
    for _ in range(2):
        assert main([*verify, "good"]) == 0
    assert f"as in {path}" in capsys.readouterr().out
    for way in ("fails", "no run", "untracked"):
        assert main([*verify, way]) == 125  # which git bisect skips
