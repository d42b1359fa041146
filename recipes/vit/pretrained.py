"""Initialize a ViT with the parameters of another run, of timm, PyTorch or PaddleViT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import pretrained
from recipes.pretrained import PretrainedError, load, renamed

POSITIONS = "pos_embed"
PADDLE_NAMES = (  # in both generations of PaddleViT's ViT
    (r"^patch_embedding\.patch_embedding\.", "patch_embed.proj."),
    (r"^(patch_embedding\.)?position_embeddings?$", POSITIONS),
    (r"^(patch_embedding\.)?cls_token$", "cls_token"),
    (r"^encoder\.layers\.", "blocks."),
    (r"^encoder\.encoder_norm\.", "norm."),
    (r"^(blocks\.\d+)\.attn_norm\.", r"\1.norm1."),
    (r"^(blocks\.\d+)\.mlp_norm\.", r"\1.norm2."),
    (r"^(blocks\.\d+\.attn)\.out\.", r"\1.proj."),
    (r"^classifier\.", "head."),
)


def load_pretrained(model: nn.Module, path: Path, *, evaluates: bool = False) -> str:
    """Load the parameters in a file into a ViT; return a one-line description.

    The position embedding is resized to the model's image size. A head that is missing or has
    another number of classes is not loaded; it is an error if the model `evaluates`. Raises
    `PretrainedError` that lists every other parameter that does not fit.
    """
    saved, state = read_parameters(path), model.state_dict()
    done = [f"loaded {path}"]
    if POSITIONS in saved and saved[POSITIONS].shape[1] != state[POSITIONS].shape[1]:
        old, new = saved[POSITIONS].shape[1], state[POSITIONS].shape[1]
        done.append(f"position embedding resized from {old} to {new} tokens")
        saved[POSITIONS] = resized_positions(saved[POSITIONS], new)
    done += load(model, saved, path, head="head", outputs="classes", evaluates=evaluates)
    return "; ".join(done)


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Read the parameters in a file, with timm's names. Raises `PretrainedError`."""
    saved = pretrained.read_parameters(path)
    return _from_paddle(saved) if path.suffix == ".pdparams" else saved


def resized_positions(positions: Tensor, tokens: int) -> Tensor:
    """Resize a position embedding [1, 1 + height * width, features] to `tokens` tokens.

    The first token, the class token, is not changed. Bicubic over the grid of patches, as in
    Dosovitskiy et al. 2021. Raises `PretrainedError` if a grid is not square.
    """
    old, new = (math.isqrt(count - 1) for count in (positions.shape[1], tokens))
    if old**2 + 1 != positions.shape[1] or new**2 + 1 != tokens:
        got = f"{positions.shape[1]} and {tokens} tokens"
        raise PretrainedError(f"positions must be a class token and a square grid, got {got}")
    # [1, features, old, old]
    grid = positions[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions[:, :1].float(), grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def _from_paddle(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return Paddle's parameters with timm's names and linear weights transposed."""
    return {
        renamed(name, PADDLE_NAMES): tensor.T.contiguous() if tensor.ndim == 2 else tensor
        for name, tensor in content.items()
    }
