"""The job and the stopwatch of the GPU benchmark: Vision Transformers on random images."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from recipes.vit.config import ModelSettings
from recipes.vit.model import VisionTransformer

MODELS = {
    "ViT-Ti/16": ModelSettings(size="tiny"),  # both on 224x224 images
    "ViT-S/16": ModelSettings(size="small"),
    # to test the benchmark itself
    "tiny": ModelSettings(width=32, depth=2, heads=2, image_size=32, classes=10),
}
DISTINCT_IMAGES = 512
SAMPLES = 1_000_000
WARMUP_STEPS = 8


@dataclass(frozen=True)
class Job:
    """The model and the seconds to train; `compiled` is a mode of torch.compile, or "no"."""

    model: str
    device: str
    batch_size: int
    seconds: float
    precision: str
    compiled: str
    loader_workers: int

    @classmethod
    def from_arguments(cls) -> Job:
        """Read the job from the process's arguments."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", choices=MODELS, default="tiny")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--batch-size", type=int, default=32)
        parser.add_argument("--seconds", type=float, default=2.0)
        parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
        parser.add_argument(
            "--compiled", choices=("no", "default", "reduce-overhead"), default="no"
        )
        parser.add_argument("--loader-workers", type=int, default=0)
        job = cls(**vars(parser.parse_args()))
        if job.device == "cpu":
            torch.set_num_threads(1)  # as samestep does
        return job

    def network(self) -> VisionTransformer:
        """Return the model on the CPU, always the same."""
        torch.manual_seed(0)
        return VisionTransformer(MODELS[self.model])

    def compile(self, network: VisionTransformer) -> None:
        """Compile the blocks in place. They are alike, so one compilation serves all."""
        if self.compiled != "no":
            for block in network.blocks:
                block.compile(mode=self.compiled, dynamic=False)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """A few random images, uint8 [3, size, size], with labels, repeated."""

    def __init__(self, job: Job) -> None:
        settings = MODELS[job.model]
        generator = torch.Generator().manual_seed(1)
        shape = (DISTINCT_IMAGES, 3, settings.image_size, settings.image_size)
        self._images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self._classes = settings.classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index % DISTINCT_IMAGES], index % self._classes


def loss_of(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of images [batch, 3, height, width], uint8."""
    return F.cross_entropy(network(images.float().div(127.5).sub(1)), labels)


class Stopwatch:
    """Time the steps after the warm-up, with all of the GPU's work in them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps = 0
        self._started = 0.0

    def step(self) -> bool:
        """Count a step; returns False when the time is over."""
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._started = self._now()
        return (
            self._steps <= WARMUP_STEPS or time.perf_counter() - self._started < self._job.seconds
        )

    def figures(self) -> str:
        """Return images per second, and the peak gigabytes of tensors on the GPU."""
        seconds = self._now() - self._started
        speed = (self._steps - WARMUP_STEPS) * self._job.batch_size / seconds
        gigabytes = torch.cuda.max_memory_allocated() / 1e9 if self._job.device == "cuda" else 0.0
        return f"images_a_second={speed:.1f} gigabytes={gigabytes:.2f}"

    def _now(self) -> float:
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
