"""Tests of a real GPU: `make test-gpu`. TEST_DEVICE=cpu tries the tests themselves without one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Return "cuda", or skip the test if torch finds no GPU."""
    device = os.environ.get("TEST_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(
            "torch finds no GPU; tests see those of CUDA_VISIBLE_DEVICES, which make test-gpu sets."
            " TEST_DEVICE=cpu tries this test without a GPU"
        )
    return device
