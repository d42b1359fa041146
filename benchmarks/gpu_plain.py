"""The GPU benchmark's job as a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from benchmarks.gpu_job import Job, Samples, Stopwatch, loss_of

Backward = Callable[[torch.Tensor, torch.Tensor], None]


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    model = job.network().to(job.device)
    job.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    on_gpu = job.device == "cuda"
    loader = DataLoader(
        Samples(job),
        job.batch_size,
        shuffle=True,
        num_workers=job.loader_workers,
        pin_memory=on_gpu,
    )

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss = loss_of(model, inputs, targets)
        (loss / job.accumulate).backward()

    watch, replay = Stopwatch(job), None
    for inputs, targets in loader:
        inputs_there, targets_there = (
            tensor.to(job.device, non_blocking=on_gpu).chunk(job.accumulate)
            for tensor in (inputs, targets)
        )
        if job.graph and replay is None:
            replay = captured(backward, inputs_there[0], targets_there[0])
        for part in zip(inputs_there, targets_there, strict=True):
            (replay or backward)(*part)
        optimizer.step()
        # a graph adds to the gradients that it was captured with
        optimizer.zero_grad(set_to_none=not job.graph)
        if not watch.step():
            break
    print(watch.figures())


def captured(backward: Backward, inputs: torch.Tensor, targets: torch.Tensor) -> Backward:
    """Return `backward` as a CUDA graph, which adds to the same gradients at each replay.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    fixed = inputs.clone(), targets.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward(*fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(*fixed)

    def replay(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        fixed[0].copy_(inputs)
        fixed[1].copy_(targets)
        graph.replay()

    return replay


if __name__ == "__main__":
    main()
