"""Requirements of tests on the system."""

from __future__ import annotations

import os
import shutil

import pytest


def needs(component: str, *, is_present: bool | None = None) -> None:
    """Skip the test if a system component is missing. In CI, which has all of them, fail it.

    `component` is the name of a command, or of anything else if its presence is passed as
    `is_present`.
    """
    if shutil.which(component) if is_present is None else is_present:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{component} is missing; CI must provide everything: install it in .ci/run")
    pytest.skip(f"{component} is missing")
