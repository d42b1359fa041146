"""A ResNet (He et al. 2016) with a feature pyramid (Lin et al. 2017), FCOS heads and mask branch.

FCOS is Tian et al. 2019, the mask branch that of CondInst (Tian et al. 2020). GroupNorm (Wu and He
2018) replaces BatchNorm, because a lane has too few images for BatchNorm's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.detect.config import ModelSettings
from recipes.detect.masks import CHANNELS, CONTROLS, grid_points
from recipes.settings import SettingsError

MOST_GROUPS = 32
LEAST_CHANNELS_PER_GROUP = 8
PRIOR = 0.01  # probability of each class at each location before training (Lin et al. 2017)
LARGEST_EXPONENT = 8.0


class Outputs(NamedTuple):
    """The model's outputs at the locations of all levels, the finest level first."""

    class_logits: Tensor  # [batch, locations, classes]
    distances: Tensor  # [batch, locations, 4]: pixels to a box's left, top, right and bottom
    centerness: Tensor  # [batch, locations]: logits of how central the location is in its box
    features: Tensor  # [batch, locations, width]: input of `Detector.control_head`
    mask_features: Tensor | None  # [batch, 8, height, width], at the finest level's stride
    points: Tensor  # [locations, 2]: x and y in pixels
    strides: Tensor  # [locations]: of their levels

    def boxes(self) -> Tensor:
        """Return the box that each location predicts, [batch, locations, 4]."""
        before, behind = self.distances[..., :2], self.distances[..., 2:]
        return torch.cat([self.points - before, self.points + behind], dim=-1)


class Detector(nn.Module):
    """Map images [batch, 3, height, width] to `Outputs`. Raises `SettingsError`.

    Heights and widths must be multiples of `multiple`.
    """

    def __init__(self, settings: ModelSettings, classes: int) -> None:
        super().__init__()
        self.strides = settings.strides
        self.backbone = ResNet(settings)
        self.pyramid = Pyramid(self.backbone.widths, settings.strides, settings.width)
        self.class_tower, self.box_tower = (
            tower(settings.width, settings.width, settings.tower) for _ in range(2)
        )
        head = partial(nn.Conv2d, settings.width, kernel_size=3, padding=1)
        self.class_head, self.distance_head, self.centerness_head = head(classes), head(4), head(1)
        # A linear layer can be applied to the locations that need a mask. Applied to all locations,
        # it would be the most expensive layer.
        self.control_head = nn.Linear(settings.width, CONTROLS) if settings.masks else None
        self.distance_scales = nn.Parameter(torch.ones(len(self.strides)))
        self.mask_branch = None
        heads = [self.class_head, self.distance_head, self.centerness_head]
        if settings.masks:
            mask_tower = tower(settings.width, settings.mask_width, settings.tower)
            last = nn.Conv2d(settings.mask_width, CHANNELS, 1)
            self.mask_branch = nn.Sequential(*mask_tower, last)
            heads.append(self.control_head)
        for layer in heads:
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.class_head.bias, -math.log((1 - PRIOR) / PRIOR))

    @property
    def has_masks(self) -> bool:
        """Whether masks are predicted."""
        return self.mask_branch is not None

    @property
    def multiple(self) -> int:
        """The stride of the backbone's last stage; image sides must be multiples of it."""
        return max(self.backbone.widths)

    def forward(self, images: Tensor) -> Outputs:
        finest, *_ = levels = self.pyramid(self.backbone(images))
        level_outputs = []
        for level, stride, scale in zip(levels, self.strides, self.distance_scales, strict=True):
            for_class, for_box = self.class_tower(level), self.box_tower(level)
            exponents = (scale * self.distance_head(for_box).float()).clamp(max=LARGEST_EXPONENT)
            distances, centerness = exponents.exp() * stride, self.centerness_head(for_box)
            maps = (self.class_head(for_class), distances, centerness, for_box)
            points = grid_points(*level.shape[2:], stride, images.device)
            flat = [output_map.flatten(2).transpose(1, 2) for output_map in maps]
            level_outputs.append((*flat, points, torch.full_like(points[:, 0], stride)))
        *maps, points, strides = zip(*level_outputs, strict=True)
        class_logits, distances, centerness, features = (torch.cat(levels, 1) for levels in maps)
        return Outputs(
            class_logits,
            distances,
            centerness.squeeze(2),
            features,
            self.mask_branch(finest) if self.has_masks else None,
            torch.cat(points),
            torch.cat(strides),
        )


