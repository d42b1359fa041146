"""The networks of DeepLIIF (Ghahremani et al. 2022, https://doi.org/10.1038/s42256-022-00471-x).

Some generators translate an IHC tile into each modality. Others segment the IHC tile and each
translation; the weighted sum of their outputs is Seg. Each generator has a discriminator. With four
modalities these are 18 networks.

Tiles are float32 in [-1, 1]. A strip is the tiles of one location: IHC, the modalities, Seg.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.settings import SettingsError
from recipes.stain.config import ModelSettings, Settings

COLORS = 3
INIT_STD = 0.02
SLOPE = 0.2  # of leaky rectifiers
MOST_WIDTHS = 8  # of U-Nets' and discriminators' widest layer, in widths of the first
SEG_WEIGHTS_OF_FOUR = (0.25, 0.15, 0.25, 0.1, 0.25)


class Networks(nn.Module):
    """All networks: `generators` and `discriminators`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.generators = Generators(settings)
        self.discriminators = Discriminators(settings)


class Generators(nn.Module):
    """A translation generator per modality; segmentation generators of IHC and each translation.

    Raises `SettingsError` if sizes or weights do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        check_sizes(settings)
        self.weights = seg_weights(settings)
        self.translation = nn.ModuleList(ResNet(settings.model) for _ in settings.modalities)
        self.segmentation = nn.ModuleList(UNet(settings.model) for _ in self.weights)
        self.apply(initialize)

    def forward(self, ihc: Tensor) -> Tensor:
        """Map IHC tiles [batch, 3, height, width] to modalities and Seg [batch, tiles, 3, …]."""
        translations = [network(ihc) for network in self.translation]
        tiles = zip(self.segmentation, [ihc, *translations], strict=True)
        seg = weighted_sum(self.weights, [network(tile) for network, tile in tiles])
        return torch.stack([*translations, seg], dim=1)


class Discriminators(nn.Module):
    """A discriminator per generator: of modalities given IHC, and of Seg given each real tile.

    Raises `SettingsError` if sizes or weights do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        check_sizes(settings)
        self.weights = seg_weights(settings)
        self.translation = nn.ModuleList(PatchGAN(settings.model) for _ in settings.modalities)
        self.segmentation = nn.ModuleList(PatchGAN(settings.model) for _ in self.weights)
        self.apply(initialize)

    def forward(self, strips: Tensor, judged: Tensor) -> list[Tensor]:
        """Return a map of logits [batch, 1, rows, columns] per modality and for Seg, high if real.

        `judged` are the modalities and Seg [batch, modalities + 1, 3, height, width] of the strips
        or generated ones.
        """
        real, (*translations, seg) = strips[:, :-1].unbind(1), judged.unbind(1)
        maps = [
            network(torch.cat([real[0], tile], dim=1))
            for network, tile in zip(self.translation, translations, strict=True)
        ]
        seg_maps = [
            network(torch.cat([tile, seg], dim=1))
            for network, tile in zip(self.segmentation, real, strict=True)
        ]
        return [*maps, weighted_sum(self.weights, seg_maps)]


