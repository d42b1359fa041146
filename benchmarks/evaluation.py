"""Samples per second of an evaluation on 2 workers, compared to peers as documented.

usage: python -m benchmarks.evaluation [--rounds 3]

Computes the mean loss and the accuracy over a data set, for a ViT-Ti/8, where computing dominates,
and for a small network, where overhead does. Contenders take turns, and every ratio compares runs
of one round. Unlike samestep and Accelerate, a `DistributedSampler` repeats samples if the number
of workers does not divide the size of the data set; here it does.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep as ss
from benchmarks import growth_steps, jobs
from benchmarks.contenders.stopwatch import over_workers
from benchmarks.jobs.job import BATCHES_AN_EPOCH
from benchmarks.measure import figures
from benchmarks.turns import figure, in_turn, samestep, table, torchrun

BATCH_SIZE = 64  # per worker
PASSES = 3  # timed, after one that is not

Figures = dict[str, float]


class Task(NamedTuple):
    """A network in evaluation mode, and its data set."""

    model: nn.Module
    dataset: TensorDataset


def vit() -> Task:
    """Return the ViT of the jobs on 1,024 images."""
    model, dataset, _ = jobs.vit.build(1024 // BATCHES_AN_EPOCH)
    return Task(model.eval(), dataset)


def small() -> Task:
    """Return square layers of 100,000 parameters on 32,768 samples."""
    features, labels = growth_steps.dataset().tensors
    return Task(
        growth_steps.network(100_000).eval(), TensorDataset(features.repeat(8, 1), labels.repeat(8))
    )


def score(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a batch, and its accuracy."""
    inputs, labels = batch
    logits = model(inputs)
    return F.cross_entropy(logits, labels), {
        "accuracy": (logits.argmax(1) == labels).float().mean()
    }


def with_samestep(task: Task) -> Figures:
    """Evaluate by `run.evaluate`."""
    with ss.init() as run:
        model = run.replicate(task.model)
        speed_and_accuracy = timed(
            task,
            lambda: run.evaluate(score, model, task.dataset, BATCH_SIZE),
            lambda: run.barrier("timing a pass"),
        )
        return run.reduce_dict(speed_and_accuracy)


def with_accelerate(task: Task) -> Figures:
    """Gather predictions and labels of every batch, as Accelerate's documentation does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(task.model, DataLoader(task.dataset, BATCH_SIZE))

    def evaluate() -> Figures:
        logits, labels = [], []
        with torch.no_grad():
            for inputs, own_labels in loader:
                both = accelerator.gather_for_metrics((model(inputs), own_labels))
                logits.append(both[0])
                labels.append(both[1])
        _, scores = score(torch.nn.Identity(), [torch.cat(logits), torch.cat(labels)])
        return {"accuracy": float(scores["accuracy"])}

    return over_workers(timed(task, evaluate, accelerator.wait_for_everyone))


def with_torchmetrics(task: Task) -> Figures:
    """Update torchmetrics objects in each worker, which exchange their states in `compute`."""
    from torchmetrics import MeanMetric

    metrics = {"loss": MeanMetric(), "accuracy": MeanMetric()}

    def update(loss: Tensor, accuracy: Tensor, samples: int) -> None:
        metrics["loss"].update(loss, samples)
        metrics["accuracy"].update(accuracy, samples)

    def compute() -> Figures:
        values = {name: float(metric.compute()) for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return values

    return _with_sampler(task, update, compute)


def with_sums(task: Task) -> Figures:
    """Add up in each worker, and all-reduce the sums once, as torch's own examples do."""
    sums = torch.zeros(3)

    def update(loss: Tensor, accuracy: Tensor, samples: int) -> None:
        sums.add_(torch.stack([loss * samples, accuracy * samples, torch.tensor(float(samples))]))

    def compute() -> Figures:
        dist.all_reduce(sums)
        loss, accuracy, samples = sums.tolist()
        sums.zero_()
        return {"loss": loss / samples, "accuracy": accuracy / samples}

    return _with_sampler(task, update, compute)


def _with_sampler(
    task: Task, update: Callable[[Tensor, Tensor, int], None], compute: Callable[[], Figures]
) -> Figures:
    dist.init_process_group("gloo")
    loader = DataLoader(
        task.dataset, BATCH_SIZE, sampler=DistributedSampler(task.dataset, shuffle=False)
    )

    def evaluate() -> Figures:
        with torch.no_grad():
            for batch in loader:
                loss, scores = score(task.model, batch)
                update(loss, scores["accuracy"], len(batch[0]))
        return compute()

    return over_workers(timed(task, evaluate, dist.barrier))


def timed(task: Task, evaluate: Callable[[], Figures], barrier: Callable[[], None]) -> Figures:
    """Return the median speed of a few passes, and the accuracy."""
    durations = []
    for _ in range(1 + PASSES):
        barrier()
        started = time.perf_counter()
        scores = evaluate()
        durations.append(time.perf_counter() - started)
    return {
        "samples_a_second": len(task.dataset) / statistics.median(durations[1:]),
        "accuracy": scores["accuracy"],
    }


TASKS = {"vit": vit, "small": small}
WAYS = {
    "samestep": with_samestep,
    "accelerate": with_accelerate,
    "torchmetrics": with_torchmetrics,
    "sums": with_sums,
}
TITLES = {
    "samestep": "samestep",
    "accelerate": "Accelerate, gather_for_metrics",
    "torchmetrics": "DistributedSampler, torchmetrics",
    "sums": "DistributedSampler, one all-reduce",
    "vit": "ViT-Ti/8, 1,024 images",
    "small": "0.1 M parameters, 32,768 samples",
}


def command(way: str, task: str) -> list[str]:
    """Return the command that evaluates a task with 2 workers."""
    module = ["benchmarks.evaluation", "--as", way, task]
    return samestep(2, *module) if way == "samestep" else torchrun(2, *module)


def main() -> None:
    """Run the comparison, or one worker of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    parser.add_argument(
        "--as",
        dest="worker",
        nargs=2,
        metavar=("WAY", "TASK"),
        help="evaluate as one worker of a contender",
    )
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # warnings of peers about themselves
        torch.set_num_threads(1)
        way, task = arguments.worker
        growth_steps.tell(WAYS[way](TASKS[task]()))
        return
    rows = {}
    for task in TASKS:
        runs = in_turn(
            {TITLES[way]: partial(figures, command(way, task)) for way in WAYS}, arguments.rounds
        )
        rows[TITLES[task]] = figure("samples_a_second", runs)
    print(table("samples a second", rows, more_is_better=True))


if __name__ == "__main__":
    main()
