"""The networks of DeepLIIF (Ghahremani et al. 2022, https://doi.org/10.1038/s42256-022-00471-x).

Generators translate an IHC tile into each modality; others segment the IHC tile and each
translation, and the weighted sum of theirs is Seg. A discriminator stands against each generator.
With four modalities these are 18 networks.

Tiles are float32 in [-1, 1]. A strip is the tiles of one place side by side: IHC, the modalities,
Seg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.settings import SettingsError

if TYPE_CHECKING:
    from recipes.stain.config import ModelSettings, Settings

COLOURS = 3
INIT_STD = 0.02
SLOPE = 0.2  # of leaky rectifiers
MOST_WIDTHS = 8  # widest layer of U-Nets and discriminators, in widths of the first
SEG_WEIGHTS_OF_FOUR = (0.25, 0.15, 0.25, 0.1, 0.25)
NORMS = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d}


class Networks(nn.Module):
    """All networks: `generators` and `discriminators`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.generators = Generators(settings)
        self.discriminators = Discriminators(settings)


class Generators(nn.Module):
    """A translation generator for each modality, and segmentation generators for the IHC tile and each translation.

    Raises `SettingsError` when sizes or weights do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        check_sizes(settings)
        self.weights = seg_weights(settings)
        self.translation = nn.ModuleList(ResNet(settings.model) for _ in settings.modalities)
        self.segmentation = nn.ModuleList(UNet(settings.model) for _ in self.weights)
        self.apply(initialise)

    def forward(self, ihc: Tensor) -> Tensor:
        """Make the modalities and Seg, [batch, modalities + 1, 3, height, width], from IHC tiles [batch, 3, height, width]."""
        translations = [network(ihc) for network in self.translation]
        seg = weighted_sum(
            self.weights,
            [
                network(tile)
                for network, tile in zip(self.segmentation, [ihc, *translations], strict=True)
            ],
        )
        return torch.stack([*translations, seg], dim=1)


class Discriminators(nn.Module):
    """One for each generator: of a modality beside IHC, and of Seg beside IHC and beside each real modality.

    Raises `SettingsError` when sizes or weights do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        check_sizes(settings)
        self.weights = seg_weights(settings)
        self.translation = nn.ModuleList(PatchGAN(settings.model) for _ in settings.modalities)
        self.segmentation = nn.ModuleList(PatchGAN(settings.model) for _ in self.weights)
        self.apply(initialise)

    def forward(self, strips: Tensor, judged: Tensor) -> list[Tensor]:
        """Judge the modalities and Seg [batch, modalities + 1, 3, height, width] of real strips, or others made for them.

        Returns a map of logits [batch, 1, rows, columns] for each modality and one for Seg, high
        where it looks real.
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
    """Translate tiles [batch, 3, height, width] into others (Johnson et al. 2016): halved twice, residual blocks, doubled twice."""

    def __init__(self, settings: ModelSettings) -> None:
        width, bias = settings.width, has_bias(settings)
        layers = [
            nn.Conv2d(COLOURS, width, 7, padding=3, bias=bias),
            norm(settings, width),
            nn.ReLU(),
        ]
        for inner in (width, 2 * width):
            layers += [
                nn.Conv2d(inner, 2 * inner, 3, stride=2, padding=1, bias=bias),
                norm(settings, 2 * inner),
                nn.ReLU(),
            ]
        layers += [ResidualBlock(settings, 4 * width) for _ in range(settings.blocks)]
        for inner in (4 * width, 2 * width):
            up = nn.ConvTranspose2d(
                inner, inner // 2, 3, stride=2, padding=1, output_padding=1, bias=bias
            )
            layers += [up, norm(settings, inner // 2), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(width, COLOURS, 7, padding=3), nn.Tanh())


class ResidualBlock(nn.Module):
    """Two convolutions, added to what they saw."""

    def __init__(self, settings: ModelSettings, width: int) -> None:
        super().__init__()
        first, second = (
            nn.Conv2d(width, width, 3, padding=1, bias=has_bias(settings)) for _ in range(2)
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
    """Segment tiles [batch, 3, height, width] (Ronneberger et al. 2015, as in Isola et al. 2017)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        widths = [
            settings.width * min(2**level, MOST_WIDTHS) for level in range(settings.unet_depth)
        ]
        self.down = nn.ModuleList(
            _down(settings, widths, level) for level in range(settings.unet_depth)
        )
        self.up = nn.ModuleList(
            _up(settings, widths, level) for level in reversed(range(settings.unet_depth))
        )

    def forward(self, tiles: Tensor) -> Tensor:
        """Keep the shape."""
        passed, features = [], tiles
        for down in self.down:
            features = down(features)  # [batch, widths[level], height / 2 ** (level + 1), …]
            passed.append(features)
        features = self.up[0](passed.pop())
        for up in self.up[1:]:
            features = up(torch.cat([passed.pop(), features], dim=1))
        return features


