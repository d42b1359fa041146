"""The jobs and the stopwatch of the GPU benchmark: models on random images, or on random tokens."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from recipes.gpt.config import ModelSettings as DecoderSettings
from recipes.gpt.model import Decoder
from recipes.vit.config import ModelSettings
from recipes.vit.model import VisionTransformer

Settings = ModelSettings | DecoderSettings
MODELS: dict[str, Settings] = {
    "ViT-Ti/16": ModelSettings(size="tiny"),  # both on 224x224 images
    "ViT-S/16": ModelSettings(size="small"),
    # the smallest GPT-2, in the shape of Llama
    "GPT-2": DecoderSettings(width=768, depth=12, heads=12),
    # to test the benchmark itself
    "tiny": ModelSettings(width=32, depth=2, heads=2, image_size=32, classes=10),
}
VOCABULARY, WORDS = 50_257, 1024  # of GPT-2's rows
DISTINCT_SAMPLES = 512
SAMPLES = 1_000_000
WARMUP_STEPS = 8
PARTS = 5  # steps of each kind whose launch and computation are timed apart
BUSY_CYCLES = 600_000_000  # of the GPU's clock: about 0.3 s
LAUNCHES = 500  # fewer than a GPU's queue holds


@dataclass(frozen=True)
class Job:
    """The model and the seconds to train.

    `compiled` is a mode of torch.compile, or "no". `accumulate` is the number of parts of a batch
    whose gradients a plain loop adds up; with `graph` it replays each as a CUDA graph, and samestep
    each lane. Without samestep, `deterministic` sets what samestep's option of that name sets.
    """

    model: str
    device: str
    batch_size: int
    seconds: float
    precision: str
    compiled: str
    loader_workers: int
    accumulate: int
    graph: bool
    deterministic: bool

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
        parser.add_argument("--accumulate", type=int, default=1)
        parser.add_argument("--graph", action="store_true")
        parser.add_argument("--deterministic", action="store_true")
        job = cls(**vars(parser.parse_args()))
        if job.device == "cpu":
            torch.set_num_threads(1)  # as samestep does
        if job.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            torch.use_deterministic_algorithms(mode=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return job

    def network(self) -> VisionTransformer | Decoder:
        """Return the model on the CPU, always the same."""
        torch.manual_seed(0)
        settings = MODELS[self.model]
        if isinstance(settings, DecoderSettings):
            return Decoder(settings, VOCABULARY)
        return VisionTransformer(settings)

    def compile(self, network: VisionTransformer | Decoder) -> None:
        """Compile the blocks in place. They are alike, so one compilation serves all."""
        if self.compiled != "no":
            for block in network.layers if isinstance(network, Decoder) else network.blocks:
                block.compile(mode=self.compiled, dynamic=False)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A few random samples, repeated: images, uint8 [3, size, size], and labels, or tokens.

    Those are int64 [words], with as many targets.
    """

    def __init__(self, job: Job) -> None:
        generator, settings = torch.Generator().manual_seed(1), MODELS[job.model]
        if isinstance(settings, DecoderSettings):
            shape = (DISTINCT_SAMPLES, WORDS + 1)
            tokens = torch.randint(VOCABULARY, shape, generator=generator)
            self._inputs, self._targets = tokens[:, :-1], tokens[:, 1:]
        else:
            shape = (DISTINCT_SAMPLES, 3, settings.image_size, settings.image_size)
            self._inputs = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            self._targets = torch.arange(DISTINCT_SAMPLES) % settings.classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index % DISTINCT_SAMPLES], self._targets[index % DISTINCT_SAMPLES]


def loss_of(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of images [batch, 3, height, width], or tokens [batch, words]."""
    if inputs.dtype == torch.uint8:
        return F.cross_entropy(network(inputs.float().div(127.5).sub(1)), targets)
    return F.cross_entropy(network(inputs).float().flatten(0, 1), targets.flatten())


class Stopwatch:
    """Time the steps after the warm-up, and then what a step costs the host and the GPU apart.

    After the timed steps come `PARTS` steps that begin with an idle GPU, which give the time that
    the host takes to launch a step, and as many that begin with a GPU that is kept busy until the
    host is ahead, which give the time that the GPU computes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps = 0
        self._started = self._seconds = 0.0
        self._timed = 0  # steps, set when their time is over
        self._parts: list[float] = []  # seconds of single steps, launch times first
        self._begun_at = 0.0
        self._begun: torch.cuda.Event | None = None

    def step(self) -> bool:
        """Count a step; returns False when the time is over."""
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._started = self._now()
        if self._steps <= WARMUP_STEPS or (
            not self._timed and time.perf_counter() - self._started < self._job.seconds
        ):
            return True
        if not self._timed:
            self._timed = self._steps - WARMUP_STEPS
            self._seconds = self._now() - self._started
            if self._job.device == "cpu":
                return False
        elif self._begun is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            end.synchronize()
            self._parts.append(self._begun.elapsed_time(end) / 1000)
        else:
            self._parts.append(time.perf_counter() - self._begun_at)
        if len(self._parts) == 2 * PARTS:
            return False
        self._begun_at = self._now()
        if len(self._parts) >= PARTS:
            torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 (torch's tests use it in the same way)
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        return True

    def figures(self) -> str:
        """Return samples per second, the peak gigabytes on the GPU, and milliseconds of a step."""
        speed = self._timed * self._job.batch_size / self._seconds
        figures = {"samples_a_second": speed, "gigabytes": 0.0}
        if self._job.device == "cuda":
            launch, compute = self._parts[:PARTS], self._parts[PARTS:]
            figures |= {
                "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
                "launch_ms": 1000 * statistics.median(launch),
                "gpu_ms": 1000 * statistics.median(compute),
                "us_a_launch": 1e6 * _seconds_of_a_launch(),
            }
        return " ".join(f"{name}={value:.2f}" for name, value in figures.items())

    def _now(self) -> float:
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _seconds_of_a_launch() -> float:
    """Return how long this host takes to launch a small kernel: it varies between processes."""
    value = torch.zeros(8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            value.add_(1)
        times.append((time.perf_counter() - began) / LAUNCHES)
    return statistics.median(times)
