"""Tests of a real GPU: `make test-gpu`. TEST_DEVICE=cpu tries the tests themselves without one."""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():  # as a run on GPUs sets it, for the rest of the process
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
