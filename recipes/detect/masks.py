"""CondInst's mask head: convolutions with weights that the model predicts for each object.

Tian et al. 2020, arXiv 2003.05664.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHANNELS = 8  # of the mask features and of the head's hidden layers, as in the paper
# input and output channels of 1x1 convolutions
LAYERS = ((CHANNELS + 2, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 1))
CONTROLS = sum((inputs + 1) * outputs for inputs, outputs in LAYERS)  # 169 weights and biases
REACH = 8.0  # an object's coordinates are divided by this many strides of its level
UPSAMPLING = 2  # masks are this much finer than mask features


def grid_points(height: int, width: int, stride: int, device: torch.device) -> Tensor:
    """Return x and y in pixels of the centers of a map's cells, float32 [height * width, 2]."""
    y, x = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return (torch.stack([x, y], dim=2).reshape(-1, 2) + 0.5) * stride


def mask_logits(
    features: Tensor, stride: int, controls: Tensor, points: Tensor, strides: Tensor
) -> Tensor:
    """Return the logits of objects' masks, [objects, 2 * height, 2 * width].

    features  [8, height, width]  of one image, `stride` pixels apart
    controls  [objects, 169]      weights and biases of each object's head
    points    [objects, 2]        pixels; the head sees coordinates relative to them
    strides   [objects]           of the levels that predicted the objects
    """
    _, height, width = features.shape
    objects = len(controls)
    relative = grid_points(height, width, stride, features.device) - points[:, None]
    relative = relative / (REACH * strides[:, None, None])
    # [objects, 10, height * width]
    x = torch.cat([relative.transpose(1, 2), features.flatten(1).expand(objects, -1, -1)], dim=1)
    sizes = [size for inputs, outputs in LAYERS for size in (inputs * outputs, outputs)]
    parts = iter(controls.split(sizes, dim=1))
    for number, (inputs, outputs) in enumerate(LAYERS):
        weights, biases = next(parts).view(-1, outputs, inputs), next(parts)[:, :, None]
        x = torch.baddbmm(biases, weights, x)
        if number < len(LAYERS) - 1:
            x = F.relu(x)
    logits = x.view(objects, 1, height, width).float()
    fine = F.interpolate(logits, scale_factor=UPSAMPLING, mode="bilinear", align_corners=False)
    return fine[:, 0]
