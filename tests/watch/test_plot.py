from __future__ import annotations

import argparse
import math
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from samestep.errors import ConfigError, RecordError
from samestep.record import FileRecord
from samestep.watch import plot
from tests.watch.writing import loop, scalars, started, write

ODD = "<script>$\\frac{1}$ & _x"


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run with the scalars loss, which has a band, and accuracy."""
    return make_run(tmp_path / "run")


def make_run(folder, **values):
    folder.mkdir()
    record = FileRecord(folder)
    record.event("started", step=0, config={})
    for step in range(50):
        loss = values.get("loss", 2.0) / (step + 1)
        record.scalars(
            step,
            0,
            {"loss": loss, "accuracy": 1 - loss / 2},
            {"loss": 0.9 * loss},
            {"loss": 1.1 * loss},
        )
    record.close()
    return folder


def draw(*arguments):
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.main(parser.parse_args([str(argument) for argument in arguments]))


def texts(svg):
    return [
        "".join(node.itertext()) for node in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def colors(svg):
    """Return the colors of the palette, except black, in a picture."""
    text = svg.read_text()
    return [color for color in plot.PALETTE[:-1] if f"stroke: {color.lower()}" in text]


@pytest.mark.parametrize(
    ("suffix", "begin"),
    [
        pytest.param("png", b"\x89PNG", marks=pytest.mark.long),
        pytest.param("pdf", b"%PDF", marks=pytest.mark.long),
        ("svg", b"<?xml"),
    ],
)
def test_the_same_curves_give_the_same_file(run, tmp_path, suffix, begin):
    for name in ("one", "two"):
        assert draw(run, "--out", tmp_path / f"{name}.{suffix}") == 0
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert first.startswith(begin)
    assert first == second


def test_each_scalar_has_a_panel(run, tmp_path):
    draw(run, "--out", tmp_path / "all.svg")
    labels = texts(tmp_path / "all.svg")
    assert [name for name in labels if name in {"loss", "accuracy"}] == ["loss", "accuracy"]
    assert labels.count("step") == 2
    draw(run, "--out", tmp_path / "one.svg", "--scalars", "accuracy")
    assert "accuracy" in texts(tmp_path / "one.svg")
    assert "loss" not in texts(tmp_path / "one.svg")


def test_runs_have_their_own_colors_and_a_legend(run, tmp_path):
    other = make_run(tmp_path / "other", loss=3.0)
    draw(run, other, "--out", tmp_path / "both.svg")
    assert {"run", "other"} <= {*texts(tmp_path / "both.svg")}
    assert colors(tmp_path / "both.svg") == [*plot.PALETTE[:2]]
    draw(run, "--out", tmp_path / "one.svg")
    assert "run" not in texts(tmp_path / "one.svg")


def test_legends_of_runs_with_the_same_name(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        make_run(tmp_path / place / "_run")
    draw(tmp_path, "--out", tmp_path / "folder.svg")
    assert {"a/_run", "b/_run"} <= {*texts(tmp_path / "folder.svg")}
    draw(tmp_path / "a" / "_run", tmp_path / "b" / "_run", "--out", tmp_path / "two.svg")
    assert {" _run", " _run-2"} <= {*texts(tmp_path / "two.svg")}


def test_a_run_without_the_curves_is_not_in_the_legend(run, tmp_path):
    write(tmp_path / "empty", started())
    make_run(tmp_path / "second")
    draw(run, tmp_path / "empty", tmp_path / "second", "--out", tmp_path / "two.svg")
    assert {"run", "second"} <= {*texts(tmp_path / "two.svg")}
    assert "empty" not in texts(tmp_path / "two.svg")


@pytest.mark.long
def test_log_and_smooth(run, tmp_path):
    draw(run, "--out", tmp_path / "plain.svg", "--scalars", "loss")
    draw(run, "--out", tmp_path / "log.svg", "--scalars", "loss", "--log")
    draw(run, "--out", tmp_path / "smooth.svg", "--scalars", "loss", "--smooth", "0.9")
    assert any(
        "10^" in text or "10⁰" in text or text.startswith("10")
        for text in texts(tmp_path / "log.svg")
    )
    assert not any(
        text.startswith("10") for text in texts(tmp_path / "plain.svg") if text not in {"10", "100"}
    )
    lines = [
        (tmp_path / f"{name}.svg").read_text().count(f"stroke: {plot.PALETTE[0].lower()}")
        for name in ("plain", "smooth")
    ]
    assert lines[1] == lines[0] + 1


def test_curves_over_samples(run, tmp_path):
    with pytest.raises(ConfigError, match="the record of run has no number of samples; use --x"):
        draw(run, "--out", tmp_path / "none.svg", "--x", "samples")
    events = started(), loop(0, batch_size=64), *(scalars(step, loss=1.0) for step in range(50))
    write(tmp_path / "counted", *events)
    draw(tmp_path / "counted", "--out", tmp_path / "samples.svg", "--x", "samples")
    assert {"samples", "3000"} < set(texts(tmp_path / "samples.svg"))


def test_time_starts_with_the_run(tmp_path, monkeypatch):
    clock = iter([1e9, *(1e9 + 90_000 * step / 49 for step in range(50))])
    monkeypatch.setattr("time.time", lambda: next(clock, 1e9 + 90_000))
    make_run(tmp_path / "run")
    draw(tmp_path / "run", "--out", tmp_path / "time.svg", "--x", "time", "--scalars", "loss")
    assert {"hours", "25"} < {*texts(tmp_path / "time.svg")}
    assert "step" not in texts(tmp_path / "time.svg")


def test_the_size_is_in_inches(run, tmp_path):
    draw(run, "--out", tmp_path / "size.png", "--size", "5x2.5")
    with Image.open(tmp_path / "size.png") as image:
        assert image.size == (1000, 500)


def test_values_that_cannot_be_drawn_are_skipped(tmp_path):
    record = FileRecord(tmp_path)
    record.scalars(0, 0, {ODD: math.nan, "one": 1.0})
    record.scalars(1, 0, {ODD: math.inf})
    record.close()
    draw(tmp_path, "--out", tmp_path / "odd.svg", "--smooth", "0.5")
    assert {ODD, "one"} <= {*texts(tmp_path / "odd.svg")}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--out", "x.abc"],
            "--out x.abc cannot be written: Format 'abc' is not supported",
        ),
        (
            ["--out", "x.png", "--smooth", "1"],
            "--smooth must be at least 0 and below 1, got 1.0",
        ),
        (
            ["--out", "x.png", "--scalars", "loss,los"],
            "--scalars: expected some of 'loss', 'accuracy', got 'los'",
        ),
        (
            ["--out", "missing/x.png"],
            "--out missing/x.png cannot be written: .*No such file or directory",
        ),
    ],
)
def test_wrong_options(run, monkeypatch, tmp_path, arguments, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=error):
        draw(run, *arguments)


def test_nothing_to_plot(tmp_path):
    with pytest.raises(ConfigError, match="got missing"):
        draw("missing", "--out", tmp_path / "x.png")
    record = FileRecord(tmp_path)
    record.event("started", step=0, config={})
    record.close()
    with pytest.raises(RecordError, match="no run has a scalar yet"):
        draw(tmp_path, "--out", tmp_path / "x.png")


def test_a_missing_matplotlib_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[plot\]"'):
        draw(run, "--out", tmp_path / "x.png")


def test_neither_torch_nor_a_screen_is_needed(run, tmp_path):
    script = (
        "import argparse, sys; from samestep.watch import plot; "
        "parser = argparse.ArgumentParser(); plot.add_arguments(parser); "
        "plot.main(parser.parse_args(sys.argv[1:])); "
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", script, run, "--out", tmp_path / "curves.png"],
        check=True,
        timeout=300,
    )
    assert (tmp_path / "curves.png").stat().st_size > 1000
