from __future__ import annotations

import pytest

from samestep.snapshot.remote import RemoteDirectory
from tests.snapshot.faulty import HASTY, URL, faulty_storage


@pytest.fixture
def far():
    with faulty_storage() as files:
        yield files


@pytest.fixture
def remote(far):
    return RemoteDirectory(URL, HASTY)
