"""What samestep's deterministic kernels cost, compared with torch's own kernels.

usage: python -m benchmarks.kernels [--device cpu] [--rounds 7]

Prints one row per operation: forward and backward in milliseconds, torch's and samestep's, their
ratio, and on a GPU the memory that each needs. Both take turns; torch's are not deterministic on
GPUs. Values are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from samestep.plugins.kernels import replaced_kernels

Function = Callable[[Tensor], Tensor]


def operations() -> dict[str, tuple[Function, tuple[int, ...]]]:
    """Return a function and the shape of its input by name, in sizes that models use."""
    labels = torch.randint(21, (4, 128, 128))
    targets = torch.randint(1, 40, (8, 30))
    steps, letters = torch.full((8,), 200), torch.full((8,), 30)
    grid = torch.rand(4, 64, 64, 2) * 2 - 1
    cells = torch.randint(1000, (100_000,))
    return {
        "cross entropy": (lambda x: F.cross_entropy(x, labels), (4, 21, 128, 128)),
        "CTC": (
            lambda x: F.ctc_loss(x.log_softmax(-1), targets, steps, letters),
            (200, 8, 40),
        ),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), (8, 128, 20, 20)),
        "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), (8, 128, 20, 20)),
        "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (2, 32, 16, 32, 32)),
        "max_pool3d": (lambda x: F.max_pool3d(x, 3, 2, 1), (2, 32, 16, 32, 32)),
        "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 2, 10), (8, 128, 20, 20)),
        "bilinear": (
            lambda x: torch.ops.aten.upsample_bilinear2d(x, [64, 64], False),
            (4, 64, 32, 32),
        ),
        "bicubic": (lambda x: F.interpolate(x, (64, 64), mode="bicubic"), (4, 64, 32, 32)),
        "antialias": (
            lambda x: F.interpolate(x, (16, 16), mode="bilinear", antialias=True),
            (4, 64, 32, 32),
        ),
        "reflection_pad2d": (lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), (4, 64, 64, 64)),
        "grid_sample": (lambda x: F.grid_sample(x, grid, align_corners=False), (4, 32, 64, 64)),
        "bincount": (lambda x: torch.bincount(cells, x.detach()), (100_000,)),
        "histc": (lambda x: torch.histc(x.detach(), 100, -3, 3), (1_000_000,)),
        "median": (lambda x: torch.median(x, 1).values, (1000, 100)),
        "kthvalue": (lambda x: torch.kthvalue(x, 5, 1).values, (1000, 100)),
        "cumprod": (lambda x: torch.cumprod(x.sigmoid(), 0), (100_000,)),
        "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), (100_000,)),
    }


def measured(function: Function, inputs: Tensor, *, replaced: bool) -> tuple[float, float]:
    """Return the milliseconds of forward and backward, and the bytes that they need on a GPU."""
    on_gpu = inputs.is_cuda
    with replaced_kernels(inputs.device.type.upper()) if replaced else nullcontext():
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        # CPU time does not contain that of other processes
        clock = time.perf_counter if on_gpu else time.process_time
        began = clock()
        output = function(inputs)
        if output.requires_grad:
            torch.autograd.grad(output.sum(), inputs)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = clock() - began
    return 1000 * seconds, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| operation | torch, ms | samestep, ms | ratio | torch, MB | samestep, MB |")
    print("|---|---|---|---|---|---|")
    with torch.device(options.device):
        cases = operations()
    for name, (function, shape) in cases.items():
        inputs = torch.randn(shape, device=options.device, requires_grad=True)
        rounds = [
            [measured(function, inputs, replaced=replaced) for replaced in (False, True)]
            for _ in range(options.rounds + 1)
        ][1:]  # the first one fills caches
        own, replaced = (statistics.median(r[i][0] for r in rounds) for i in (0, 1))
        ratio = statistics.median(second[0] / first[0] for first, second in rounds)
        megabytes = [max(r[i][1] for r in rounds) / 1e6 for i in (0, 1)]
        sizes = [f"{size:.1f}" if inputs.is_cuda else "" for size in megabytes]
        print(f"| {name} | {own:.2f} | {replaced:.2f} | {ratio:.1f} | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main()
