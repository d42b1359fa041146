"""The DQN of Mnih et al. 2015 (Nature 518) on stacks of four frames, with a target network.

It has 1.7 million parameters in ten tensors.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.jobs.job import BATCHES_AN_EPOCH, Job, Parts

BATCH_SIZE = 32
ACTIONS = 6
DISCOUNT = 0.99


class QNetwork(nn.Module):
    """Compute action values, float32 [batch, actions], from uint8 frames [batch, 4, 84, 84]."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
        ]
        self.layers = nn.Sequential(
            *convolutions,
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Linear(512, ACTIONS),
        )

    def forward(self, frames: Tensor) -> Tensor:
        return self.layers(frames.float() / 255)


def td_loss(target: nn.Module, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean Huber loss of temporal differences (Mnih et al. 2015, algorithm 1)."""
    frames, actions, rewards, next_frames, ended = batch
    with torch.no_grad():
        values = rewards + DISCOUNT * (1 - ended) * target(next_frames).amax(1)  # [batch]
    return F.smooth_l1_loss(model(frames).gather(1, actions[:, None])[:, 0], values)


def transitions(size: int) -> TensorDataset:
    """Return random transitions: frames, action, reward, next frames, end of episode as 0.0 or 1.0.

    Frames are uint8 [4, 84, 84].
    """
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(256, (size + 1, 4, 84, 84), dtype=torch.uint8, generator=generator)
    actions = torch.randint(ACTIONS, (size,), generator=generator)
    rewards = torch.randn(size, generator=generator)
    ended = torch.rand(size, generator=generator).lt(0.05).float()
    return TensorDataset(frames[:-1], actions, rewards, frames[1:], ended)


def build(batch_size: int = BATCH_SIZE) -> Parts:
    """Return the job's parts. Real training, too, changes the target network only rarely."""
    torch.manual_seed(0)
    model = QNetwork()
    target = copy.deepcopy(model).requires_grad_(requires_grad=False)
    return Parts(model, transitions(BATCHES_AN_EPOCH * batch_size), partial(td_loss, target))


JOB = Job("Nature DQN network, 4x84x84 frames", BATCH_SIZE, steps=100, build=build)
