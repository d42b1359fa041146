"""The loss, the scores, the optimizer and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recipes.scaling import describe_scaling, scaled
from recipes.vit.config import OptimizerSettings, Settings

NEVER_DECAYED = {"cls_token", "pos_embed"}


def make_loss(settings: Settings, **changes: Any) -> Callable[..., Any]:
    """Return `training_loss` with the settings and changed arguments."""
    return partial(
        training_loss,
        mixup=settings.mixup,
        cutmix=settings.cutmix,
        label_smoothing=settings.label_smoothing,
        **changes,
    )


def training_loss(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    mixup: float,
    cutmix: float,
    label_smoothing: float,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scaled cross entropy and top-1 of images, mixed in pairs if an alpha is above 0.

    With both alphas above 0, half of the batches use mixup and half use CutMix.
    """
    images, labels = batch
    cross_entropy = partial(F.cross_entropy, label_smoothing=label_smoothing)
    if mixup == cutmix == 0:
        logits = model(images)
        loss = cross_entropy(logits, labels)
    else:
        by_cutmix = cutmix > 0 and (mixup == 0 or torch.rand(()).item() < 1 / 2)
        mix, alpha = (cut_and_mix, cutmix) if by_cutmix else (mix_up, mixup)
        share = beta(alpha)
        partners = torch.randperm(len(images)).to(images.device)
        mixed, share = mix(images, images[partners], share)
        logits = model(mixed)
        loss = share * cross_entropy(logits, labels)
        loss = loss + (1 - share) * cross_entropy(logits, labels[partners])
    top1 = logits.argmax(1) == labels  # of each image
    return scale(loss), {"loss": loss, "top1": top1}  # the loss that is recorded is not scaled


def beta(alpha: float) -> float:
    """Draw the share of an image's own label: at least half, as pairs occur in both orders."""
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    return max(share, 1 - share)


def mix_up(images: Tensor, partners: Tensor, share: float) -> tuple[Tensor, float]:
    """Return the weighted means of images and their partners (Zhang et al. 2018), and the share."""
    return share * images + (1 - share) * partners, share


def cut_and_mix(images: Tensor, partners: Tensor, share: float) -> tuple[Tensor, float]:
    """Paste a box of the partners into images (Yun et al. 2019).

    Returns the images [batch, channels, height, width] and the fraction of pixels that are their
    own, which is `share` unless the box reaches over an edge.
    """
    height, width = images.shape[-2:]
    side = math.sqrt(1 - share) / 2
    (y, x), mixed = torch.rand(2).tolist(), images.clone()
    rows = slice(max(0, round((y - side) * height)), max(0, round((y + side) * height)))
    columns = slice(max(0, round((x - side) * width)), max(0, round((x + side) * width)))
    mixed[..., rows, columns] = partners[..., rows, columns]
    pasted = images[0, 0, rows, columns].numel()
    return mixed, 1 - pasted / (height * width)


def score(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the loss, top-1 and top-5 of held-out images."""
    images, labels = batch
    logits = model(images).float()
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # [batch, 5], best first
    return {
        "loss": F.cross_entropy(logits, labels),
        "top1": hits[:, 0],
        "top5": hits.any(1),
    }


def shown(scores: Mapping[str, float]) -> str:
    """Format scores for people."""
    return "  ".join(
        f"{name.replace('_', ' ')} " + (f"{value:.4f}" if "loss" in name else f"{value:.2%}")
        for name, value in scores.items()
    )


def make_ema(model: nn.Module, decay: float) -> AveragedModel:
    """Make an exponential moving average of a model's parameters."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, batch_size: int
) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019) or SGD for a model.

    Biases, norms, class token and position embedding do not decay.
    """
    parameters = dict(model.named_parameters())
    decayed = {name for name, parameter in parameters.items() if parameter.ndim > 1} - NEVER_DECAYED
    groups = [
        {
            "params": [
                parameter for name, parameter in parameters.items() if (name in decayed) == decays
            ],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    peak = scaled(settings.learning_rate, settings.reference_batch_size, batch_size)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=peak, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=peak, betas=settings.betas)


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, steps: int, steps_per_epoch: int
) -> LambdaLR:
    """Make a linear warmup, then half a cosine to the final rate (Loshchilov and Hutter 2017)."""
    final = settings.final_learning_rate / settings.learning_rate
    warmup_steps = round(settings.warmup_epochs * steps_per_epoch)
    return LambdaLR(optimizer, partial(factor, steps=steps, warmup_steps=warmup_steps, final=final))


def factor(step: int, *, steps: int, warmup_steps: int, final: float) -> float:
    """Return the learning rate of a step as a fraction of the peak."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    part = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * part)) / 2


def describe_batch(batch_size: int, workers: int, lanes: int) -> str:
    """Describe the global batch size, with the mean share of a worker and of a lane."""
    shares = f"{batch_size / workers:g} per worker, {batch_size / lanes:g} per lane"
    return f"batch size {batch_size} over all workers: {shares}"


def describe_rate(settings: OptimizerSettings, batch_size: int) -> str:
    """Describe the peak learning rate and how it was scaled."""
    rates = {"peak learning rate": settings.learning_rate}
    return describe_scaling(rates, settings.reference_batch_size, batch_size)
