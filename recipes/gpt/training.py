"""The loss, the optimizers, the schedule and the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.gpt.config import OptimizerSettings, Settings
from recipes.gpt.data import Text
from recipes.gpt.model import Decoder
from recipes.settings import SettingsError

IGNORED = -100  # the target of a position that has none
Batch = Mapping[str, Tensor]  # rows of ss.Packed, int64 [rows, length], and their "source" [rows]


def make_model(settings: Settings, text: Text) -> Decoder:
    """Make the model. Raises `SettingsError` for settings that it cannot have."""
    size, optimizer = settings.model.vocabulary or text.vocabulary, settings.optimizer
    if size < text.vocabulary:
        raise SettingsError(
            f"model.vocabulary must be at least {text.vocabulary}, as the tokenizer has, got {size}"
        )
    if settings.model.shard and not (optimizer.name == "adamw" and optimizer.shard):
        raise SettingsError(
            "model.shard=true needs optimizer.name=adamw and optimizer.shard=true, got"
            f" {optimizer.name} and {str(optimizer.shard).lower()}"
        )
    return Decoder(settings.model, size)


def nats_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of each target, 0 where there is none, float32 [rows, length]."""
    logits = model(batch["tokens"], batch["positions"], batch["documents"]).float()
    targets = batch["targets"]
    nats = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return nats.view_as(targets)


def training_loss(
    model: nn.Module, batch: Batch, sources: tuple[str, ...]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the sum of the loss over tokens, and its sum and number of tokens by source."""
    nats, has_target = nats_of(model, batch), batch["targets"] != IGNORED
    metrics: dict[str, Any] = {"loss": nats.sum()}
    for number, name in enumerate(sources):
        rows = (batch["source"] == number)[:, None]
        metrics[f"{name}/loss"] = (nats * rows).sum(), (has_target & rows).sum()
    return metrics["loss"], metrics


def count_targets(batch: Batch) -> int:
    """Return the number of tokens that are predicted, of which the loss is the mean."""
    return int((batch["targets"] != IGNORED).sum())


def score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the loss over held-out tokens, as its sum and their number."""
    return {"nats": (nats_of(model, batch).double().sum(), (batch["targets"] != IGNORED).sum())}


def bits_per_byte(text: Text, means: Mapping[str, float]) -> dict[str, float]:
    """Return the bits per byte of each source's held-out texts, and of `all`, from mean losses.

    They are the length of the texts, with their ends, in the code that the model's probabilities
    make. Unlike a loss per token, they do not depend on the tokenizer.
    """
    bits = {
        name: means[name] * source.held_out_targets / math.log(2)
        for name, source in text.sources.items()
    }
    sizes = {name: source.held_out_bytes for name, source in text.sources.items()}
    each = {name: bits[name] / sizes[name] for name in sizes}
    return {**each, "all": sum(bits.values()) / sum(sizes.values())}


def shown(scores: Mapping[str, float]) -> str:
    """Format bits per byte for people."""
    return "bits per byte: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def batch_size_at(step: int, settings: Settings) -> int:
    """Return the rows of a step, the first of which is 0."""
    return settings.batch_size * 2 ** sum(step >= at for at in settings.double_at)


def tokens_until(step: int, settings: Settings) -> int:
    """Return the tokens in the rows of the first `step` steps."""
    starts = [0, *(min(at, step) for at in sorted(settings.double_at)), step]
    rows = sum((end - start) * batch_size_at(start, settings) for start, end in pairwise(starts))
    return rows * settings.data.length


def make_optimizers(
    model: nn.Module, settings: OptimizerSettings
) -> dict[str, torch.optim.Optimizer]:
    """Make AdamW (Loshchilov and Hutter 2019), and Muon (Jordan et al. 2024) if it is chosen.

    Muon then has the matrices of the layers, at the scale of AdamW's updates (Liu et al. 2025,
    arXiv 2502.16982). Norms do not decay. Raises `SettingsError` if torch has no Muon.
    """
    by_muon = settings.name == "muon"
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if by_muon and parameter.ndim == 2 and name.startswith("layers.")
    ]
    taken = set(map(id, matrices))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = settings.betas[0], settings.betas[-1]
    made: dict[str, torch.optim.Optimizer] = {
        "optimizer": torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas)
    }
    if by_muon:
        if not hasattr(torch.optim, "Muon"):
            raise SettingsError(
                f"optimizer.name=muon needs PyTorch 2.9 or newer, and this is {torch.__version__}; "
                "install it, or set optimizer.name=adamw"
            )
        made["muon"] = torch.optim.Muon(
            matrices,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    return made


def set_rate(
    optimizers: Mapping[str, torch.optim.Optimizer], step: int, settings: Settings
) -> float:
    """Set the learning rate of a step, the first of which is 0, and return it.

    It depends on the step alone, so a run that resumes with more steps goes on at its stable rate.
    """
    options = settings.optimizer
    rate = options.learning_rate * factor(
        step,
        steps=settings.steps,
        warmup=options.warmup_steps,
        decay=round(options.decay * settings.steps),
        final=options.final,
    )
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rate


def factor(step: int, *, steps: int, warmup: int, decay: int, final: float) -> float:
    """Return the learning rate of a step as a fraction of the peak: warmup, stable, linear decay.

    Hu et al. 2024, arXiv 2404.06395.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = min(1.0, max(0.0, (steps - step) / max(1, decay)))
    return final + (1 - final) * left


def generate(
    model: nn.Module, batch: Tensor, *, count: int, temperature: float, length: int
) -> Tensor:
    """Return `count` tokens after each row of tokens [rows, any], int64 [rows, count].

    The model sees the last `length` tokens at most.
    """
    tokens = batch
    for _ in range(count):
        logits = model(tokens[:, -length:])[:, -1].float()  # [rows, vocabulary]
        if temperature > 0:
            following = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            following = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens[:, -count:]


def prompts_of(text: Text, settings: Settings) -> list[Tensor]:
    """Return the tokens of each prompt, int64 [tokens]."""
    return [torch.tensor(text.encode(prompt)) for prompt in settings.prompts]


def sampled(text: Text, settings: Settings, tokens: Tensor) -> Iterator[str]:
    """Yield the prompts with the texts of generated tokens [prompts, count]."""
    for prompt, row in zip(settings.prompts, tokens.tolist(), strict=True):
        yield prompt + text.decode(row)
