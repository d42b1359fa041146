"""Every setting of the stain recipe, with its default and what it does. The defaults are DeepLIIF's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The sizes of the networks."""

    width: int = setting(64, "features of a generator's first layer")
    blocks: int = setting(9, "residual blocks of a translation generator")
    unet_depth: int = setting(9, "halvings of the image in a segmentation generator")
    discriminator_width: int = setting(64, "features of a discriminator's first layer")
    discriminator_layers: int = setting(4, "halvings of the image in a discriminator")
    norm: Literal["batch", "instance"] = setting(
        "batch", "batch: over a lane's tiles; instance: over each tile alone"
    )
    dropout: float = setting(
        0.5, "in residual blocks and in the widest layers of a segmentation generator"
    )
    seg_weights: tuple[float, ...] | None = setting(
        None,
        "of the input's Seg and of each modality's, in their sum; default: 0.25, 0.15, 0.25, 0.1, 0.25 for four modalities, else equal",
    )


@dataclass(frozen=True)
class DataSettings:
    """Where tiles come from, and what is done to them."""

    path: Path | None = setting(
        None,
        "folder with train/*.png and val/*.png, each tiles side by side: IHC, the modalities, Seg",
    )
    load_size: int = setting(512, "tiles are resized to this height and width, in pixels")
    crop_size: int = setting(
        512, "training tiles are then cropped at random to this; held-out tiles stay whole"
    )
    flip: bool = setting(
        True, "flip half of the training tiles left to right, and half upside down"
    )
    loader_workers: int = setting(0, "processes that load images, for each worker")


@dataclass(frozen=True)
class LossSettings:
    """What the networks are trained for."""

    gan: Literal["vanilla", "lsgan"] = setting(
        "vanilla", "for modalities; vanilla: binary cross entropy of logits, lsgan: least squares"
    )
    seg_gan: Literal["vanilla", "lsgan"] = setting("lsgan", "for Seg")
    l1_weight: float = setting(100.0, "of the smooth L1 distance to the truth, beside the GAN loss")
    generator_weights: tuple[float, ...] | None = setting(
        None, "of the losses of each modality and of Seg; default: equal, 1 in all"
    )
    discriminator_weights: tuple[float, ...] | None = setting(
        None, "as generator_weights, for discriminators"
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam, one for all generators and one for all discriminators, and how their learning rates change by epoch."""

    generator_learning_rate: float = setting(2e-4, "of Adam for generators")
    discriminator_learning_rate: float = setting(2e-4, "of Adam for discriminators")
    betas: tuple[float, ...] = setting((0.5, 0.999), "of both")
    policy: Literal["linear", "step", "plateau", "cosine"] = setting(
        "linear",
        "linear: constant, then down to 0; step: times 0.1; plateau: times 0.2 when held-out L1 stays; cosine: half of one, to 0",
    )
    decay_epochs: int | None = setting(
        None, "linear: how many epochs at the end go down; default: half of them"
    )
    step_epochs: int = setting(50, "step: epochs between two steps")
    timeout: int = setting(5, "plateau: evaluations without 1% of improvement before a step")
    shard: bool = setting(
        False, "each worker updates its part of the parameters: less time and memory, same bits"
    )


@dataclass(frozen=True)
class Settings:
    """Every setting of the recipe."""

    modalities: tuple[str, ...] = setting(
        ("hematoxylin", "dapi", "lap2", "marker"),
        "names of the tiles between IHC and Seg, in their order",
    )
    epochs: int = setting(200, "passes over the training tiles")
    batch_size: int = setting(8, "strips a step, over all workers")
    lanes: int | None = setting(
        None, "slices of a batch; more lanes than workers accumulate gradients; default: workers"
    )
    seed: int = setting(0, "everything random is a function of it")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "bfloat16: autocast in forward passes"
    )
    evaluate_every: int = setting(
        1, "epochs between evaluations; the last epoch is always evaluated"
    )
    shown: int = setting(2, "held-out strips that are drawn into the record at each evaluation")
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
