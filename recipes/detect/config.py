"""The settings of the detection recipe, with their defaults and descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.image_files import ImageFileSettings
from recipes.settings import RunSettings, setting


@dataclass(frozen=True)
class ModelSettings:
    """A ResNet, a feature pyramid and heads shared by all levels; by default ResNet-50 FCOS."""

    blocks: tuple[int, ...] = setting((3, 4, 6, 3), "residual blocks per stage; stages halve sizes")
    widths: tuple[int, ...] = setting((256, 512, 1024, 2048), "output channels per stage")
    bottleneck: int = setting(
        4, "bottleneck ratio: inner channels are width divided by this; 1: basic blocks", least=1
    )
    stem_width: int = setting(64, "channels of the first convolution, which has stride 2", least=1)
    stem_pool: bool = setting(True, "max pooling with stride 2 after the first convolution")
    strides: tuple[int, ...] = setting(
        (8, 16, 32, 64, 128), "stride of each level in pixels; doubles per level"
    )
    width: int = setting(256, "channels of the pyramid and of the heads", least=1)
    tower: int = setting(4, "convolutions of a head before its last one", least=0)
    masks: bool = setting(True, "false: boxes alone; annotations then need no segmentation")
    mask_width: int = setting(128, "channels of the mask branch", least=1)
    norm: Literal["group", "frozen"] = setting(
        "group", "of the backbone; frozen: the batch norm of the file `pretrained`, not trained"
    )
    stride_in_first: bool = setting(
        False, "halve in the first convolution of a bottleneck, as detectron2's R-50 does"
    )


@dataclass(frozen=True)
class DataSettings(ImageFileSettings):
    """A data set in COCO format (https://cocodataset.org/#format-data) and its transforms."""

    path: Path | None = setting(
        None, "folder with train.json, val.json, train/ and val/, or COCO's own with annotations/"
    )
    train_annotations: Path | None = setting(
        None, "default: path/train.json, or path/annotations/instances_train*.json"
    )
    train_images: Path | None = setting(None, "default: path/train, or path/train2017 as the file")
    val_annotations: Path | None = setting(
        None, "default: path/val.json, or path/annotations/instances_val*.json"
    )
    val_images: Path | None = setting(None, "default: path/val, or path/val2017 as the file")
    class_names: tuple[str, ...] | None = setting(
        None, "names of the categories by id; a run writes those of its training images"
    )
    short_sides: tuple[int, ...] = setting(
        (),
        "shorter sides to draw from; the last one is used in evaluation; empty: original size",
        least=1,
    )
    longest_side: int = setting(1333, "maximum pixels of the longer side", least=1)
    flip: float = setting(
        0.5, "fraction of the training images that are mirrored left to right", least=0, most=1
    )
    mean: tuple[float, ...] = setting(
        (0.485, 0.456, 0.406), "mean of red, green and blue, for pixels in [0, 1]"
    )
    std: tuple[float, ...] = setting(
        (0.229, 0.224, 0.225), "standard deviation of red, green and blue, for pixels in [0, 1]"
    )


@dataclass(frozen=True)
class LossSettings:
    """The targets of locations."""

    center_radius: float = setting(1.5, "strides from a box's center within which locations learn")
    size_per_stride: float = setting(8.0, "largest boxes of a level in strides; last level: any")
    focal_alpha: float = setting(0.25, "weight of positive locations; of negative ones: 1 - alpha")
    focal_gamma: float = setting(2.0, "reduces the weight of easy locations (Lin et al. 2017)")
    mask_locations: int = setting(4, "random locations per box that learn its mask in a step")


@dataclass(frozen=True)
class PredictSettings:
    """The selection of predictions."""

    least_score: float = setting(0.05, "minimum score of a prediction")
    candidates: int = setting(1000, "best predictions per image before suppression")
    overlap: float = setting(0.6, "intersection over union that suppresses a box of the same class")
    most: int = setting(100, "maximum predictions per image")


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer. Learning rate and numbers of steps are given for the reference batch size."""

    name: Literal["sgd", "adamw"] = setting("sgd", "SGD with momentum, or AdamW")
    learning_rate: float = setting(0.01, "peak learning rate", above=0)
    steps: int = setting(90_000, "steps of the schedule", least=1)
    warmup_steps: int = setting(500, "steps of linear growth from a third of the peak", least=0)
    decay_steps: tuple[int, ...] = setting(
        (60_000, 80_000), "steps at which the learning rate is multiplied by 0.1"
    )
    reference_batch_size: int = setting(
        16, "rate and steps are scaled from it (Goyal et al. 2017)", least=1
    )
    momentum: float = setting(0.9, "momentum of SGD")
    weight_decay: float = setting(1e-4, "weight decay; not applied to biases, norms and scales")
    clip_norm: float | None = setting(None, "maximum norm of the gradient")
    shard: bool = setting(False, "shard the optimizer across workers, which saves time and memory")


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of the recipe."""

    batch_size: int = setting(16, "images per step, over all workers", least=1)
    evaluate_every: int = setting(
        5_000, "steps between evaluations; the last one is evaluated", least=1
    )
    pretrained: Path | None = setting(
        None, "initial parameters: a file of an export, or detectron2's R-50 (its backbone)"
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    predict: PredictSettings = field(default_factory=PredictSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
