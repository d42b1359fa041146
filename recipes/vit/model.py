"""Vision Transformer (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929).

Parameters have timm's names, so state dicts of timm's plain ViT models load as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.settings import SettingsError
from recipes.vit.config import ModelSettings

NORM_EPSILON = 1e-6
INIT_STD = 0.02


class Size(NamedTuple):
    """The numbers of a named size."""

    width: int
    depth: int
    heads: int


SIZES = {  # tiny and small: Touvron et al. 2021 (DeiT); base and large: Dosovitskiy et al. 2021
    "tiny": Size(192, 12, 3),
    "small": Size(384, 12, 6),
    "base": Size(768, 12, 12),
    "large": Size(1024, 24, 16),
}


class VisionTransformer(nn.Module):
    """Classify images [batch, channels, height, width] into logits [batch, classes].

    Raises `ValueError` if patches do not tile an image or heads do not divide the width.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        size = SIZES[settings.size]
        width, depth, heads = (
            settings.width or size.width,
            settings.depth or size.depth,
            settings.heads or size.heads,
        )
        if settings.image_size % settings.patch_size:
            raise SettingsError(
                f"model.image_size must be a multiple of model.patch_size ({settings.patch_size}), "
                f"got {settings.image_size}"
            )
        if width % heads:
            raise SettingsError(
                f"model.width must be a multiple of model.heads ({heads}), got {width}"
            )
        patches = (settings.image_size // settings.patch_size) ** 2
        self.patch_embed = PatchEmbedding(settings.channels, width, settings.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, width))
        self.pos_drop = nn.Dropout(settings.dropout)
        drop_paths = [settings.drop_path * index / max(1, depth - 1) for index in range(depth)]
        self.blocks = nn.Sequential(
            *(Block(width, heads, settings, drop_path) for drop_path in drop_paths)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.head = nn.Linear(width, settings.classes)
        self.apply(_initialize)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        nn.init.normal_(self.cls_token, std=INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        patches = self.patch_embed(images)  # [batch, patches, width]
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)
        tokens = self.pos_drop(tokens + self.pos_embed)
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


class PatchEmbedding(nn.Module):
    """Cut images into patches and map each to a token."""

    def __init__(self, channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, channels, height, width] to [batch, patches, width]."""
        return self.proj(images).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Attention, then an MLP, each on normalized tokens with a residual connection."""

    def __init__(self, width: int, heads: int, settings: ModelSettings, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.attn = Attention(width, heads, settings)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.mlp = MLP(width, int(width * settings.mlp_ratio), settings.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Keep the shape [batch, tokens, width]."""
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = settings.attention_dropout
        self.qkv = nn.Linear(width, 3 * width, bias=settings.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Keep the shape [batch, tokens, width]."""
        # [batch, tokens, 3 * width] -> 3 of [batch, heads, tokens, width / heads]
        query, key, value = (
            self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0
        )
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Keep the shape [batch, tokens, width]."""
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(tokens)))))


class DropPath(nn.Module):
    """Drop a residual branch for some samples during training (Huang et al. 2016)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """Scale the remaining samples so that the expectation does not change."""
        if not self.training or self.probability == 0:
            return branch
        kept = 1 - self.probability
        return branch * branch.new_empty(len(branch), 1, 1).bernoulli_(kept).div_(kept)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
