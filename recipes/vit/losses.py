"""What training minimises, and what an evaluation tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def training_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], *, mixup: float, label_smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross entropy of a lane's images, mixed in pairs when `mixup` is above 0 (Zhang et al. 2018), and top-1."""
    images, labels = batch
    if mixup == 0:
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    else:
        share = torch.distributions.Beta(mixup, mixup).sample().item()
        # as likely, since pairs come in both orders; so `labels` are those of the larger share
        share = max(share, 1 - share)
        partners = torch.randperm(len(images)).to(images.device)
        logits = model(share * images + (1 - share) * images[partners])
        losses = [
            F.cross_entropy(logits, target, label_smoothing=label_smoothing)
            for target in (labels, labels[partners])
        ]
        loss = share * losses[0] + (1 - share) * losses[1]
    return loss, {"top1": (logits.argmax(1) == labels).float().mean()}


def score(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the loss, top-1 and top-5 of some held-out images."""
    images, labels = batch
    logits = model(images).float()
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # [batch, 5], best first
    return {
        "loss": F.cross_entropy(logits, labels),
        "top1": hits[:, 0].double().mean(),
        "top5": hits.any(1).double().mean(),
    }


def shown(scores: Mapping[str, float]) -> str:
    """Return scores as a person reads them."""
    words = {name: name.replace("_", " ") for name in scores}
    return "  ".join(
        f"{words[name]} {value:.4f}" if "loss" in name else f"{words[name]} {value:.2%}"
        for name, value in scores.items()
    )
