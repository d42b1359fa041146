"""Every setting of the detection recipe, with its default and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The model: a ResNet, a feature pyramid, and heads that all levels share. The defaults are those of ResNet-50 FCOS."""

    blocks: tuple[int, ...] = setting(
        (3, 4, 6, 3), "residual blocks of each stage; a stage halves the size of the one before it"
    )
    widths: tuple[int, ...] = setting((256, 512, 1024, 2048), "channels that each stage gives")
    bottleneck: int = setting(
        4, "a block's inner channels are its width / this; 1: basic blocks of two 3x3 convolutions"
    )
    stem_width: int = setting(64, "channels of the first convolution, which has stride 2")
    stem_pool: bool = setting(True, "max pooling of stride 2 after it")
    strides: tuple[int, ...] = setting(
        (8, 16, 32, 64, 128), "of the pyramid's levels, in pixels; each twice the one before it"
    )
    width: int = setting(256, "channels of the pyramid and of the heads")
    tower: int = setting(4, "convolutions of a head before its last")
    mask_width: int = setting(128, "channels of the mask branch")


@dataclass(frozen=True)
class DataSettings:
    """A data set in COCO format (https://cocodataset.org/#format-data), and what is done to its images."""

    path: Path | None = setting(
        None, "folder with train.json, val.json and the images in train/ and val/"
    )
    train_annotations: Path | None = setting(None, "instead of path/train.json")
    train_images: Path | None = setting(None, "instead of path/train")
    val_annotations: Path | None = setting(None, "instead of path/val.json")
    val_images: Path | None = setting(None, "instead of path/val")
    short_sides: tuple[int, ...] = setting(
        (),
        "shorter side of an image in pixels, drawn from these; evaluation: the last; empty: as it is",
    )
    longest_side: int = setting(1333, "most that the longer side may get, in pixels")
    flip: float = setting(0.5, "part of training images that are mirrored left to right")
    mean: tuple[float, ...] = setting(
        (0.485, 0.456, 0.406), "of red, green and blue in [0, 1]; subtracted"
    )
    std: tuple[float, ...] = setting(
        (0.229, 0.224, 0.225), "of red, green and blue in [0, 1]; divided by"
    )
    loader_workers: int = setting(0, "processes that load images, for each worker")


@dataclass(frozen=True)
class LossSettings:
    """Which locations learn what."""

    center_radius: float = setting(
        1.5, "a location learns the box whose centre is at most this many strides away"
    )
    size_per_stride: float = setting(
        8.0,
        "a level learns boxes that reach up to this many of its strides; the last level all larger ones",
    )
    focal_alpha: float = setting(
        0.25,
        "weight of positive locations in the focal loss; negative ones get 1 - alpha (Lin et al. 2017)",
    )
    focal_gamma: float = setting(2.0, "how little easy locations count in the focal loss")
    mask_locations: int = setting(
        4, "most locations of a box that learn its mask in a step, drawn at random"
    )


@dataclass(frozen=True)
class PredictSettings:
    """What becomes of a model's outputs in evaluation."""

    least_score: float = setting(0.05, "of a prediction")
    candidates: int = setting(1000, "likeliest ones of an image, before suppression")
    overlap: float = setting(
        0.6,
        "intersection over union from which the less likely of two boxes of a class is suppressed",
    )
    most: int = setting(100, "predictions an image")


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are updated. Learning rate and numbers of steps are those at the reference batch size."""

    name: Literal["sgd", "adamw"] = setting(
        "sgd", "SGD with momentum, or AdamW (Loshchilov and Hutter 2019)"
    )
    learning_rate: float = setting(0.01, "peak, at the reference batch size")
    steps: int = setting(90_000, "updates of the whole schedule, at the reference batch size")
    warmup_steps: int = setting(
        500, "of linear growth from a third of the peak, at the reference batch size"
    )
    decay_steps: tuple[int, ...] = setting(
        (60_000, 80_000), "at which the learning rate falls to a tenth, at the reference batch size"
    )
    reference_batch_size: int = setting(
        16, "half the batch size: half the learning rate and twice the steps (Goyal et al. 2017)"
    )
    momentum: float = setting(0.9, "of SGD")
    weight_decay: float = setting(1e-4, "of weights; never of biases, norms and scales")
    clip_norm: float | None = setting(None, "largest norm of the gradient")
    shard: bool = setting(
        False, "each worker updates its part of the parameters: less time and memory, same bits"
    )


@dataclass(frozen=True)
class Settings:
    """Every setting of the recipe."""

    batch_size: int = setting(16, "images a step, over all workers")
    lanes: int | None = setting(
        None, "slices of a batch; more lanes than workers accumulate gradients; default: workers"
    )
    seed: int = setting(0, "everything random is a function of it")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "bfloat16: autocast in forward passes"
    )
    evaluate_every: int = setting(
        5_000, "steps between evaluations; the last step is always evaluated"
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    predict: PredictSettings = field(default_factory=PredictSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
