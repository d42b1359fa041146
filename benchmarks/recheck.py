"""Flipped bits that `recheck_every` finds, alarms without a fault, and what checks cost.

usage: python -m benchmarks.recheck [--flips 1000] [--steps 10000] [--checks 40]

- Flips: three workers check a lane in every step. In each trial, one bit is flipped on one of them:
  of activations or gradients, in one pass or in all of them, of a parameter, or of the optimizer's
  state; and of the slice whose update is checked, before the update or after it.
  Whether a flip changed the checked lane is known from hashes of the same lane without it, and
  whether it changed an update from the same update without it. Every flip that did must be found
  before the update, or before a snapshot, and only that worker be named.
- Alarms: ten jobs train for `--steps` steps each on two or three workers, with a check of a lane
  and, if the optimizer is sharded, of an update in every step.
- Cost: two workers with two lanes each train, and steps with a check are compared with the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import cycle
from random import Random
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks.jobs import JOBS
from benchmarks.jobs.job import LEARNING_RATE, Job
from samestep.errors import DivergenceError, RecheckError
from samestep.plugins.recheck import LaneCheck
from samestep.plugins.update_check import UpdateCheck
from samestep.step import shard
from samestep.step.exchange import all_gather

WORKERS: Final = 3
LANES: Final = 6
BATCH: Final = 24
EVERY: Final = 5  # steps between the checks whose cost is measured
IN_LANES: Final = ("activations", "gradients", "parameters")
IN_UPDATES: Final = ("slice before its update", "slice after its update")  # sharded optimizers
PLACES: Final = (*IN_LANES, "optimizer state", *IN_UPDATES)
COMPARE: Final = LaneCheck.compare
COMPARE_UPDATES: Final = UpdateCheck._compare  # noqa: SLF001


class Net(nn.Module):
    """A small classifier that draws no random numbers and has no buffers, as a trial needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.first(points))))


def points(size: int) -> TensorDataset:
    """Return random points float32 [size, 16] of ten classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (size,), generator=generator)
    return TensorDataset(torch.randn(size, 16, generator=generator), labels)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy of a lane batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def bytes_of(states: Any) -> bytes:
    """Return the bytes of all tensors in nested dicts and lists."""
    if isinstance(states, Tensor):
        return states.detach().numpy().tobytes()
    parts = states.values() if isinstance(states, dict) else states
    return b"".join(map(bytes_of, parts)) if isinstance(states, (dict, list)) else b""


class Flip:
    """A bit to flip on one worker. All workers draw the same ones."""

    def __init__(self, trial: int) -> None:
        random = Random(trial)
        self.place, self.rank = PLACES[trial % len(PLACES)], random.randrange(WORKERS)
        self.is_sticky = random.random() < 0.5
        self.in_pass = random.randrange(LANES // WORKERS + 1)  # the number of a worker's pass
        self.element, self.bit = random.random(), random.randrange(32)
        self.passes = 0

    def flip(self, tensor: Tensor) -> None:
        """Flip the bit in place, which torch does not see, as it would see a change by code."""
        words = tensor.detach().view(-1).view(torch.int32).numpy().view("uint32")
        words[int(self.element * len(words))] ^= 1 << self.bit

    def flipped(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a pass, with the bit flipped if it is in this pass."""
        number, self.passes = self.passes, self.passes + 1
        if not (self.is_sticky or number == self.in_pass):
            return tensor
        tensor = tensor.clone()
        self.flip(tensor)
        return tensor

    @contextmanager
    def acting(self, model: Net) -> Iterator[None]:
        """Flip the bit on this worker in the block."""
        if self.place == "parameters":
            self.flip(model.first.weight)
            yield
            self.flip(model.first.weight)
            return
        if self.place == "activations":
            hook = model.first.register_forward_hook(lambda *of: self.flipped(of[-1]))
        else:
            hook = model.head.weight.register_hook(self.flipped)
        yield
        hook.remove()


