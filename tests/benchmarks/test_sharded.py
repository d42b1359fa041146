"""The benchmark of sharded models refuses sizes of which nothing could be measured."""

from __future__ import annotations

import pytest

from benchmarks import sharded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps must be at least 3, of which 2 are not measured, got 1"),
        (["--steps", "2"], "--steps must be at least 3, of which 2 are not measured, got 2"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--workers", "4", "--lanes", "3"], "--lanes must be at least 4, got 3"),
        (["--width", "100"], "--width must be a multiple of 12, the heads, got 100"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        sharded.main(arguments)
    assert message in capsys.readouterr().err
