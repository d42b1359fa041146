"""What holds for every test: one thread, fixed examples in CI, nothing left behind."""

from __future__ import annotations

import os

# Before torch is imported: a process that forks workers must not have run an operation on several
# threads, or started CUDA.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from tests.leaks import adopt_orphans, nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)
adopt_orphans()
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield
