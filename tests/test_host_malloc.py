from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samestep as ss

ROOT = Path(__file__).parents[1]
PAGES = 50_000


def faults_of_fresh_tensors():
    """Return how many page faults it takes to make and free tensors of `PAGES` pages."""
    # alignment takes some bytes of the first holes, which fit when they have grown together
    for _ in range(10):
        tensors = torch.ones(PAGES * 1024)
        del tensors
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        tensors = torch.ones(PAGES * 1024)
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident_pages():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def measured():
    """Return the page faults before and during a run, and how many pages its end released."""
    usual = faults_of_fresh_tensors()
    with ss.init():
        kept = faults_of_fresh_tensors()
        held = resident_pages()
    return usual, kept, held - resident_pages()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has mallopt")
@pytest.mark.long
def test_memory_that_a_step_freed_is_there_for_the_next_one():
    # In a process of its own: what others did before decides which of malloc's arenas a process
    # takes large tensors from.
    done = subprocess.run(
        [sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True, check=True
    )
    usual, kept, given_back = map(int, done.stdout.split())
    assert usual >= 3 * PAGES
    assert kept < PAGES / 100
    assert given_back > 0.9 * PAGES


def kilobytes_of_its_own():
    """Return the private anonymous memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0])


def given_back_by_sharding():
    """Return the kilobytes that sharding releases, and the size of the parameters."""
    with ss.init() as run:
        model = run.replicate(torch.nn.Linear(2048, 8192))
        before = kilobytes_of_its_own()
        run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        return before - kilobytes_of_its_own(), sum(
            parameter.nbytes for parameter in model.parameters()
        ) // 1024


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim"
)
def test_parameters_that_move_leave_no_memory_behind():
    given_back, parameters = ss.launch(given_back_by_sharding, workers=2)
    assert given_back > 0.9 * parameters


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, measured())))
