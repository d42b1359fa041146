"""What a test needs of the system."""

from __future__ import annotations

import os
import shutil

import pytest


def needs(component: str, *, found: bool | None = None) -> None:
    """Skip the test where a system component is missing; fail it in CI, which has all of them.

    `component` is a command that is looked up, or what to call something whose presence is given as
    `found`.
    """
    if found if found is not None else shutil.which(component):
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{component} is missing; CI has all that tests need: install it in .ci/run")
    pytest.skip(f"{component} is missing")