class Trials:
    """The trials of one worker; `counts` has their outcomes by place."""

    def __init__(self, run: ss.Run) -> None:
        self.run, self.counts = run, Counter[tuple[str, str]]()
        self._hashes: list[Any] = []  # of the last check: first and repeated
        self._model = run.replicate(Net())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        run.track(model=self._model, optimizer=self._optimizer)
        self._divided = run.replicate(Net())
        parameters = self._divided.parameters()
        self._sharded = run.shard(torch.optim.SGD(parameters, lr=0.01, momentum=0.9))
        self._contents = run._lanes.shards[0].contents  # noqa: SLF001

    def compared(self, check: LaneCheck, reports: Any) -> None:
        """Do what `LaneCheck.compare` does, and keep what it compares."""
        self._hashes = [reports[check.owner]["first"], reports[check.checker]["again"]]
        COMPARE(check, reports)

    def train(self, trials: int) -> None:
        """Make a trial per step, after a first step."""
        for batch in self.run.batches(points(8 * BATCH), BATCH, steps=trials + 1):
            flip = Flip(self.run.step - 1) if self.run.step else None
            if flip is None:
                self._update(batch)
            elif flip.place in IN_UPDATES:
                self._try_update(flip, batch)
            if flip is not None and flip.place in IN_LANES:
                self._try_lanes(flip, batch)
            self.run.backward(loss_fn, self._model, batch)
            if flip is not None and flip.place == "optimizer state":
                self._try_state(flip)
            else:
                self._optimizer.step()
            self._optimizer.zero_grad()

    def _try_lanes(self, flip: Flip, batch: Any) -> None:
        """Compute the gradient without a fault, and then with one."""
        self.run.backward(loss_fn, self._model, batch)
        expected = self._hashes[0]
        self._model.zero_grad()
        error = None
        with flip.acting(self._model) if self.run.rank == flip.rank else nullcontext():
            try:
                self.run.backward(loss_fn, self._model, batch)
            except RecheckError as raised:
                error = raised
                if any(parameter.grad is not None for parameter in self._model.parameters()):
                    raise SystemExit("gradients were left after an error") from raised
        self._model.zero_grad()
        is_changed = any(hashes != expected for hashes in self._hashes)
        is_right = error is not None and error.is_certain and error.ranks == (flip.rank,)
        self._count(flip, is_changed=is_changed, is_found=error is not None, is_right=is_right)

    def _update(self, batch: Any, flip: Flip | None = None) -> RecheckError | None:
        """Update the slices of all workers, with a flip in that of one; return the error."""
        (segments,) = self._contents.updated  # of this worker

        def act(place: str) -> None:
            if flip is not None and flip.place == place:
                for segment in segments:
                    flip.flip(segment)

        def gather(*arguments: Any) -> None:
            act(IN_UPDATES[1])
            all_gather(*arguments)

        self.run.backward(loss_fn, self._divided, batch)
        act(IN_UPDATES[0])
        try:
            with patch.object(shard, "all_gather", gather):  # before parameters are sent
                self._sharded.step()
        except RecheckError as error:
            return error
        return None

    def _slices(self) -> list[Tensor]:
        """Return this worker's slices of the parameters and of the state."""
        (segments,) = self._contents.updated
        buffers = [self._contents.state[segment]["momentum_buffer"] for segment in segments]
        return [tensor.detach() for tensor in (*segments, *buffers)]

    def _try_update(self, flip: Flip, batch: Any) -> None:
        """Make an update with a flip on the worker whose slice is checked, and then without one."""
        tensors = [*self._divided.state_dict().values(), *self._slices()]
        before = [tensor.clone() for tensor in tensors]
        flip.rank = self.run.step % WORKERS
        error = self._update(batch, flip if self.run.rank == flip.rank else None)
        changed = bytes_of(self._slices())
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        self._update(batch)  # without a check: each optimizer has one in a step
        is_changed = changed != bytes_of(self._slices())  # the update may round a flip off
        is_changed = self.run.all_gather(is_changed)[flip.rank]
        is_right = error is not None and error.is_certain and error.ranks == (flip.rank,)
        self._count(flip, is_changed=is_changed, is_found=error is not None, is_right=is_right)

    def _try_state(self, flip: Flip) -> None:
        """Make an update with other state on a worker, and compare as at the end of the step."""
        if self.run.rank == flip.rank:
            flip.flip(self._optimizer.state[self._model.first.weight]["momentum_buffer"])
        self._optimizer.step()
        divergence, text = self.run._session.divergence, ""  # noqa: SLF001
        divergence.expire()
        try:
            divergence.compare(self.run.step)
        except DivergenceError as error:
            text = str(error)
        is_right = f"worker {flip.rank} (" in text and "differs from the majority" in text
        states = self.run.all_gather([self._optimizer.state_dict(), self._model.state_dict()])
        right = states[(flip.rank + 1) % WORKERS]
        # the update rounds, so that the lowest bits of the state before it may have no effect
        is_changed = bytes_of(states[flip.rank]) != bytes_of(right)
        self._count(flip, is_changed=is_changed, is_found=bool(text), is_right=is_right)
        self._optimizer.load_state_dict(right[0])
        self._model.load_state_dict(right[1])

    def _count(self, flip: Flip, *, is_changed: bool, is_found: bool, is_right: bool) -> None:
        outcomes = {
            "flips": True,
            "changed": is_changed,
            "found": is_changed and is_found,
            "named": is_changed and is_right,
            "false": is_found and not is_changed,
        }
        for name, happened in outcomes.items():
            self.counts[flip.place, name] += happened


