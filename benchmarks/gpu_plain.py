"""The GPU benchmark's job as a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from benchmarks.gpu_job import Images, Job, Stopwatch, loss_of

Backward = Callable[[torch.Tensor, torch.Tensor], None]


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    model = job.network().to(job.device)
    job.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    on_gpu = job.device == "cuda"
    loader = DataLoader(
        Images(job), job.batch_size, shuffle=True, num_workers=job.loader_workers, pin_memory=on_gpu
    )

    def backward(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss = loss_of(model, images, labels)
        (loss / job.accumulate).backward()

    watch, replay = Stopwatch(job), None
    for images, labels in loader:
        images_there, labels_there = (
            tensor.to(job.device, non_blocking=on_gpu).chunk(job.accumulate)
            for tensor in (images, labels)
        )
        if job.graph and replay is None:
            replay = captured(backward, images_there[0], labels_there[0])
        for part in zip(images_there, labels_there, strict=True):
            (replay or backward)(*part)
        optimizer.step()
        # a graph adds to the gradients that it was captured with
        optimizer.zero_grad(set_to_none=not job.graph)
        if not watch.step():
            break
    print(watch.figures())


def captured(backward: Backward, images: torch.Tensor, labels: torch.Tensor) -> Backward:
    """Return `backward` as a CUDA graph, which adds to the same gradients at each replay.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    inputs = images.clone(), labels.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(*inputs)

    def replay(images: torch.Tensor, labels: torch.Tensor) -> None:
        inputs[0].copy_(images)
        inputs[1].copy_(labels)
        graph.replay()

    return replay


if __name__ == "__main__":
    main()
