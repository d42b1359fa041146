"""The job of the GPU benchmark with lanes as CUDA graphs."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from benchmarks import gpu, gpu_samestep
from benchmarks.gpu_job import WARMUP_STEPS
from tests.gpu.test_lane_graph import counted


def measured(contender):
    """Train as a contender of the benchmark; return how often graphs were replayed."""
    vars(torch.cuda).update(_sleep=lambda cycles: None, max_memory_allocated=lambda: 0)
    torch.cuda.Event.elapsed_time = lambda begin, end: 1.0
    os.environ["SAMESTEP_LANES"] = contender.options[contender.options.index("--lanes") + 1]
    sys.argv = ["gpu_samestep", "--seconds", "0", *contender.flags]
    with counted() as replays:
        gpu_samestep.main()
    return len(replays)


@pytest.mark.long
def test_contenders_with_graphs_measure_graphs(gpus):
    contenders = {each.title: each for each in gpu.EAGER if each.title.endswith("CUDA graphs")}
    assert {f"samestep, {lanes} lanes, CUDA graphs" for lanes in (4, 8)} < contenders.keys()
    replays = gpus.call(measured, contenders["samestep, 4 lanes, CUDA graphs"])
    assert "samples_a_second=" in gpus.printed
    # all lanes of each step from the fourth one on
    assert replays >= 4 * (WARMUP_STEPS + 1 - 3)