def flips(trials: int) -> dict[tuple[str, str], int]:
    """Make trials as one of three workers; return the number of each outcome."""
    options: dict[str, Any] = {"lanes": LANES, "recheck_every": 1, "nonfinite_loss": "continue"}
    with ss.init(**options) as run:
        work = Trials(run)

        def compared(check: LaneCheck, reports: Any) -> None:
            work.compared(check, reports)

        with patch.object(LaneCheck, "compare", compared):
            work.train(trials)
    return dict(work.counts)


def print_flips(trials: int) -> None:
    """Make all trials and print a table. Exits if a flip was not found, or another one blamed."""
    counts = ss.launch(flips, trials, workers=WORKERS)
    print("| bit flipped in | flips | changed what is compared | found | right worker | false |")
    print("|---|---|---|---|---|---|")
    for place in PLACES:
        row = [counts[place, name] for name in ("flips", "changed", "found", "named", "false")]
        print(f"| {place} | {' | '.join(map(str, row))} |", flush=True)
        _, changed, found, named, false = row
        if not changed == found == named or false:
            raise SystemExit(f"flips in {place} were not found, or wrong workers named")


class Alarms(NamedTuple):
    """A job without faults: its model, the dtypes it computes and sends in, and its workers."""

    build: Callable[[], nn.Module]
    is_sharded: bool = False
    workers: int = 2
    options: Mapping[str, str] = {}
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    streams: bool = False


