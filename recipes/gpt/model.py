"""A decoder language model in the shape of Llama (Touvron et al. 2023, arXiv 2302.13971).

Rotary positions (Su et al. 2021, arXiv 2104.09864), root mean square norms (Zhang and Sennrich
2019, arXiv 1910.07467), grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) and SwiGLU
(Shazeer 2020, arXiv 2002.05202). Parameters have Llama's names, without the prefix `model.`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.gpt.config import ModelSettings
from recipes.settings import SettingsError

INIT_STD = 0.02
HIDDEN_MULTIPLE = 64  # of the hidden features of a SwiGLU that follow from the width


class Decoder(nn.Module):
    """Predict the next token of each token in rows of packed documents.

    Raises `SettingsError` if heads do not divide the width, or key heads the heads.
    """

    def __init__(self, settings: ModelSettings, vocabulary: int) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        if width % heads or width // heads % 2:
            raise SettingsError(
                f"model.width must be an even multiple of model.heads ({heads}), got {width}"
            )
        if heads % (settings.key_heads or heads):
            raise SettingsError(
                f"model.heads must be a multiple of model.key_heads ({settings.key_heads}), got "
                f"{heads}"
            )
        self.head_width, self.theta = width // heads, settings.rope_theta
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(width, settings.norm_epsilon)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if settings.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.apply(_initialize)
        # so that the variance of the residual stream does not grow with the depth (Radford 2019)
        for layer in self.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(projection.weight, std=INIT_STD / math.sqrt(2 * settings.depth))

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return logits [rows, length, vocabulary] of the tokens after `tokens` [rows, length].

        Tokens attend to earlier ones with the same number in `documents` [rows, length]; without
        it, a row is one document. Without `positions` [rows, length], they start at 0.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = None if documents is None else attention_mask(documents)
        turns = rotations(positions, self.head_width, self.theta)
        stream = self.embed_tokens(tokens)  # [rows, length, width]
        for layer in self.layers:
            stream = layer(stream, turns, mask)
        return self.lm_head(self.norm(stream))


class Layer(nn.Module):
    """Attention, then a SwiGLU, each on normalized tokens with a residual connection."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.width, settings.norm_epsilon)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = nn.RMSNorm(settings.width, settings.norm_epsilon)
        self.mlp = SwiGLU(settings.width, hidden_features(settings))

    def forward(self, stream: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Keep the shape [rows, length, width]."""
        stream = stream + self.self_attn(self.input_layernorm(stream), turns, mask)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Attention(nn.Module):
    """Causal self-attention in which `heads / key_heads` queries share a key and a value."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        key_heads = settings.key_heads or heads
        self.head_width, self.shared_by = width // heads, heads // key_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, stream: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Keep the shape [rows, length, width]; `mask` is [rows, 1, length, length]."""
        query, key, value = (
            projection(stream).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [rows, heads or key heads, length, head width]
        query, key = rotate(query, turns), rotate(key, turns)
        if self.shared_by > 1:
            key, value = (
                part[:, :, None].expand(-1, -1, self.shared_by, -1, -1).flatten(1, 2)
                for part in (key, value)
            )
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A linear layer, gated by the SiLU of another one, and a projection back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Keep the shape [rows, length, width]."""
        return self.down_proj(F.silu(self.gate_proj(stream)) * self.up_proj(stream))


def hidden_features(settings: ModelSettings) -> int:
    """Return the hidden features of a SwiGLU: 8/3 of the width, rounded up, if none are set."""
    if settings.hidden is not None:
        return settings.hidden
    return HIDDEN_MULTIPLE * math.ceil(8 * settings.width / 3 / HIDDEN_MULTIPLE)


def attention_mask(documents: Tensor) -> Tensor:
    """Return whether a token sees another, bool [rows, 1, length, length].

    It sees itself and earlier tokens with the same number in `documents` [rows, length].
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def rotations(positions: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each float32 [rows, 1, length, head width], of `positions`.

    Feature i turns together with feature i + head_width / 2, by position / theta^(2i/head_width).
    """
    exponents = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    angles = positions[:, None, :, None].float() / theta**exponents
    return tuple(part.repeat(1, 1, 1, 2) for part in (angles.cos(), angles.sin()))


def rotate(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs of features by the angles of their positions; keeps shape and dtype."""
    cosine, sine = (part.to(heads.dtype) for part in turns)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INIT_STD)
