from __future__ import annotations

import pytest

from benchmarks.picture import draw
from benchmarks.verdict import best, describe, ratios, tables


def runs(*speeds):
    return [{"samples_a_second": speed, "memory_megabytes": 300.0} for speed in speeds]


FOUND = {
    "plain": runs(100, 50, 100),
    "ddp": runs(110, 60, 90),
    "fabric": runs(80, 40, 70),
    "ddp-fused": runs(190, 90, 200),
}


def test_ratios_compare_runs_of_one_round():
    assert ratios(FOUND, "ddp") == pytest.approx([1.1, 1.2, 0.9])
    assert ratios(FOUND, "ddp", "fabric") == pytest.approx([110 / 80, 1.5, 90 / 70])


def test_the_best_has_the_highest_median_of_its_role():
    assert best(FOUND, {"peer"}) == "ddp"
    assert best(FOUND, {"peer", "tuned peer"}) == "ddp-fused"
    assert best(FOUND, {"ours"}) is None


def test_the_tables_show_wins_and_losses_of_samestep():
    speeds, memories = tables({"vit": {**FOUND, "samestep": runs(165, 90, 150)}}).split("\n\n")
    rows = dict(line.strip("| ").split(" | ") for line in speeds.splitlines())
    assert rows["samestep"] == "1.65 (1.50 to 1.80)"
    assert rows["samestep / best peer"] == "1.50 (1.50 to 1.67), DDP"
    assert rows["samestep / best, tuned or not"] == "0.87 (0.75 to 1.00), DDP, fused AdamW: loses"
    assert memories.splitlines()[-1] == "| samestep | 300 |"


def test_a_job_is_described_without_samestep():
    assert "1.10 (0.90 to 1.20)" in describe("vit", FOUND)
    assert "| samestep / best peer |  |" in tables({"vit": FOUND})


def test_the_picture_is_the_same_for_the_same_figures(tmp_path):
    results = {"vit": FOUND, "mlp": FOUND}
    draw(results, tmp_path / "one.svg")
    draw(results, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "DDP, fused AdamW" in (tmp_path / "one.svg").read_text()