class ResNet(nn.Module):
    """A residual network that returns the outputs of all stages by stride."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        sizes = f"model.blocks={settings.blocks} and model.widths={settings.widths}"
        if len(settings.blocks) != len(settings.widths) or min(settings.blocks, default=0) < 1:
            raise SettingsError(f"expected a positive number per stage, got {sizes}")
        finest = 4 if settings.stem_pool else 2  # stride of the first stage
        self.widths = {finest * 2**stage: width for stage, width in enumerate(settings.widths)}
        pool = [nn.MaxPool2d(3, stride=2, padding=1)] if settings.stem_pool else []
        self.stem = nn.Sequential(
            *convolution(3, settings.stem_width, kernel=7, stride=2, norm=settings.norm),
            nn.ReLU(),
            *pool,
        )
        self.stages = nn.ModuleList()
        inputs = settings.stem_width
        for stage, (blocks, width) in enumerate(zip(settings.blocks, settings.widths, strict=True)):
            first = Block(settings, inputs, width, 1 if stage == 0 else 2)
            rest = [Block(settings, width, width, 1) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(first, *rest))
            inputs = width

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        x, features = self.stem(images), {}
        for stride, stage in zip(self.widths, self.stages, strict=True):
            features[stride] = x = stage(x)
        return features


class Block(nn.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions if it is a bottleneck, else two of 3x3."""

    def __init__(self, settings: ModelSettings, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        inner, make = width // settings.bottleneck, partial(convolution, norm=settings.norm)
        if settings.bottleneck > 1:
            strides = (stride, 1) if settings.stride_in_first else (1, stride)
            parts = [
                make(inputs, inner, stride=strides[0]),
                make(inner, inner, kernel=3, stride=strides[1]),
                make(inner, width),
            ]
        else:
            parts = [
                make(inputs, width, kernel=3, stride=stride),
                make(width, width, kernel=3),
            ]
        nn.init.zeros_(parts[-1][-1].weight)  # start as the shortcut (Goyal et al. 2017)
        self.body = nn.Sequential(*(layer for part in parts for layer in (*part, nn.ReLU())))[:-1]
        same = stride == 1 and inputs == width
        shortcut = [] if same else make(inputs, width, stride=stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Pyramid(nn.Module):
    """Levels of equal width: each stage's output plus the upsampled coarser level.

    Convolutions of stride 2 add levels that are coarser than the backbone's.
    """

    def __init__(self, widths: Mapping[int, int], strides: Sequence[int], width: int) -> None:
        super().__init__()
        doubling = all(2 * fine == coarse for fine, coarse in pairwise(strides))
        if not doubling or not strides or strides[0] not in widths or strides[-1] < max(widths):
            raise SettingsError(
                f"model.strides must start with one of {sorted(widths)}, double at each level and "
                f"include {max(widths)}, got {strides}"
            )
        self.own_strides = [stride for stride in strides if stride in widths]
        self.laterals = nn.ModuleList(
            nn.Conv2d(widths[stride], width, 1) for stride in self.own_strides
        )
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in self.own_strides)
        self.coarser = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride=2, padding=1)
            for _ in strides[len(self.own_strides) :]
        )

    def forward(self, stages: dict[int, Tensor]) -> Sequence[Tensor]:
        merged: list[Tensor] = []
        for stride, lateral in reversed(list(zip(self.own_strides, self.laterals, strict=True))):
            level = lateral(stages[stride])
            merged.insert(0, level + F.interpolate(merged[0], scale_factor=2) if merged else level)
        levels = [smooth(level) for smooth, level in zip(self.smooth, merged, strict=True)]
        for coarser in self.coarser:
            levels.append(coarser(F.relu(levels[-1])))
        return levels


class FrozenNorm(nn.Module):
    """Batch norm with constant statistics: a factor and an offset per channel, not trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift features [batch, channels, height, width]."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return x * weight[:, None, None] + bias[:, None, None]


def convolution(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, norm: str = "group"
) -> list[nn.Module]:
    """Make a convolution that divides sizes by `stride`, and its norm."""
    largest = min(MOST_GROUPS, max(1, outputs // LEAST_CHANNELS_PER_GROUP))
    groups = next(number for number in range(largest, 0, -1) if outputs % number == 0)
    convolved = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolved, FrozenNorm(outputs) if norm == "frozen" else nn.GroupNorm(groups, outputs)]


def tower(inputs: int, width: int, depth: int) -> nn.Sequential:
    """Make `depth` convolutions of 3x3 with norms and ReLU."""
    layers = [
        layer
        for number in range(depth)
        for layer in (*convolution(width if number else inputs, width, kernel=3), nn.ReLU())
    ]
    return nn.Sequential(*layers)
