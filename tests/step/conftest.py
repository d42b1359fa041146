from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from torch.autograd import Variable

from samestep.step import exchange, overlap


@pytest.fixture(autouse=True)
def _limits_restored() -> Iterator[None]:
    """Undo what a body sets in its worker: a single one runs in the test's own process."""
    with (
        mock.patch.object(exchange, "BUCKET_BYTES", exchange.BUCKET_BYTES),
        mock.patch.object(overlap, "EARLY_BYTES", overlap.EARLY_BYTES),
    ):
        yield


@pytest.fixture(autouse=True)
def _engine_restored():
    """Restore autograd's engine, which a single worker in this process watches."""
    engine = Variable._execution_engine
    yield
    Variable._execution_engine = engine
