"""Checkpoints of DI-engine's DQN, with its names and shapes, are read or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from recipes.atari.config import GameSettings, ModelSettings, Settings
from recipes.atari.model import QNetwork
from recipes.atari.training import load_pretrained
from recipes.pretrained import PretrainedError

ACTIONS = 6
SMALL = Settings(
    model=ModelSettings(channels=(4, 4, 8), features=8, hidden_relu=False),
    game=GameSettings(frame_size=36),
)
FULL = Settings()  # 84 pixels, as DI-engine's file for Space Invaders


class Named(nn.Module):
    """A module with other modules by name, as in the paths of a checkpoint."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def stream(features, outputs):
    hidden = nn.Sequential(nn.Linear(features, features), nn.ReLU())
    return nn.Sequential(hidden, nn.Sequential(nn.Linear(features, outputs)))


def dqn(settings, *, dueling=True):
    """Make a network with the modules of DI-engine's DQN; the last two channels are equal."""
    channels, features = settings.model.channels, settings.model.features
    layers, inputs, side = [], settings.game.frame_stack, settings.game.frame_size
    for outputs, kernel, stride in zip(channels, (8, 4, 3), (4, 2, 1), strict=True):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride), nn.ReLU()]
        inputs, side = outputs, (side - kernel) // stride + 1
    mid = nn.Linear(channels[-1] * side**2, features)
    encoder = Named(main=nn.Sequential(*layers, nn.Flatten()), mid=mid)
    names = {"A": ACTIONS, "V": 1} if dueling else {"Q": ACTIONS}
    streams = {name: stream(features, outputs) for name, outputs in names.items()}
    return Named(encoder=encoder, head=Named(**streams))


def save(path, network, **more):
    state, optimizer = network.state_dict(), torch.optim.Adam(network.parameters())
    both = {"model": state, "target_model": state, "optimizer": optimizer.state_dict()}
    torch.save({**both, "last_iter": 4000, "last_step": 40_000, **more}, path)
    return path


def values(network, frames):
    features = network.encoder.mid(network.encoder.main(frames / 255))
    if hasattr(network.head, "Q"):
        return network.head.Q(features)
    advantages = network.head.A(features)
    return advantages - advantages.mean(1, keepdim=True) + network.head.V(features)


def networks(settings):
    return {name: QNetwork(settings.model, settings.game, ACTIONS) for name in ("online", "target")}


@pytest.mark.parametrize("dueling", [True, False])
def test_a_checkpoint_of_di_engine_gives_the_same_values(dueling, tmp_path):
    theirs = dqn(SMALL, dueling=dueling)
    path = save(tmp_path / "ckpt_best.pth.tar", theirs)
    model = replace(SMALL.model, dueling=dueling)
    settings = replace(SMALL, pretrained=path, model=model)
    ours = networks(settings)
    assert load_pretrained(ours, settings, evaluates=True) == f"loaded {path}"
    frames = torch.randint(0, 256, (5, 4, 36, 36), dtype=torch.uint8)
    for network in ours.values():
        torch.testing.assert_close(network(frames), values(theirs, frames))


def test_a_checkpoint_of_di_engine_says_what_it_needs(tmp_path):
    path = save(tmp_path / "iteration_0.pth.tar", dqn(SMALL))
    model = replace(SMALL.model, hidden_relu=True, dueling=False)
    settings = replace(SMALL, pretrained=path, model=model)
    needed = r"is a DQN of DI-engine, which needs model\.hidden_relu=false model\.dueling=true"
    with pytest.raises(PretrainedError, match=needed):
        load_pretrained(networks(settings), settings, evaluates=False)
    settings = replace(settings, model=replace(SMALL.model, features=4))
    with pytest.raises(PretrainedError, match=r"encoder\.7\.weight must have shape \(4, 8\)"):
        load_pretrained(networks(settings), settings, evaluates=False)


def test_checkpoints_of_di_engine_s_own_sizes_have_our_shapes():
    with torch.device("meta"):
        theirs, ours = dqn(FULL), QNetwork(FULL.model, FULL.game, ACTIONS)
    assert theirs.encoder.mid.weight.shape == ours.encoder[7].weight.shape == (512, 3136)
    assert "head.A.1.0.weight" in theirs.state_dict()
