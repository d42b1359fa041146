"""The settings of the ViT recipe, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.image_files import ImageFileSettings
from recipes.settings import RunSettings, setting
from recipes.vit.randaugment import STRONGEST


@dataclass(frozen=True)
class ModelSettings:
    """The model: a named size, and numbers that override parts of it."""

    size: Literal["tiny", "small", "base", "large"] = setting("base", "sets width, depth and heads")
    width: int | None = setting(None, "features of a token; default: from size", least=1)
    depth: int | None = setting(None, "number of blocks; default: from size", least=1)
    heads: int | None = setting(None, "attention heads per block; default: from size", least=1)
    image_size: int = setting(224, "height and width of an image, in pixels", least=1)
    patch_size: int = setting(16, "height and width of a patch, in pixels", least=1)
    channels: int = setting(3, "1 for gray images, 3 for color")
    classes: int = setting(1000, "number of classes")
    mlp_ratio: float = setting(4.0, "hidden features of an MLP, as a multiple of the width")
    qkv_bias: bool = setting(True, "biases for queries, keys and values")
    dropout: float = setting(0.0, "dropout probability for embeddings, attention outputs and MLPs")
    attention_dropout: float = setting(0.0, "dropout probability for attention weights")
    drop_path: float = setting(0.0, "stochastic depth of the last block (Huang et al. 2016)")


@dataclass(frozen=True)
class DataSettings(ImageFileSettings):
    """The source of the images, and how they are transformed."""

    source: Literal["digits", "folder", "fashion-mnist"] = setting(
        "folder", "folder: path/train/CLASS/* and path/val/CLASS/*, or train_list.txt, val_list.txt"
    )
    path: Path | None = setting(None, "folder of the data; not needed for digits")
    class_names: tuple[str, ...] | None = setting(
        None,
        "names of the classes, in their order, or a file of them, such as LOC_synset_mapping.txt; "
        "default: the folders of path/train, by name",
    )
    augment: bool = setting(True, "random crops and flips (digits: shifts, rotations, scalings)")
    randaugment: float = setting(
        0.0,
        "folder: strength, 0 (off) to 10, of two random operations (Cubuk et al. 2020)",
        least=0,
        most=STRONGEST,
    )
    crop_least: float = setting(
        0.08, "smallest fraction of an image's area in a random crop", above=0, most=1
    )
    center_crop: float = setting(
        0.875, "fraction of a side that an evaluation crop covers", above=0, most=1
    )
    mean: tuple[float, ...] = setting((0.5, 0.5, 0.5), "mean per channel, for pixels in [0, 1]")
    std: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5), "standard deviation per channel, for pixels in [0, 1]"
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer. Learning rates are given for the reference batch size."""

    name: Literal["adamw", "sgd"] = setting("adamw", "AdamW, or SGD with momentum")
    learning_rate: float = setting(1e-3, "peak learning rate, at the reference batch size", above=0)
    reference_batch_size: int | None = setting(
        None, "scale rates by batch_size / this; none: do not", least=1
    )
    warmup_epochs: float = setting(5.0, "epochs of linear growth from 0 to the peak", least=0)
    final_learning_rate: float = setting(0.0, "end of the cosine, at the reference batch size")
    weight_decay: float = setting(
        0.05, "weight decay; not applied to biases, norms, class token and position embedding"
    )
    betas: tuple[float, ...] = setting((0.9, 0.999), "betas of AdamW")
    momentum: float = setting(0.9, "momentum of SGD")
    clip_norm: float | None = setting(1.0, "maximum norm of the gradient")
    shard: bool = setting(False, "shard the optimizer across workers, which saves time and memory")


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of the recipe."""

    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "bfloat16, float16: with autocast; float16 also with a scaled loss"
    )
    epochs: int = setting(300, "passes over the training images")
    batch_size: int = setting(1024, "images per step, over all workers")
    label_smoothing: float = setting(0.0, "label smoothing (Szegedy et al. 2016)")
    mixup: float = setting(0.0, "alpha of the Beta distribution (Zhang et al. 2018); 0: off")
    cutmix: float = setting(
        0.0,
        "alpha of the Beta distribution (Yun et al. 2019); 0: off; a lane batch uses mixup or "
        "cutmix",
    )
    ema_decay: float | None = setting(
        None, "decay of a moving average of the parameters (EMA), which is evaluated as well"
    )
    evaluate_every: int = setting(
        1, "epochs between evaluations; the last one is evaluated as well", least=1
    )
    evaluate_batch_size: int | None = setting(
        None, "images that a worker evaluates at once (default: batch_size)", least=1
    )
    pretrained: Path | None = setting(None, "initial parameters: .safetensors, .pth, .pdparams, …")
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
