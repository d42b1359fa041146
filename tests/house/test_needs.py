from __future__ import annotations

import pytest

from tests.needs import needs


def test_with_a_component_that_is_found_the_test_continues(monkeypatch):
    monkeypatch.setenv("CI", "true")  # where it fails, and is not skipped, if it does not continue
    needs("sh")
    needs("the Moon", is_present=True)


def test_a_missing_component_skips_the_test_and_fails_it_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-command is missing"):
        needs("no-such-command")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="the Moon is missing"):
        needs("the Moon", is_present=False)
