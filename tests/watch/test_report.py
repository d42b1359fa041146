from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re

import numpy as np
import pytest

from samestep.errors import ConfigError, RecordError
from samestep.record import open_record
from samestep.watch import report
from tests.watch.markup import Markup

NASTY = "</script><script>alert(1)</script><!--"
NAMES = ("loss", "val/a b*~é+&=?#%", NASTY)
STEPS = 2500
PLENTY = 10**9
PARTS = ("data", "compute", "exchange", "optimizer", "snapshot")


def data_of(page):
    return json.loads(Markup(page).texts["script", "answers"][0])


def make_run(folder, steps, images):
    record = open_record(folder, writes=True)
    workers = [{"rank": rank, "host": "here", "pid": rank} for rank in range(2)]
    record.event(
        "started",
        step=0,
        lanes=4,
        workers=workers,
        devices=["cpu"],
        torch="2",
        config={"dir": NASTY},
    )
    for step in range(steps):
        values = dict.fromkeys(NAMES, 1 / (step + 1)) | {
            "loss": 7.0 if step == steps // 2 else 1 / (step + 1)
        }
        record.scalars(
            step, 0, values, low=dict.fromkeys(NAMES, 0.0), high=dict.fromkeys(NAMES, 8.0)
        )
    record.timing(steps - 1, [dict.fromkeys(PARTS, seconds) for seconds in (1.0, 2.0)])
    record.histogram(steps - 1, NASTY, {"0.5": 3})
    for number in range(images):
        record.image(number, NASTY, np.full((4, 4 + number), number, np.uint8))
    record.event("finished", step=steps)
    record.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one", STEPS, 1)


@pytest.fixture(scope="module")
def page(run):
    return report.make_report([str(run)], image_bytes=PLENTY).page


@pytest.fixture(scope="module")
def parts(page):
    return Markup(page)


@pytest.fixture(scope="module")
def answers(page):
    return data_of(page)["answers"]


def test_text_of_a_record_cannot_break_out(page, parts, answers):
    assert NASTY not in page
    assert (
        len(re.findall("<script", page))
        == len(re.findall("</script", page))
        == len(parts.texts["script", None]) + 1
    )
    assert answers["/api/run?id=."]["config"] == {"dir": NASTY}


def test_every_scalar_is_included_for_both_axes(answers):
    # as a browser's URLSearchParams encodes these names
    names = {
        "loss",
        "val%2Fa+b*%7E%C3%A9%2B%26%3D%3F%23%25",
        "%3C%2Fscript%3E%3Cscript%3Ealert%281%29%3C%2Fscript%3E%3C%21--",
    }
    asked = {f"/api/curve?id=.&name={name}&x={axis}" for name in names for axis in ("step", "time")}
    assert {key for key in answers if key.startswith("/api/curve")} == asked
    assert {scalar["name"] for scalar in answers["/api/run?id=."]["scalars"]} == set(NAMES)
    assert [row["id"] for row in answers["/api/runs"]["runs"]] == ["."]
    assert answers["/api/timing?id=."]["parts"]["compute"] == [1.5]


@pytest.mark.parametrize("axis", ["step", "time"])
def test_curves_are_short_and_keep_their_extremes(answers, axis):
    curve = answers[f"/api/curve?id=.&name=loss&x={axis}"]
    assert (
        len(curve["x"])
        == len(curve["value"])
        == len(curve["low"])
        <= report.MOST_POINTS
        < STEPS
        == curve["points"]
    )
    assert max(curve["value"]) == 7.0
    assert curve["x"] == sorted(set(curve["x"]))


def test_histograms_are_included(answers):
    (path,) = (key for key in answers if key.startswith("/api/histogram?"))
    name = "%3C%2Fscript%3E%3Cscript%3Ealert%281%29%3C%2Fscript%3E%3C%21--"
    assert path == f"/api/histogram?id=.&name={name}"
    (item,) = answers[path]["items"]
    assert (item["step"], item["bins"]) == (STEPS - 1, [[0.5, 3.0]])


def test_the_file_is_small(page, run):
    assert len(page) < (run / "events.jsonl").stat().st_size
    assert len(page) < 1_000_000


def test_images_are_included_unchanged(answers, run):
    (written,) = (run / "images").iterdir()
    assert (
        answers["/api/image?id=.&number=0"]
        == "data:image/png;base64," + base64.b64encode(written.read_bytes()).decode()
    )


