from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

import samestep as ss
from tests.workers import run_workers

PAGES = 50_000  # more than lies free in any process that runs tests


def faults_of_fresh_tensors():
    """Return how many pages the kernel had to bring while tensors as large as `PAGES` came and went again."""
    for _ in range(3):
        tensors = torch.ones(PAGES * 1024)
        del tensors
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        tensors = torch.ones(PAGES * 1024)
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident_pages():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has mallopt")
def test_memory_that_a_step_freed_is_there_for_the_next_one():
    def body():
        usual = faults_of_fresh_tensors()
        with ss.init():
            kept = faults_of_fresh_tensors()
            held = resident_pages()
        return usual, kept, held - resident_pages()

    ((usual, kept, given_back),) = run_workers(body, 1)
    assert usual >= 3 * PAGES
    assert kept < PAGES / 100
    assert given_back > 0.9 * PAGES
