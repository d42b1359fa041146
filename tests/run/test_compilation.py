"""The terminal says what the first step waits for while torch compiles."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from samestep.run import compilation
from samestep.run.compilation import reported_compilation

COMPILE = "def compile_model(wait):\n    assert wait(60)\n"


@pytest.fixture
def said(monkeypatch):
    """Return the lines that are announced, and events: of one, and of a look at all threads."""
    lines, announced, reported = [], threading.Event(), threading.Event()
    report = compilation._report

    def announce(line):
        lines.append(line)
        announced.set()

    def reporting(main):
        has_reported = report(main)
        reported.set()
        return has_reported

    monkeypatch.setattr(compilation, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(compilation, "announce", announce)
    monkeypatch.setattr(compilation, "_report", reporting)
    return lines, announced, reported


def test_a_slow_compilation_is_announced_with_the_line_that_caused_it(said):
    lines, announced, _ = said
    names = {}
    inductor = str(Path(torch.__file__).parent / "_inductor" / "compile_fx.py")
    exec(compile(COMPILE, inductor, "exec"), names)
    with reported_compilation():
        names["compile_model"](announced.wait)  # the line
    [line] = lines
    number = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# the line" in text
    )
    assert line.endswith(f"has been compiling for {__file__}:{number}")


def test_a_compilation_that_begins_late_is_announced_once(said):
    lines, announced, reported = said
    names = {}
    triton = "/packages/triton/runtime/autotuner.py"  # measures which configuration is fastest
    exec(compile(COMPILE, triton, "exec"), names)
    with reported_compilation():
        assert reported.wait(60)  # nothing compiles yet
        assert not lines
        names["compile_model"](announced.wait)
    assert len(lines) == 1


def test_a_slow_step_that_compiles_nothing_is_not_announced(said):
    lines, _, reported = said
    with reported_compilation():
        assert reported.wait(60)
    assert not lines
