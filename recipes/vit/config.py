"""Every setting of the ViT recipe, with its default and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The model: a size by name, and numbers that override single ones of it."""

    size: Literal["tiny", "small", "base", "large"] = setting(
        "base", "gives width, depth and heads, as the papers name them"
    )
    width: int | None = setting(None, "features of a token; default: from size")
    depth: int | None = setting(None, "blocks; default: from size")
    heads: int | None = setting(None, "attention heads a block; default: from size")
    image_size: int = setting(224, "height and width of an image, in pixels")
    patch_size: int = setting(16, "height and width of a patch, in pixels")
    channels: int = setting(3, "1 for grey images, 3 for colour")
    classes: int = setting(1000, "classes of the head")
    mlp_ratio: float = setting(4.0, "hidden features of an MLP, in widths")
    qkv_bias: bool = setting(True, "biases for queries, keys and values")
    dropout: float = setting(0.0, "of embeddings, attention outputs and MLPs")
    attention_dropout: float = setting(0.0, "of attention weights")
    drop_path: float = setting(
        0.0, "stochastic depth of the last block; grows linearly from 0 (Huang et al. 2016)"
    )


@dataclass(frozen=True)
class DataSettings:
    """Where images come from, and what is done to them."""

    source: Literal["digits", "folder", "fashion-mnist"] = setting(
        "folder", "folder: path/train/CLASS/* and path/val/CLASS/*"
    )
    path: Path | None = setting(
        None, "folder of the data; digits come with scikit-learn and need none"
    )
    augment: bool = setting(
        True, "random crops and flips of training images (digits: shifts, rotations, scalings)"
    )
    crop_least: float = setting(0.08, "least part of an image's area in a random crop")
    center_crop: float = setting(0.875, "part of a resized image's side in an evaluation crop")
    mean: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5), "of pixels in [0, 1], by channel; subtracted"
    )
    std: tuple[float, ...] = setting((0.5, 0.5, 0.5), "of pixels in [0, 1], by channel; divided by")
    loader_workers: int = setting(0, "processes that load images, for each worker")


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are updated. Learning rates are those at the reference batch size."""

    name: Literal["adamw", "sgd"] = setting(
        "adamw", "AdamW (Loshchilov and Hutter 2019), or SGD with momentum"
    )
    learning_rate: float = setting(1e-3, "peak, at the reference batch size")
    reference_batch_size: int | None = setting(
        None, "learning rates grow with batch_size / this (Goyal et al. 2017); none: they do not"
    )
    warmup_epochs: float = setting(5.0, "of linear growth from 0 to the peak")
    final_learning_rate: float = setting(0.0, "where the cosine ends, at the reference batch size")
    weight_decay: float = setting(
        0.05, "of weights; never of biases, norms, class token and position embedding"
    )
    betas: tuple[float, ...] = setting((0.9, 0.999), "of AdamW")
    momentum: float = setting(0.9, "of SGD")
    clip_norm: float | None = setting(1.0, "largest norm of the gradient")
    shard: bool = setting(
        False, "each worker updates its part of the parameters: less time and memory, same bits"
    )


@dataclass(frozen=True)
class Settings:
    """Every setting of the recipe."""

    epochs: int = setting(300, "passes over the training images")
    batch_size: int = setting(1024, "images a step, over all workers")
    lanes: int | None = setting(
        None, "slices of a batch; more lanes than workers accumulate gradients; default: workers"
    )
    seed: int = setting(0, "everything random is a function of it")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "bfloat16: autocast in forward passes"
    )
    label_smoothing: float = setting(0.0, "Szegedy et al. 2016")
    mixup: float = setting(0.0, "alpha of the Beta distribution; 0: off (Zhang et al. 2018)")
    ema_decay: float | None = setting(None, "of an average of the parameters that is evaluated too")
    evaluate_every: int = setting(
        1, "epochs between evaluations; the last epoch is always evaluated"
    )
    pretrained: Path | None = setting(
        None, "start from these parameters: .safetensors, .pth, .pt, .bin or PaddleViT's .pdparams"
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
