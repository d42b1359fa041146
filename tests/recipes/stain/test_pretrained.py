"""Generators in files that DeepLIIF writes: one per network, with its layers' names and shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from recipes.pretrained import PretrainedError
from recipes.stain.config import DataSettings, ModelSettings, Settings
from recipes.stain.model import Generators
from recipes.stain.pretrained import load_pretrained

SETTINGS = Settings(
    modalities=("a", "b"),
    model=ModelSettings(width=4, blocks=2, unet_depth=5, discriminator_layers=2),
    data=DataSettings(load_size=32, crop_size=32),
)
FULL = Settings()  # DeepLIIF's own sizes


class Skip(nn.Module):
    """A level of DeepLIIF's U-Net around an inner one; `model` holds the layers in its order."""

    def __init__(self, outer, inner, inputs=None, submodule=None, *, outermost=False, drops=False):
        super().__init__()
        self.outermost = outermost
        down = nn.Conv2d(inputs or outer, inner, 4, 2, 1, bias=False)
        ups = inner if submodule is None else 2 * inner
        up = nn.ConvTranspose2d(ups, outer, 4, 2, 1, bias=outermost)
        if outermost:
            layers = [down, submodule, nn.ReLU(), up, nn.Tanh()]
        else:
            middle = [] if submodule is None else [nn.BatchNorm2d(inner), submodule]
            layers = [nn.LeakyReLU(0.2), down, *middle, nn.ReLU(), up, nn.BatchNorm2d(outer)]
            layers += [nn.Dropout(0.5)] * drops
        self.model = nn.Sequential(*layers)

    def forward(self, x):
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], dim=1)


def unet(width, depth):
    block = Skip(8 * width, 8 * width)
    for _ in range(depth - 5):
        block = Skip(8 * width, 8 * width, submodule=block, drops=True)
    for times in (4, 2, 1):
        block = Skip(times * width, 2 * times * width, submodule=block)
    named = nn.Module()
    named.model = Skip(3, width, inputs=3, submodule=block, outermost=True)
    return named


class Residual(nn.Module):
    def __init__(self, width, pad):
        super().__init__()
        layers = []
        for last in (False, True):
            layers += [nn.ReflectionPad2d(1)] if pad == "reflect" else []
            layers += [nn.Conv2d(width, width, 3, padding=int(pad == "zeros"), bias=False)]
            layers += [nn.BatchNorm2d(width), *[nn.ReLU(), nn.Dropout(0.5)] * (not last)]
        self.conv_block = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.conv_block(x)


def resnet(width, blocks, pad):
    padding = nn.ReflectionPad2d if pad == "reflect" else nn.ZeroPad2d
    layers = [padding(3), nn.Conv2d(3, width, 7, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for inner in (width, 2 * width):
        layers += [nn.Conv2d(inner, 2 * inner, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * inner)]
        layers += [nn.ReLU()]
    layers += [Residual(4 * width, pad) for _ in range(blocks)]
    for inner in (4 * width, 2 * width):
        layers += [nn.ConvTranspose2d(inner, inner // 2, 3, 2, 1, output_padding=1, bias=False)]
        layers += [nn.BatchNorm2d(inner // 2), nn.ReLU()]
    named = nn.Module()
    named.model = nn.Sequential(*layers, padding(3), nn.Conv2d(width, 3, 7), nn.Tanh())
    return named


def write_deepliif(folder, settings, pad="zeros", seg="3", epoch="latest"):
    """Write the files of all generators; return the networks by name."""
    torch.manual_seed(0)
    model, count = settings.model, len(settings.modalities)
    networks = {f"G{n}": resnet(model.width, model.blocks, pad) for n in range(1, count + 1)}
    for number in range(1, count + 2):
        networks[f"G{seg}{number}"] = unet(model.width, model.unet_depth)
    for name, network in networks.items():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        torch.save(network.state_dict(), folder / f"{epoch}_net_{name}.pth")
    return networks


@pytest.mark.parametrize(
    ("pad", "seg", "epoch", "file"),
    [("zeros", "3", "latest", ""), ("reflect", "S", "160", "160_net_G1.pth")],
)
def test_generators_of_deepliif_make_the_same_images(pad, seg, epoch, file, tmp_path):
    theirs = write_deepliif(tmp_path, SETTINGS, pad, seg, epoch)
    model = replace(SETTINGS.model, padding=pad)
    settings = replace(SETTINGS, model=model, pretrained=tmp_path / file)
    generators = Generators(settings).eval()
    said = load_pretrained(generators, settings)
    assert said == f"loaded 5 generators of DeepLIIF in {tmp_path}"

    ihc = torch.rand(2, 3, 32, 32) * 2 - 1
    for network in theirs.values():
        network.eval()
    translations = [theirs[f"G{number}"].model(ihc) for number in (1, 2)]
    segmentations = [
        theirs[f"G{seg}{number}"].model(tile) / 3
        for number, tile in enumerate([ihc, *translations], start=1)
    ]
    expected = torch.stack([*translations, sum(segmentations)], dim=1)
    torch.testing.assert_close(generators(ihc), expected)


def test_files_of_deepliif_s_own_sizes_have_our_shapes():
    with torch.device("meta"):
        ours, width = Generators(FULL), FULL.model.width
        theirs = [resnet(width, 9, "zeros"), unet(width, 9)]
    for network, other in zip((ours.translation[3], ours.segmentation[4]), theirs, strict=True):
        shapes = [[tensor.shape for tensor in n.state_dict().values()] for n in (network, other)]
        assert shapes[0] == shapes[1]
    assert next(iter(theirs[1].state_dict())) == "model.model.0.weight"
    assert "model.10.conv_block.0.weight" in theirs[0].state_dict()


def test_files_that_do_not_fit_are_named(tmp_path):
    write_deepliif(tmp_path, SETTINGS, pad="reflect")
    settings = replace(SETTINGS, pretrained=tmp_path)
    with pytest.raises(PretrainedError, match=r"latest_net_G1\.pth.*set model\.padding=reflect"):
        load_pretrained(Generators(settings), settings)
    model = replace(SETTINGS.model, padding="reflect", blocks=3)
    other = replace(settings, model=model)
    with pytest.raises(PretrainedError, match=r"net_G1\.pth does not fit the model: expected \d+"):
        load_pretrained(Generators(other), other)
    other = replace(settings, model=replace(model, blocks=2))
    (tmp_path / "latest_net_G32.pth").unlink()
    with pytest.raises(PretrainedError, match=r"latest_net_G32\.pth cannot be read"):
        load_pretrained(Generators(other), other)


def test_an_export_is_loaded(tmp_path):
    settings = replace(SETTINGS, pretrained=tmp_path / "generators.safetensors")
    source, target = Generators(SETTINGS), Generators(SETTINGS)
    save_file(source.state_dict(), settings.pretrained)
    assert load_pretrained(target, settings) == f"loaded {settings.pretrained}"
    state = target.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.state_dict().items())
