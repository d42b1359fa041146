from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from samestep.step import exchange, overlap


@pytest.fixture(autouse=True)
def _limits_restored() -> Iterator[None]:
    """Undo what a body sets in its worker: a single one runs in the test's own process."""
    with (
        mock.patch.object(exchange, "BUCKET_BYTES", exchange.BUCKET_BYTES),
        mock.patch.object(overlap, "EARLY_BYTES", overlap.EARLY_BYTES),
    ):
        yield
