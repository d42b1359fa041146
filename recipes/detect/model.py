"""The detector: a ResNet (He et al. 2016), a feature pyramid (Lin et al. 2017), FCOS heads (Tian et al. 2019) and CondInst's mask branch.

GroupNorm (Wu and He 2018) instead of BatchNorm: a lane holds few images of changing sizes, whose
statistics BatchNorm could not rely on.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.detect.masks import CHANNELS, CONTROLS, grid_points
from recipes.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recipes.detect.config import ModelSettings

MOST_GROUPS = 32
LEAST_CHANNELS_A_GROUP = 8
PRIOR = 0.01  # probability of each class at each location before training (Lin et al. 2017)
LARGEST_EXPONENT = 8.0


class Outputs(NamedTuple):
    """What the model says at each of the locations of all levels, the finest level first."""

    class_logits: Tensor  # [batch, locations, classes]
    # [batch, locations, 4]: pixels from the location to a box's left, top, right and bottom
    distances: Tensor
    centerness: Tensor  # [batch, locations]: logits of how central in its box the location is
    # [batch, locations, width]: of which `Detector.control_head` makes the weights of a mask head
    features: Tensor
    mask_features: Tensor  # [batch, 8, height, width], at the finest level's stride
    points: Tensor  # [locations, 2]: x and y in pixels
    strides: Tensor  # [locations]: of their levels

    def boxes(self) -> Tensor:
        """Return the box that each location predicts, [batch, locations, 4]."""
        return torch.cat(
            [self.points - self.distances[..., :2], self.points + self.distances[..., 2:]], dim=-1
        )


class Detector(nn.Module):
    """Images [batch, 3, height, width] to `Outputs`. Heights and widths are multiples of `multiple`. Raises `SettingsError`."""

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
        # Linear, so that it need look only at locations of which a mask is wanted: over all of them
        # it would be the costliest layer.
        self.control_head = nn.Linear(settings.width, CONTROLS)
        self.distance_scales = nn.Parameter(torch.ones(len(self.strides)))
        mask_tower = tower(settings.width, settings.mask_width, settings.tower)
        self.mask_branch = nn.Sequential(*mask_tower, nn.Conv2d(settings.mask_width, CHANNELS, 1))
        for one in (self.class_head, self.distance_head, self.centerness_head, self.control_head):
            nn.init.normal_(one.weight, std=0.01)
            nn.init.zeros_(one.bias)
        nn.init.constant_(self.class_head.bias, -math.log((1 - PRIOR) / PRIOR))

    @property
    def multiple(self) -> int:
        """What heights and widths of images must be multiples of: the stride of the backbone's last stage."""
        return max(self.backbone.widths)

    def forward(self, images: Tensor) -> Outputs:
        levels = self.pyramid(self.backbone(images))
        found = []
        for level, stride, scale in zip(levels, self.strides, self.distance_scales, strict=True):
            for_class, for_box = self.class_tower(level), self.box_tower(level)
            exponents = (scale * self.distance_head(for_box).float()).clamp(max=LARGEST_EXPONENT)
            maps = (
                self.class_head(for_class),
                exponents.exp() * stride,
                self.centerness_head(for_box),
                for_box,
            )
            points = grid_points(*level.shape[2:], stride, images.device)
            found.append(
                (
                    *(one.flatten(2).transpose(1, 2) for one in maps),
                    points,
                    torch.full_like(points[:, 0], stride),
                )
            )
        class_logits, distances, centerness, features, points, strides = zip(*found, strict=True)
        return Outputs(
            torch.cat(class_logits, 1),
            torch.cat(distances, 1),
            torch.cat(centerness, 1).squeeze(2),
            torch.cat(features, 1),
            self.mask_branch(levels[0]),
            torch.cat(points),
            torch.cat(strides),
        )


class ResNet(nn.Module):
    """A residual network that gives the outputs of all stages, by their strides."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        if (
            len(settings.blocks) != len(settings.widths)
            or not settings.blocks
            or min(settings.blocks) < 1
        ):
            raise SettingsError(
                f"model.blocks={settings.blocks} and model.widths={settings.widths} were given; expected one each a stage"
            )
        first = 4 if settings.stem_pool else 2
        # by stride
        self.widths = {first * 2**stage: width for stage, width in enumerate(settings.widths)}
        pool = [nn.MaxPool2d(3, stride=2, padding=1)] if settings.stem_pool else []
        self.stem = nn.Sequential(
            *convolution(3, settings.stem_width, kernel=7, stride=2), nn.ReLU(), *pool
        )
        self.stages = nn.ModuleList()
        inputs = settings.stem_width
        for stage, (blocks, width) in enumerate(zip(settings.blocks, settings.widths, strict=True)):
            rest = [Block(width, width, 1, settings.bottleneck) for _ in range(blocks - 1)]
            self.stages.append(
                nn.Sequential(
                    Block(inputs, width, 1 if stage == 0 else 2, settings.bottleneck), *rest
                )
            )
            inputs = width

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        x, found = self.stem(images), {}
        for stride, stage in zip(self.widths, self.stages, strict=True):
            found[stride] = x = stage(x)
        return found


class Block(nn.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions where it is a bottleneck, else two of 3x3."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: int) -> None:
        super().__init__()
        inner = width // bottleneck
        if bottleneck > 1:
            parts = [
                convolution(inputs, inner),
                convolution(inner, inner, kernel=3, stride=stride),
                convolution(inner, width),
            ]
        else:
            parts = [
                convolution(inputs, width, kernel=3, stride=stride),
                convolution(width, width, kernel=3),
            ]
        nn.init.zeros_(parts[-1][-1].weight)  # the block starts as its shortcut (Goyal et al. 2017)
        self.body = nn.Sequential(*(layer for part in parts for layer in (*part, nn.ReLU())))[:-1]
        changes = stride > 1 or inputs != width
        self.shortcut = (
            nn.Sequential(*convolution(inputs, width, stride=stride)) if changes else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Pyramid(nn.Module):
    """Levels of equal width: each stage's output plus the coarser level; coarser than the backbone by convolutions of stride 2."""

    def __init__(self, widths: Mapping[int, int], strides: Sequence[int], width: int) -> None:
        super().__init__()
        doubling = all(2 * fine == coarse for fine, coarse in pairwise(strides))
        if not doubling or not strides or strides[0] not in widths or strides[-1] < max(widths):
            raise SettingsError(
                f"model.strides={strides} was given; expected one of {sorted(widths)} first, each twice the one before it, "
                f"and {max(widths)} among them"
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


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps sizes (over `stride`), and its norm."""
    groups = next(
        n
        for n in range(min(MOST_GROUPS, max(1, outputs // LEAST_CHANNELS_A_GROUP)), 0, -1)
        if outputs % n == 0
    )
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.GroupNorm(groups, outputs),
    ]


def tower(inputs: int, width: int, depth: int) -> nn.Sequential:
    """Return `depth` convolutions of 3x3 with norms and ReLU."""
    layers = [
        layer
        for number in range(depth)
        for layer in (*convolution(width if number else inputs, width, kernel=3), nn.ReLU())
    ]
    return nn.Sequential(*layers)
