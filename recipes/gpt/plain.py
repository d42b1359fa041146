"""Pretrain a decoder language model on one device: the script that train.py is based on.

python recipes/gpt/plain.py recipes/gpt/small.yaml --dir runs/plain
python recipes/gpt/plain.py --eval --dir runs/plain
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

from recipes.gpt import checkpoint, training
from recipes.gpt.config import Settings
from recipes.gpt.data import Text, open_text, weights_of
from recipes.one_device import autocast, device, load_checkpoint, save_checkpoint
from recipes.settings import SettingsError, read_arguments, run_script, write_settings


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the bits per byte of held-out texts."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    torch.manual_seed(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        tokens = settings.data.tokens or (flags.dir or Path(folder)) / "text"
        text = open_text(settings.data, tokens, lambda prepare: prepare(), say=print)
        model = training.make_model(settings, text).to(device())
        if settings.pretrained is not None:
            print(checkpoint.load(model, settings.model, settings.pretrained))
        if flags.eval:
            step = load_checkpoint(flags.dir, model=model)
            if step == 0 and flags.dir:
                raise SettingsError("--eval needs the --dir of a run with a checkpoint")
            scores = evaluate(settings, model, text)
            print(f"step {step}: {training.shown(scores)}")
        else:
            scores = train(flags.dir, settings, model, text)
        if settings.export is not None:
            checkpoint.save(model, settings.model, text, settings.export)
        return scores


def train(
    directory: Path | None, settings: Settings, model: nn.Module, text: Text
) -> dict[str, float]:
    """Train from the step of the checkpoint to the last one."""
    optimizers = training.make_optimizers(model, settings.optimizer)
    first = load_checkpoint(directory, model=model, **optimizers)
    write_settings(directory, settings)
    loss_fn = partial(training.training_loss, sources=tuple(text.sources))
    progress = tqdm(total=settings.steps, initial=first, unit="step", disable=None)
    scores: dict[str, float] = {}

    model.train()
    for step, batch in enumerate(batches(settings, text, first), first + 1):
        training.set_rate(optimizers, step - 1, settings)
        with autocast(settings.precision):
            loss, _ = loss_fn(model, batch)
        mean = loss / training.count_targets(batch)
        mean.backward()
        if settings.optimizer.clip_norm is not None:
            clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        progress.set_postfix(loss=mean.item(), refresh=False)
        progress.update()

        if step % settings.evaluate_every == 0 or step == settings.steps:
            scores = evaluate(settings, model, text)
            save_checkpoint(directory, step, model=model, **optimizers)
            progress.write(f"step {step}: {training.shown(scores)}")
    progress.close()
    return scores or evaluate(settings, model, text)  # a finished run has no steps left


def batches(settings: Settings, text: Text, first: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batch of each step: rows of random sources, shuffled in each epoch of a source."""
    weights = torch.tensor([*weights_of(settings.data, text).values()])
    rows = [endless(source.train) for source in text.sources.values()]
    for step in range(first, settings.steps):
        size = training.batch_size_at(step, settings)
        drawn = torch.multinomial(weights, size, replacement=True).tolist()
        samples = [next(rows[number]) for number in drawn]
        batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        batch["source"] = torch.tensor(drawn)
        yield to_device(batch)


def endless(rows: Any) -> Iterator[dict[str, Tensor]]:
    """Yield single rows, in another order in each epoch."""
    while True:
        yield from DataLoader(rows, 1, sampler=RandomSampler(rows))


def to_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch on the device."""
    return {name: value.to(device()) for name, value in batch.items()}


@torch.no_grad()
def evaluate(settings: Settings, model: nn.Module, text: Text) -> dict[str, float]:
    """Return the bits per byte of the held-out texts of each source, and of all."""
    means = {}
    model.eval()
    for name, source in text.sources.items():
        total = 0.0
        for batch in DataLoader(source.held_out, settings.evaluate_batch_size):
            with autocast(settings.precision):
                nats, _ = training.score(model, to_device(batch))["nats"]
            total += nats.item()
        means[name] = total / source.held_out_targets
    model.train()
    return training.bits_per_byte(text, means)


if __name__ == "__main__":
    run_script(main)