def _down(settings: ModelSettings, widths: list[int], level: int) -> nn.Sequential:
    if level == 0:
        return nn.Sequential(
            nn.Conv2d(COLOURS, widths[0], 4, stride=2, padding=1, bias=has_bias(settings))
        )
    layers = [
        nn.LeakyReLU(SLOPE),
        nn.Conv2d(
            widths[level - 1], widths[level], 4, stride=2, padding=1, bias=has_bias(settings)
        ),
    ]
    # The innermost features may be a single pixel, over which nothing can be normalised.
    return (
        nn.Sequential(*layers)
        if level == len(widths) - 1
        else nn.Sequential(*layers, norm(settings, widths[level]))
    )


def _up(settings: ModelSettings, widths: list[int], level: int) -> nn.Sequential:
    innermost = level == len(widths) - 1
    given = widths[level] if innermost else 2 * widths[level]  # with what was passed over
    if level == 0:
        return nn.Sequential(
            nn.ReLU(), nn.ConvTranspose2d(given, COLOURS, 4, stride=2, padding=1), nn.Tanh()
        )
    made = widths[level - 1]
    up = nn.ConvTranspose2d(given, made, 4, stride=2, padding=1, bias=has_bias(settings))
    dropped = made == MOST_WIDTHS * settings.width and not innermost
    return nn.Sequential(
        nn.ReLU(), up, norm(settings, made), nn.Dropout(settings.dropout if dropped else 0.0)
    )


class PatchGAN(nn.Sequential):
    """Judge overlapping patches of two tiles [batch, 6, height, width]: logits [batch, 1, rows, columns] (Isola et al. 2017)."""

    def __init__(self, settings: ModelSettings) -> None:
        width = settings.discriminator_width
        layers = [nn.Conv2d(2 * COLOURS, width, 4, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
        for level in range(1, settings.discriminator_layers + 1):
            given, made = (width * min(2**number, MOST_WIDTHS) for number in (level - 1, level))
            stride = 2 if level < settings.discriminator_layers else 1
            convolution = nn.Conv2d(
                given, made, 4, stride=stride, padding=1, bias=has_bias(settings)
            )
            layers += [convolution, norm(settings, made), nn.LeakyReLU(SLOPE)]
        super().__init__(*layers, nn.Conv2d(made, 1, 4, padding=1))


def weighted_sum(weights: tuple[float, ...], tensors: list[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, each times its weight."""
    return torch.stack(
        [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]
    ).sum(0)


def norm(settings: ModelSettings, width: int) -> nn.Module:
    """Make the normalisation of `width` features."""
    return NORMS[settings.norm](width)


def has_bias(settings: ModelSettings) -> bool:
    """Tell whether convolutions before a normalisation have biases: batch normalisation has its own."""
    return settings.norm == "instance"


def initialise(module: nn.Module) -> None:
    """Draw weights of convolutions from a normal distribution around 0, of batch normalisations around 1 (Isola et al. 2017)."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)):
        nn.init.normal_(
            module.weight, mean=1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, std=INIT_STD
        )
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def seg_weights(settings: Settings) -> tuple[float, ...]:
    """Return the weights of the segmentation generators: of IHC's, then of each modality's."""
    of_four = (
        SEG_WEIGHTS_OF_FOUR if len(settings.modalities) == len(SEG_WEIGHTS_OF_FOUR) - 1 else None
    )
    return weights_for("model.seg_weights", settings.model.seg_weights or of_four, settings)


def weights_for(
    name: str, given: tuple[float, ...] | None, settings: Settings
) -> tuple[float, ...]:
    """Return one weight a modality and one more, or equal ones that sum to 1. Raises `SettingsError` for another number of them."""
    expected = len(settings.modalities) + 1
    if given is None:
        return (1 / expected,) * expected
    if len(given) != expected:
        raise SettingsError(
            f"{name}={list(given)} was given; expected {expected} numbers for {len(settings.modalities)} modalities and one more"
        )
    return given


def check_sizes(settings: Settings) -> None:
    """Raise `SettingsError` when the networks cannot see tiles of the configured sizes."""
    model = settings.model
    for name, least in (
        ("width", 1),
        ("blocks", 0),
        ("unet_depth", 2),
        ("discriminator_width", 1),
        ("discriminator_layers", 1),
    ):
        if getattr(model, name) < least:
            raise SettingsError(
                f"model.{name}={getattr(model, name)} was given; expected at least {least}"
            )
    # a ResNet halves twice
    unit, patch = max(4, 2**model.unet_depth), 3 * 2**model.discriminator_layers
    for name in ("load_size", "crop_size"):
        size = getattr(settings.data, name)
        if size < 1 or size % unit:
            raise SettingsError(
                f"data.{name}={size} was given; expected a multiple of {unit} with model.unet_depth={model.unet_depth}"
            )
        if size < patch:
            raise SettingsError(
                f"data.{name}={size} was given; expected at least {patch} with model.discriminator_layers={model.discriminator_layers}"
            )
    if settings.data.crop_size > settings.data.load_size:
        raise SettingsError(
            f"data.crop_size={settings.data.crop_size} is larger than data.load_size={settings.data.load_size}"
        )
