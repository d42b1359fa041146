from __future__ import annotations

import torch

from benchmarks import packing


def test_all_variants_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # other tests have more
    packing.main(["--rounds", "2", "--length", "32", "--steps", "1", "--rows", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" (")[2].endswith(" ms") for line in lines] == [True] * 4
    assert "a row of Packed" in lines[2]
