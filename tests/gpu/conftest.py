"""The fixture that runs functions on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.simulated.gpus import SimulatedGpus, build


@pytest.fixture(scope="session")
def gpus(pytestconfig: pytest.Config) -> Iterator[SimulatedGpus]:
    """Yield four simulated devices; skip the test if they cannot be compiled."""
    simulated = SimulatedGpus(build(pytestconfig.cache.mkdir("simulated-gpus")))
    yield simulated
    simulated.close()
