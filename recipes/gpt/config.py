"""The settings of the language model recipe, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The model: a decoder in the shape of Llama."""

    width: int = setting(256, "features of a token", least=2)
    depth: int = setting(8, "number of layers", least=1)
    heads: int = setting(4, "attention heads per layer", least=1)
    key_heads: int | None = setting(
        None, "heads of keys and values, each shared by heads / key_heads; default: heads", least=1
    )
    hidden: int | None = setting(
        None, "hidden features of a SwiGLU; default: 8/3 of the width, a multiple of 64", least=1
    )
    tied: bool = setting(True, "the embedding of tokens is also the output layer")
    rope_theta: float = setting(10_000.0, "base of the angles of rotary positions", above=0)
    norm_epsilon: float = setting(1e-5, "added to the mean square in norms", least=0)
