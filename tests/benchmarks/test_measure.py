from __future__ import annotations

import sys

import pytest

from benchmarks import measure
from benchmarks.measure import figures, spread


def python(code):
    return [sys.executable, "-c", code]


def test_figures_are_read_from_what_a_command_prints():
    assert figures(python("print('hello'); print('a=1.5 b_c=2')")) == {"a": 1.5, "b_c": 2.0}


def test_figures_of_several_workers_are_averaged():
    assert figures(python("print('a=1 b=5'); print('a=2 b=5')")) == {"a": 1.5, "b": 5.0}


def test_figures_that_were_printed_before_a_failure_count():
    assert figures(python("print('a=1'); raise OSError('no luck')")) == {"a": 1.0}


@pytest.mark.parametrize(
    "code", ["raise OSError('no luck')", "import sys; print('no luck', file=sys.stderr)"]
)
def test_a_command_that_prints_no_figures_ends_the_benchmark(code):
    with pytest.raises(SystemExit, match=r"(?s)failed:.*no luck"):
        figures(python(code))


def test_a_command_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(measure, "LIMIT_SECONDS", 0.2)
    with pytest.raises(SystemExit, match=r"still ran after 0\.2 seconds"):
        figures(python("import time; time.sleep(1000)"))


def test_a_spread_is_a_median_with_its_range():
    assert spread([3.0, 1.0, 2.5]).strip() == "2.50 (1.00 to 3.00)"