class ResNet(nn.Sequential):
    """Translate tiles [batch, 3, height, width] (Johnson et al. 2016) at 1/4 of their size."""

    def __init__(self, settings: ModelSettings) -> None:
        width, bias, beyond = settings.width, has_bias(settings), settings.padding
        first = nn.Conv2d(COLORS, width, 7, padding=3, bias=bias, padding_mode=beyond)
        layers = [first, norm(settings, width), nn.ReLU()]
        for inner in (width, 2 * width):
            down = nn.Conv2d(inner, 2 * inner, 3, stride=2, padding=1, bias=bias)
            layers += [down, norm(settings, 2 * inner), nn.ReLU()]
        layers += [ResidualBlock(settings, 4 * width) for _ in range(settings.blocks)]
        for inner in (4 * width, 2 * width):
            up = nn.ConvTranspose2d(
                inner, inner // 2, 3, stride=2, padding=1, output_padding=1, bias=bias
            )
            layers += [up, norm(settings, inner // 2), nn.ReLU()]
        last = nn.Conv2d(width, COLORS, 7, padding=3, padding_mode=beyond)
        super().__init__(*layers, last, nn.Tanh())


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, settings: ModelSettings, width: int) -> None:
        super().__init__()
        first, second = (
            nn.Conv2d(
                *(width, width, 3),
                padding=1,
                bias=has_bias(settings),
                padding_mode=settings.padding,
            )
            for _ in range(2)
        )
        self.layers = nn.Sequential(
            first,
            norm(settings, width),
            nn.ReLU(),
            nn.Dropout(settings.dropout),
            second,
            norm(settings, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape [batch, width, height, width]."""
        return features + self.layers(features)


class UNet(nn.Module):
    """Segment tiles [batch, 3, height, width] (Ronneberger et al. 2015; Isola et al. 2017)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        levels = range(settings.unet_depth)
        widths = [settings.width * min(2**level, MOST_WIDTHS) for level in levels]
        self.down = nn.ModuleList(_down(settings, widths, level) for level in levels)
        self.up = nn.ModuleList(_up(settings, widths, level) for level in reversed(levels))

    def forward(self, tiles: Tensor) -> Tensor:
        """Keep the shape."""
        skipped, features = [], tiles
        for down in self.down:
            features = down(features)  # [batch, widths[level], height / 2 ** (level + 1), …]
            skipped.append(features)
        features = self.up[0](skipped.pop())
        for up in self.up[1:]:
            features = up(torch.cat([skipped.pop(), features], dim=1))
        return features


def _down(settings: ModelSettings, widths: list[int], level: int) -> nn.Sequential:
    inputs = widths[level - 1] if level else COLORS
    down = nn.Conv2d(inputs, widths[level], 4, stride=2, padding=1, bias=has_bias(settings))
    if level == 0:
        return nn.Sequential(down)
    # The innermost features may be a single pixel, which cannot be normalized.
    norms = [norm(settings, widths[level])] if level < len(widths) - 1 else []
    return nn.Sequential(nn.LeakyReLU(SLOPE), down, *norms)


def _up(settings: ModelSettings, widths: list[int], level: int) -> nn.Sequential:
    innermost = level == len(widths) - 1
    inputs = widths[level] if innermost else 2 * widths[level]  # with the skip connection
    if level == 0:
        up = nn.ConvTranspose2d(inputs, COLORS, 4, stride=2, padding=1)
        return nn.Sequential(nn.ReLU(), up, nn.Tanh())
    outputs = widths[level - 1]
    up = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=has_bias(settings))
    widest = outputs == MOST_WIDTHS * settings.width and not innermost
    dropout = nn.Dropout(settings.dropout if widest else 0.0)
    return nn.Sequential(nn.ReLU(), up, norm(settings, outputs), dropout)


class PatchGAN(nn.Sequential):
    """Return logits [batch, 1, rows, columns] of patches of two tiles (Isola et al. 2017)."""

    def __init__(self, settings: ModelSettings) -> None:
        width = settings.discriminator_width
        layers = [nn.Conv2d(2 * COLORS, width, 4, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
        for level in range(1, settings.discriminator_layers + 1):
            inputs, outputs = (width * min(2**number, MOST_WIDTHS) for number in (level - 1, level))
            stride = 2 if level < settings.discriminator_layers else 1
            down = nn.Conv2d(inputs, outputs, 4, stride=stride, padding=1, bias=has_bias(settings))
            layers += [down, norm(settings, outputs), nn.LeakyReLU(SLOPE)]
        super().__init__(*layers, nn.Conv2d(outputs, 1, 4, padding=1))


def weighted_sum(weights: tuple[float, ...], tensors: list[Tensor]) -> Tensor:
    """Return the weighted sum of tensors of one shape."""
    weighted = [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]
    return torch.stack(weighted).sum(0)


def norm(settings: ModelSettings, width: int) -> nn.Module:
    """Make the normalization of `width` features."""
    if settings.norm == "instance":
        return nn.InstanceNorm2d(width)
    return TileNorm(width) if settings.evaluate_by == "tile" else nn.BatchNorm2d(width)


class TileNorm(nn.BatchNorm2d):
    """Batch norm that uses the statistics of each tile itself in evaluation."""

    def forward(self, features: Tensor) -> Tensor:
        """Normalize features [batch, width, height, width of a tile]."""
        if self.training:
            return super().forward(features)
        return F.instance_norm(features, weight=self.weight, bias=self.bias, eps=self.eps)


def has_bias(settings: ModelSettings) -> bool:
    """Return whether convolutions before a normalization have biases; batch norm has its own."""
    return settings.norm == "instance"


def initialize(module: nn.Module) -> None:
    """Draw weights from normal distributions, as in Isola et al. 2017."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)):
        mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
        nn.init.normal_(module.weight, mean, INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def seg_weights(settings: Settings) -> tuple[float, ...]:
    """Return the weights of the segmentation generators: IHC's, then each modality's."""
    default = SEG_WEIGHTS_OF_FOUR if len(settings.modalities) == 4 else None
    return weights_for("model.seg_weights", settings.model.seg_weights or default, settings)


def weights_for(
    name: str, weights: tuple[float, ...] | None, settings: Settings
) -> tuple[float, ...]:
    """Return a weight per modality and one more; by default equal ones that sum to 1."""
    expected = len(settings.modalities) + 1
    if weights is None:
        return (1 / expected,) * expected
    if len(weights) != expected:
        numbers = f"{expected} numbers, one per modality and one more"
        raise SettingsError(f"{name} must be {numbers}, got {list(weights)}")
    return weights


def check_sizes(settings: Settings) -> None:
    """Raise `SettingsError` if the networks do not support tiles of the configured sizes."""
    model = settings.model
    # a ResNet halves twice
    unit, patch = max(4, 2**model.unet_depth), 3 * 2**model.discriminator_layers
    for name in ("load_size", "crop_size"):
        size = getattr(settings.data, name)
        if size < 1 or size % unit:
            reason = f"{unit} with model.unet_depth={model.unet_depth}"
            raise SettingsError(f"data.{name} must be a multiple of {reason}, got {size}")
        if size < patch:
            reason = f"{patch} with model.discriminator_layers={model.discriminator_layers}"
            raise SettingsError(f"data.{name} must be at least {reason}, got {size}")
    crop, load = settings.data.crop_size, settings.data.load_size
    if crop > load:
        raise SettingsError(f"data.crop_size must be at most data.load_size ({load}), got {crop}")
