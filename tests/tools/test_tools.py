"""Helpers of several commands."""

from __future__ import annotations

import pytest

from samestep.errors import RecordError
from samestep.tools import format_bytes, read_run


def test_a_script_without_a_run_must_call_init(tmp_path):
    with pytest.raises(RecordError, match=r"did not start a run; it must call samestep\.init"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**45, "32 TiB")],
)
def test_bytes_have_a_unit(count, text):
    assert format_bytes(count) == text
