"""What tests of runs compare with."""

from __future__ import annotations

import pytest

from tests.jobs import image_job, left_by


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what one worker leaves that trains the usual job to its end."""
    return left_by(image_job, tmp_path_factory.mktemp("undisturbed"), 1, lanes=8)