def dense() -> nn.Module:
    """Return linear layers with dropout and BatchNorm, for inputs float32 [rows, 16]."""
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 10)
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Return a convolution with BatchNorm, which sees the inputs as pictures [rows, 1, 4, 4]."""
    layers = nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def attention() -> nn.Module:
    """Return a transformer with dropout, which sees the inputs as tokens [rows, 4, 4]."""
    layer = nn.TransformerEncoderLayer(4, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), layer, nn.Flatten(), nn.Linear(16, 10))


ALARMS: Final = {
    "replicated": Alarms(dense),
    "sharded": Alarms(dense, is_sharded=True),
    "streams": Alarms(dense, streams=True),
    "three workers, sharded": Alarms(dense, is_sharded=True, workers=3),
    "bfloat16": Alarms(dense, options={"precision": "bfloat16"}),
    "exchange in bfloat16, sharded": Alarms(
        dense, is_sharded=True, options={"exchange_dtype": "bfloat16"}
    ),
    "convolutions, sharded SGD": Alarms(
        convolutions, is_sharded=True, optimizer=partial(torch.optim.SGD, momentum=0.9)
    ),
    "convolutions, Adam": Alarms(convolutions, workers=3, optimizer=torch.optim.Adam),
    "attention, sharded": Alarms(attention, is_sharded=True),
    "attention, fused": Alarms(
        attention, is_sharded=True, optimizer=partial(torch.optim.AdamW, fused=True)
    ),
}


def train(steps: int, every: int, kind: str) -> tuple[int, int]:
    """Train a small job as one of several workers; return its checks of lanes and of updates."""
    job, lanes, updates = ALARMS[kind], 0, 0

    def compared(check: LaneCheck, reports: Any) -> None:
        nonlocal lanes
        COMPARE(check, reports)
        lanes += 1

    def compared_updates(check: UpdateCheck, rows: Sequence[Any]) -> None:
        nonlocal updates
        COMPARE_UPDATES(check, rows)
        updates += all(hashes for _, _, hashes in rows)

    patches = (
        patch.object(LaneCheck, "compare", compared),
        patch.object(UpdateCheck, "_compare", compared_updates),
    )
    options: dict[str, Any] = dict(job.options)
    with (
        patches[0],
        patches[1],
        ss.init(lanes=2 * job.workers, recheck_every=every, **options) as run,
    ):
        model = run.replicate(job.build())
        optimizer = job.optimizer(model.parameters(), lr=1e-3)
        if job.is_sharded:
            run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        loop: Any = run.batches(points(512), 32, steps=steps)
        if job.streams:
            samples, count = points(512), run.lanes
            loop = run.streams(
                lambda lane: cycle([samples[lane::count]]), steps=steps, name="points"
            )
        for batch in loop:
            run.backward(loss_fn, model, batch)
            run.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return lanes, updates


def print_alarms(steps: int) -> None:
    """Train without faults, with a check in every step."""
    total = 0
    for kind, job in ALARMS.items():
        lanes, updates = ss.launch(train, steps, 1, kind, workers=job.workers)
        total += lanes
        print(
            f"{kind}: {lanes} lanes and {updates} updates checked in {steps} steps, no alarm"
            f" ({total} in total)",
            flush=True,
        )


def costs(name: str, checks: int, *, is_sharded: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without and with a check, on one of two workers."""
    job: Job = JOBS[name]
    model, dataset, job_loss = job.build()
    plain, checked = list[float](), list[float]()
    with ss.init(lanes=4, recheck_every=EVERY, check_every=None, hot_every=None) as run:
        model = run.replicate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        if is_sharded:
            run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        started = 0.0
        for batch in run.batches(dataset, job.batch_size, steps=(checks + 1) * EVERY + 1):
            now = time.perf_counter()
            if run.step > EVERY:  # the time of the step before, with its end
                (plain if run.step % EVERY else checked).append(now - started)
            started = now
            run.backward(job_loss, model, batch)
            optimizer.step()
            optimizer.zero_grad()
    return plain, checked


def print_costs(checks: int) -> None:
    """Print what one check per 100 steps costs, from the medians of steps with and without."""
    for name, is_sharded in (("mlp", False), ("mlp", True), ("vit", False)):
        plain, checked = ss.launch(partial(costs, is_sharded=is_sharded), name, checks, workers=2)
        low, step, high = statistics.quantiles(plain, n=4)
        ratios = [seconds / step for seconds in statistics.quantiles(checked, n=4)]
        print(
            f"{name}{', sharded' * is_sharded}: a step takes {1e3 * step:.2f} ms (quartiles"
            f" {1e3 * low:.2f} to {1e3 * high:.2f}), one with a check {ratios[1]:.2f} times as long"
            f" (quartiles {ratios[0]:.2f} to {ratios[2]:.2f}), or {ratios[1] - 1:.2f}% with"
            " recheck_every=100",
            flush=True,
        )


def main() -> None:
    """Make the measurements that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recheck")
    parser.add_argument("--flips", type=int, default=1000, help="flipped bits (default: 1000)")
    parser.add_argument("--steps", type=int, default=10000, help="steps of a job (default: 10000)")
    parser.add_argument("--checks", type=int, default=40, help="timed checks (default: 40)")
    options = parser.parse_args()
    if options.flips:
        print_flips(options.flips)
    if options.steps:
        print_alarms(options.steps)
    if options.checks:
        print_costs(options.checks)


if __name__ == "__main__":
    main()
