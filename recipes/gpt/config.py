"""The settings of the language model recipe, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.settings import RunSettings, setting


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
    vocabulary: int | None = setting(
        None, "tokens of the embedding; default: those of the tokenizer", least=1
    )
    tied: bool = setting(True, "the embedding of tokens is also the output layer")
    rope_theta: float = setting(10_000.0, "base of the angles of rotary positions", above=0)
    norm_epsilon: float = setting(1e-5, "added to the mean square in norms", least=0)
    shard: bool = setting(
        False, "shard the model across workers, for one that is too large for a device; adamw only"
    )


@dataclass(frozen=True)
class DataSettings:
    """The texts, their tokens, and how rows are made of them."""

    path: Path | None = setting(
        None,
        "folder of text files and .jsonl files with a field text; default: Python's standard "
        "library as code, and the descriptions of installed packages as prose",
    )
    sources: dict[str, Path] | None = setting(
        None, "several folders by name, such as '{code: DIR, prose: DIR}', instead of path"
    )
    weights: dict[str, float] | None = setting(
        None, "share of rows by source, such as '{code: 3, prose: 1}'; default: by their tokens"
    )
    endings: tuple[str, ...] | None = setting(
        None, "endings of the files to read, such as [.py, .md]; default: all that are not hidden"
    )
    held_out: int = setting(
        50, "one document in so many is held out, by a hash of its name", least=2
    )
    most_bytes: int | None = setting(
        None, "bytes of a source after which no more documents are taken; default: all", least=1
    )
    length: int = setting(256, "tokens of a row", least=2)
    vocabulary: int = setting(4096, "tokens of the tokenizer that is trained", least=257)
    tokenizer: Path | None = setting(None, "an existing tokenizer.json, used as it is")
    begin: str = setting("<|endoftext|>", "the special token before each document")
    end: str = setting("<|endoftext|>", "the special token after each document")
    tokens: Path | None = setting(
        None,
        "folder of tokenizer and tokens, shared by runs; default: text/ in the run's directory",
    )
    loader_workers: int = setting(0, "processes per worker that load rows", least=0)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, and its schedule of warmup, a stable rate, and decay."""

    name: Literal["adamw", "muon"] = setting(
        "adamw", "adamw, or muon: Muon for the matrices of layers, AdamW for the rest"
    )
    learning_rate: float = setting(1e-3, "peak learning rate", above=0)
    warmup_steps: int = setting(50, "steps of linear growth from 0 to the peak", least=0)
    decay: float = setting(0.2, "fraction of the steps, at the end, of decay", least=0, most=1)
    final: float = setting(0.0, "end of the decay, as a fraction of the peak", least=0, most=1)
    weight_decay: float = setting(0.1, "weight decay of matrices; norms do not decay", least=0)
    betas: tuple[float, ...] = setting((0.9, 0.95), "betas of AdamW", least=0, most=1)
    momentum: float = setting(0.95, "momentum of Muon", least=0, most=1)
    clip_norm: float | None = setting(1.0, "maximum norm of the gradient", above=0)
    shard: bool = setting(True, "shard optimizers across workers, which saves time and memory")


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of the recipe."""

    steps: int = setting(500, "updates", least=1)
    batch_size: int = setting(16, "rows per step, over all workers", least=1)
    double_at: tuple[int, ...] = setting(
        (), "steps from which on the batch size is twice as large", least=1
    )
    evaluate_every: int = setting(
        250, "steps between evaluations; the last step is evaluated as well", least=1
    )
    evaluate_batch_size: int = setting(8, "rows that a worker evaluates at once", least=1)
    prompts: tuple[str, ...] = setting(
        ("def", "import", "The", ""), "beginnings of the texts that are sampled"
    )
    sample_tokens: int = setting(64, "tokens of a sampled text; 0: none", least=0)
    temperature: float = setting(0.8, "of the sampled texts; 0: the most likely tokens", least=0)
    pretrained: Path | None = setting(
        None, "folder of a Hugging Face checkpoint of the same shape, to start from"
    )
    export: Path | None = setting(
        None, "folder for a Hugging Face checkpoint of the model, at the end or with --eval"
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
