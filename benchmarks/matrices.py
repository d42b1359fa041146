"""A decoder with Muon or AdamW: updates divided between two workers, or made by both.

usage: python -m benchmarks.matrices [--rounds 5] [--optimizer muon] [--width 128] [--layers 2]

With Muon, AdamW updates embeddings, biases and norms. Peers are DDP, with AdamW also ZeRO-1, which
are fused. Runs take turns, and every ratio compares runs of one round. State is that of all
optimizers in one worker. Muon: https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep as ss
from benchmarks.contenders.stopwatch import Stopwatch, keep, over_workers
from benchmarks.jobs.job import BATCHES_AN_EPOCH, Job, Parts
from benchmarks.measure import figures, spread
from benchmarks.turns import in_turn, samestep, torchrun

WORKERS: Final = 2
WORDS, LENGTH, BATCH_SIZE = 512, 64, 16
CONTENDERS: Final = {
    "samestep": samestep(WORKERS, "benchmarks.matrices", "--train", "samestep"),
    "samestep, not sharded": samestep(WORKERS, "benchmarks.matrices", "--train", "replicated"),
    "DDP": torchrun(WORKERS, "benchmarks.matrices", "--train", "ddp"),
    "DDP, ZeRO-1": torchrun(WORKERS, "benchmarks.matrices", "--train", "zero1"),  # AdamW only
}
UNITS: Final = {
    "samples_a_second": "samples/s",
    "state_megabytes": "MB of state per worker",
    "memory_megabytes": "MB of memory per worker",
}


class Decoder(nn.Module):
    """A transformer with a causal mask, from tokens int64 [batch, length] to scores of words."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, length, words]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        features = self.words(tokens)
        for block in self.blocks:
            features = block(features, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(features)
        return scores


def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next words."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build(width: int = 128, layers: int = 2, length: int = LENGTH) -> Parts:
    """Return the job's parts."""
    torch.manual_seed(0)
    model = Decoder(width, layers)
    tokens = torch.randint(WORDS, (BATCHES_AN_EPOCH * BATCH_SIZE, length + 1))
    return Parts(model, TensorDataset(tokens), loss_fn)


def optimizers_of(model: Decoder, kind: str) -> dict[str, torch.optim.Optimizer]:
    """Return AdamW, or Muon for the matrices of the blocks and AdamW for all other parameters."""
    if kind == "adamw":
        return {"adamw": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)}
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    ids = {*map(id, matrices)}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    adamw = torch.optim.AdamW(others, lr=1e-3, fused=True)
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": adamw}


def megabytes(states: Iterable[Mapping[Any, Mapping[str, Any]]]) -> float:
    """Return the size of the state of optimizers."""
    values = [value for state in states for of_one in state.values() for value in of_one.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 1e6


def train_with_samestep(job: Job, kind: str, *, is_sharded: bool) -> dict[str, float]:
    """Train, and return figures of this worker."""
    with ss.init() as run:  # one lane per worker
        model, dataset, job_loss = job.build()
        model = run.replicate(model)
        optimizers = optimizers_of(model, kind)
        if is_sharded:
            optimizers = {name: run.shard(each) for name, each in optimizers.items()}
        run.track(model=model, **optimizers)
        watch = Stopwatch(job)
        for batch in run.batches(dataset, job.batch_size, steps=watch.steps):
            means = run.backward(job_loss, model, batch)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            watch.step(means["loss"])
        shards = run._lanes.shards  # noqa: SLF001  a script cannot read this state
        states = [each.contents.state for each in shards]
        states = states or [each.state for each in optimizers.values()]
        return {**watch.figures(), "state_megabytes": megabytes(states)}


def train_with_ddp(job: Job, kind: str, *, has_zero: bool) -> dict[str, float]:
    """Train, and return figures of this worker."""
    dist.init_process_group("gloo")
    replica, dataset, job_loss = job.build()
    optimizers = [*optimizers_of(replica, kind).values()]
    if has_zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

        options: dict[str, Any] = {"lr": 1e-3, "fused": True}
        zero = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, **options)
        optimizers = [zero]
    model = DistributedDataParallel(replica, gradient_as_bucket_view=True)
    keep(model)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, job.batch_size // dist.get_world_size(), sampler=sampler)
    watch = Stopwatch(job)
    for epoch in watch.epochs():
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = job_loss(model, batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if watch.step(loss):
                break
    measured = {**watch.figures(), "state_megabytes": megabytes(map(state_of, optimizers))}
    means = over_workers(measured)
    dist.destroy_process_group()
    return means


def state_of(optimizer: Any) -> Mapping[Any, Mapping[str, Any]]:
    """Return the state in this worker."""
    state: Mapping[Any, Mapping[str, Any]] = getattr(optimizer, "optim", optimizer).state
    return state


TRAINERS: Final = {
    "samestep": partial(train_with_samestep, is_sharded=True),
    "replicated": partial(train_with_samestep, is_sharded=False),
    "ddp": partial(train_with_ddp, has_zero=False),
    "zero1": partial(train_with_ddp, has_zero=True),
}


def main() -> None:
    """Run the comparison, or train as one of its workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrices")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--train", choices=TRAINERS, help="train as a worker of this contender")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--width", type=int, default=128, help="of the decoder (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="of the decoder (default: 2)")
    options = parser.parse_args()
    size = f"{options.layers} layers of width {options.width}"
    make = partial(build, options.width, options.layers)
    job = Job(f"a decoder of {size}", BATCH_SIZE, steps=10, build=make)
    if options.train:
        measured = TRAINERS[options.train](job, options.optimizer)
        print(" ".join(f"{name}={value}" for name, value in measured.items()), flush=True)
        return
    more = [f"--{name}={getattr(options, name)}" for name in ("optimizer", "width", "layers")]
    contenders = {
        name: partial(figures, [*command, *more])
        for name, command in CONTENDERS.items()
        if options.optimizer == "adamw" or name != "DDP, ZeRO-1"
    }
    measurements = in_turn(contenders, options.rounds)
    print(f"{job.title}, {WORKERS} workers, {options.optimizer}, {options.rounds} rounds")
    peers = measurements["DDP"]
    for name, runs in measurements.items():
        for figure, unit in UNITS.items():
            ratios = [run[figure] / peer[figure] for run, peer in zip(runs, peers, strict=True)]
            values = spread([run[figure] for run in runs])
            print(f"  {name:21} {values} {unit}, ratio to DDP {spread(ratios)}", flush=True)


if __name__ == "__main__":
    main()
