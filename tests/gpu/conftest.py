"""The fixtures that run functions on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.simulated.gpus import CUDA_BUILD_SOURCE, SimulatedGpus, build


@pytest.fixture(scope="session")
def gpus(pytestconfig: pytest.Config) -> Iterator[SimulatedGpus]:
    """Yield four simulated devices; skip the test if they cannot be compiled."""
    simulated = SimulatedGpus(build(pytestconfig.cache.mkdir("simulated-gpus")))
    yield simulated
    simulated.close()


@pytest.fixture
def gpus_of_cuda_build(pytestconfig: pytest.Config) -> Iterator[SimulatedGpus]:
    """Yield the devices in a torch that has CUDA kernels, like the default build on Linux."""
    cache = pytestconfig.cache.mkdir("simulated-gpus")
    simulated = SimulatedGpus(build(cache), build(cache, CUDA_BUILD_SOURCE))
    yield simulated
    simulated.close()