def test_nothing_is_loaded_from_outside(parts):
    for script in parts.texts["script", None]:
        assert not re.search(r"https?://", re.sub(r"\A/\*!.*?\*/", "", script))
    for _, attributes in parts.elements:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))


def test_the_content_policy_permits_only_these_scripts_and_styles(parts):
    (policy,) = (
        attributes["content"]
        for tag, attributes in parts.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag, count in (("script", 2), ("style", 3)):
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in parts.texts[tag, None]
        ]
        assert rules[f"{tag}-src"].split() == hashes
        assert len(hashes) == count
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"


def test_images_over_the_limit_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", 1, 3)
    newest = max((run / "images").iterdir()).stat().st_size  # names end with the step
    short = report.make_report([str(run)], image_bytes=newest)
    assert "2 of 3 images left out" in short.text
    data = data_of(short.page)
    assert [key for key in data["answers"] if key.startswith("/api/image")] == [
        "/api/image?id=.&number=2"
    ]
    assert data["report"]["text"] == short.text


def test_missing_and_damaged_images_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", 1, 2)
    first, second = sorted((run / "images").iterdir())
    first.unlink()
    second.write_bytes(b"<html>")
    assert "2 of 2 images left out" in report.make_report([str(run)], image_bytes=PLENTY).text


def test_runs_have_unique_ids(tmp_path):
    runs = [make_run(tmp_path / place / "run", 1, 0) for place in ("a", "b")]
    answers = data_of(report.make_report(map(str, runs), image_bytes=0).page)["answers"]
    ids = {row["id"] for row in answers["/api/runs"]["runs"]}
    assert len(ids) == 2
    assert all(f"/api/run?id={run}" in answers for run in ids)


def test_many_curves_share_the_limit_of_points(run, monkeypatch):
    monkeypatch.setattr(report, "ALL_POINTS", 100 * len(NAMES) * 2)
    made = report.make_report([str(run)], image_bytes=0)
    assert "at most 100 points" in made.text
    curves = [
        answer
        for key, answer in data_of(made.page)["answers"].items()
        if key.startswith("/api/curve")
    ]
    assert max(len(curve["x"]) for curve in curves) <= 100


def run_command(*words):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.main(parser.parse_args([str(word) for word in words]))


def test_the_command(tmp_path, capsys):
    make_run(tmp_path / "runs" / "one", 1, 1)
    make_run(tmp_path / "other", 1, 0)
    out = tmp_path / "out.html"
    assert run_command(tmp_path / "runs", tmp_path / "other", "--out", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: Report of 2 runs, written ")
    assert len(data_of(out.read_text())["answers"]["/api/runs"]["runs"]) == 2


def test_the_report_of_another_run_is_not_overwritten(tmp_path, monkeypatch):
    one, other = (make_run(tmp_path / name, 1, 0) for name in ("one", "other"))
    monkeypatch.chdir(tmp_path)
    assert run_command(one) == run_command("one") == 0
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(ConfigError, match=r"report.html exists .*another file with --out"):
        run_command(other)
    assert (tmp_path / "report.html").read_bytes() == before
    assert run_command(other, "--out", "report.html") == 0


def test_wrong_options(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a run's folder, .*, got .*none"):
        run_command(tmp_path / "none")
    with pytest.raises(RecordError, match="no run at or below"):
        run_command(tmp_path)
    make_run(tmp_path / "run", 1, 0)
    with pytest.raises(ConfigError, match=r"cannot be written: .*; use an existing folder"):
        run_command(tmp_path / "run", "--out", tmp_path / "none" / "x.html")
    for size in ("-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="--images must be a number of megabytes"):
            run_command(tmp_path / "run", "--images", size)


def test_modules_are_bundled_in_the_order_of_their_imports():
    script = report._script(report.MAIN)
    made = re.findall(r"^const (\w+)_js = \(\(\) => \{$", script, re.MULTILINE)
    assert sorted(f"{name}.js" for name in made) == sorted(
        path.name for path in report.PAGE.glob("*.js") if "uPlot" not in path.name
    )
    for place, name in enumerate(made):
        body = script.split(f"const {name}_js = ")[1].split("\nreturn {")[0]
        assert set(re.findall(r"\} = (\w+)_js;", body)) <= set(made[:place])
    assert not re.search(r"^(?:import|export)\b", script, re.MULTILINE)
