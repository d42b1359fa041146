"""Memory and time of a model that is sharded over the workers, beside FSDP2 and `run.shard`.

usage: python -m benchmarks.sharded [--rounds 5] [--workers 4] [--width 768] [--blocks 12]
           [--lanes 8] [--steps 5] [--contenders full zero1] [--simulate 1024]

Trains a transformer (109.6 M parameters by default) with fused AdamW on the workers of this host,
8 lanes of one text of 16 words. "full" is `run.replicate(shard="full")`, "step" the same with
`keep="step"`, "zero1" replicates and has `run.shard`, "fsdp2" is torch's own, over gloo, which
accumulates as many micro-batches without an exchange. The memory is the largest proportional set
size of a worker, sampled in a run of its own, and the CPU time is that of all threads of a worker.

With `--simulate`, it plans a step of that many workers instead (benchmarks.sharded_plan).
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks import sharded_plan, turns
from benchmarks.measure import figures

CONTENDERS: Final = ("full", "step", "zero1", "fsdp2")
WORDS: Final = 16
VOCABULARY: Final = 32_000
HEADS: Final = 12
WARM_UP: Final = 2  # steps
SAMPLE_SECONDS: Final = 0.05
ROWS: Final = {"cpu_s": "CPU s per step and worker", "wall_s": "seconds per step"}
NUMBERS: Final = {"rounds": 5, "workers": 4, "width": 768, "blocks": 12, "steps": 5, "lanes": 8}
SIZES: Final = ("width", "blocks", "steps", "lanes")  # those that a job gets


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [texts, words, width] from the same."""
        split = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + hidden


class Words(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits [texts, words, vocabulary]."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean loss of texts [texts, words + 1]."""
    (words,) = batch
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Peak:
    """The largest proportional set size of this process, in MiB, sampled by a thread."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def _sample(self) -> None:
        while True:
            text = Path("/proc/self/smaps_rollup").read_text()
            kib = next(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
            self.mib = max(self.mib, kib / 1024)
            time.sleep(SAMPLE_SECONDS)


class Clock:
    """Times steps after the first ones."""

    def __init__(self, what: str) -> None:
        self._what, self._peak = what, Peak()
        self.steps: list[tuple[float, float]] = []

    def step(self) -> None:
        """Note the beginning of a step, or the end of the last one."""
        self.steps.append((time.process_time(), time.perf_counter()))
        if len(self.steps) == WARM_UP and self._what == "memory":
            self._peak.start()

    def figures(self) -> dict[str, float]:
        """Return medians over steps, or the memory."""
        if self._what == "memory":
            return {"mib": self._peak.mib}
        pairs = list(zip(self.steps[WARM_UP:], self.steps[WARM_UP + 1 :], strict=False))
        return {
            "cpu_s": statistics.median(after[0] - before[0] for before, after in pairs),
            "wall_s": statistics.median(after[1] - before[1] for before, after in pairs),
        }


def texts(steps: int, lanes: int) -> Tensor:
    """Return words of all steps, [texts, words + 1]: one text per lane."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (steps * lanes, WORDS + 1), generator=generator)


def train(contender: str, clock: Clock, width: int, blocks: int, steps: int, lanes: int) -> None:
    """Train with samestep."""
    with ss.init(lanes=lanes, system_every=None) as run:
        model: nn.Module = Words(width, blocks)
        if contender == "zero1":
            model = run.replicate(model)
        else:
            keep: Any = "step" if contender == "step" else "forward"
            model = run.replicate(model, shard="full", units=(Block,), keep=keep)
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), fused=True))
        for batch in run.batches(TensorDataset(texts(steps, lanes)), lanes, epochs=1):
            clock.step()
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        clock.step()


def train_fsdp2(clock: Clock, width: int, blocks: int, steps: int, lanes: int) -> None:
    """Train with torch's FSDP2, each worker with its share of the lanes, one after the other."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    model: Any = Words(width, blocks)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for words in texts(steps, lanes).split(lanes):
        clock.step()
        own = words[rank::workers].split(1)
        for number, lane in enumerate(own):
            model.set_requires_gradient_sync(number == len(own) - 1)
            (loss_fn(model, [lane]) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.step()
    dist.destroy_process_group()


def measure(workers: int, contender: str, what: str, job: list[str]) -> dict[str, float]:
    """Return the figures of a training by several workers, as means over them."""
    start = turns.torchrun if contender == "fsdp2" else turns.samestep
    command = [*start(workers, "benchmarks.sharded"), f"--job={contender}", f"--what={what}"]
    return figures([*command, *job])


def main(arguments: list[str] | None = None) -> None:
    """Measure all contenders in turn, or be one worker of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--simulate", type=int, metavar="WORKERS")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in SIZES}
    if options.job:
        torch.set_num_threads(1)
        clock = Clock(options.what)
        if options.job == "fsdp2":
            train_fsdp2(clock, **sizes)
        else:
            train(options.job, clock, **sizes)
        print(*(f"{name}={value:.3f}" for name, value in clock.figures().items()), flush=True)
        return
    least = {"rounds": 1, "workers": 1, "steps": WARM_UP + 1, "lanes": options.workers}
    for name, number in least.items():
        if (value := getattr(options, name)) < number:
            why = f", of which {WARM_UP} are not measured" if name == "steps" else ""
            parser.error(f"--{name} must be at least {number}{why}, got {value}")
    if options.width < 1 or options.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}, the heads, got {options.width}")
    if options.simulate:
        model = Words(options.width, options.blocks)
        print(sharded_plan.report(model, model.blocks, WORDS, options.simulate), flush=True)
        return
    job, names = [f"--{name}={size}" for name, size in sizes.items()], options.contenders
    memory, timed = (
        turns.in_turn({n: partial(measure, options.workers, n, what, job) for n in names}, rounds)
        for what, rounds in (("memory", 1), ("time", options.rounds))
    )
    rows = {"MiB of a worker": turns.figure("mib", memory)}
    rows |= {title: turns.figure(name, timed) for name, title in ROWS.items()}
    print(turns.table(f"{options.workers} workers", rows), flush=True)


if __name__ == "__main__":
    main()
