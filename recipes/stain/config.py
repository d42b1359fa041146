"""The settings of the stain recipe, with their defaults (DeepLIIF's) and descriptions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.image_files import ImageFileSettings
from recipes.settings import RunSettings, SettingsError, parser, read, run_settings, setting

SIZES = ("tissue", "full")


@dataclass(frozen=True)
class ModelSettings:
    """The sizes of the networks."""

    width: int = setting(64, "features of a generator's first layer", least=1)
    blocks: int = setting(9, "residual blocks of a translation generator", least=0)
    unet_depth: int = setting(9, "how often a segmentation generator halves the image", least=2)
    discriminator_width: int = setting(64, "features of a discriminator's first layer", least=1)
    discriminator_layers: int = setting(4, "how often a discriminator halves the image", least=1)
    padding: Literal["zeros", "reflect"] = setting(
        "zeros", "beyond the border of tiles, for all translation layers but those that halve"
    )
    norm: Literal["batch", "instance"] = setting(
        "batch", "normalize over a lane's tiles (batch) or each tile (instance)"
    )
    evaluate_by: Literal["running", "tile"] = setting(
        "running", "statistics of batch norm in evaluation: of training, or of each tile itself"
    )
    dropout: float = setting(
        0.5, "dropout probability in residual blocks and in the widest layers of segmentation"
    )
    seg_weights: tuple[float, ...] | None = setting(
        None,
        "weights of the segmentations (input, then each modality) in their sum; default: "
        "0.25, 0.15, 0.25, 0.1, 0.25 for four modalities, else equal",
    )


@dataclass(frozen=True)
class DataSettings(ImageFileSettings):
    """The source of the tiles, and how they are transformed."""

    path: Path | None = setting(None, "folder with the strips train/* and val/*")
    load_size: int = setting(512, "tiles are resized to this height and width, in pixels")
    crop_size: int = setting(512, "training tiles are then randomly cropped to this size")
    flip: bool = setting(True, "flip half of the training tiles horizontally, half vertically")


@dataclass(frozen=True)
class LossSettings:
    """The losses."""

    gan: Literal["vanilla", "lsgan"] = setting(
        "vanilla", "for modalities: vanilla: cross entropy; lsgan: least squares"
    )
    seg_gan: Literal["vanilla", "lsgan"] = setting(
        "lsgan", "for Seg: vanilla: cross entropy; lsgan: least squares"
    )
    l1_weight: float = setting(
        100.0, "weight of the smooth L1 distance to the truth, relative to the GAN loss"
    )
    generator_weights: tuple[float, ...] | None = setting(
        None, "loss weight of the generators per modality and Seg; default: equal"
    )
    discriminator_weights: tuple[float, ...] | None = setting(
        None, "loss weight of the discriminators per modality and Seg; default: equal"
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam for all generators and for all discriminators, with learning rates per epoch."""

    generator_learning_rate: float = setting(
        2e-4, "learning rate of Adam for the generators", above=0
    )
    discriminator_learning_rate: float = setting(
        2e-4, "learning rate of Adam for the discriminators", above=0
    )
    reference_batch_size: int | None = setting(
        None, "scale both rates by batch_size / this; none: do not", least=1
    )
    betas: tuple[float, ...] = setting((0.5, 0.999), "betas of Adam, for both")
    policy: Literal["linear", "step", "plateau", "cosine"] = setting(
        "linear",
        "linear: constant, then linear to 0; step: times 0.1; "
        "plateau: times 0.2 when held-out L1 does not improve; cosine: half a period, to 0",
    )
    decay_epochs: int | None = setting(None, "linear: epochs of the decay; default: half of all")
    step_epochs: int = setting(50, "step: epochs between two steps", least=1)
    patience: int = setting(5, "plateau: evaluations without 1% improvement before a step")
    shard: bool = setting(False, "shard the optimizer across workers, which saves time and memory")


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of the recipe."""

    modalities: tuple[str, ...] = setting(
        ("hematoxylin", "dapi", "lap2", "marker"), "names of the tiles between IHC and Seg"
    )
    epochs: int = setting(200, "passes over the training tiles")
    batch_size: int = setting(8, "strips per step, over all workers")
    evaluate_every: int = setting(
        1, "epochs between evaluations; the last one is evaluated as well", least=1
    )
    pretrained: Path | None = setting(
        None, "initial networks: a file of an export, or DeepLIIF's folder with *_net_G1.pth …"
    )
    shown: int = setting(2, "held-out strips that are drawn at each evaluation")
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Return the flags and the settings of a command line."""
    flags_parser = parser(Settings, "Train the networks of DeepLIIF.")
    continued = "continue the run in DIR with its settings; an error if there is no run"
    flags_parser.add_argument("--continue", action="store_true", dest="resume", help=continued)
    size = "the base settings: tissue.yaml, or full.yaml with DeepLIIF's sizes"
    flags_parser.add_argument("--size", choices=SIZES, default=SIZES[0], help=size)
    pretrained = "initial networks: same as pretrained=FILE"
    flags_parser.add_argument("--pretrained", metavar="FILE", help=pretrained)
    flags = flags_parser.parse_intermixed_args(arguments)
    base = str(Path(__file__).with_name(f"{flags.size}.yaml"))
    if flags.resume:
        try:
            base = run_settings(flags.dir or Path(), continues=True)
        except SettingsError as error:
            flags_parser.error(f"--continue: {error}")
    from_flags = [f"pretrained={flags.pretrained}"] if flags.pretrained else []
    return flags, read(Settings, [base, *flags.settings, *from_flags])
