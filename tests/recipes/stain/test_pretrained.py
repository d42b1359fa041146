"""Networks in files that DeepLIIF writes: one per network, with its layers' names and shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from recipes.pretrained import PretrainedError
from recipes.stain.config import DataSettings, ModelSettings, Settings
from recipes.stain.model import Generators, Networks
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


def patch_gan(width, layers):
    widths = [width * min(2**level, 8) for level in range(layers + 1)]
    modules = [nn.Conv2d(6, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for level, (inner, outer) in enumerate(pairwise(widths), start=1):
        modules += [nn.Conv2d(inner, outer, 4, 2 if level < layers else 1, 1, bias=False)]
        modules += [nn.BatchNorm2d(outer), nn.LeakyReLU(0.2)]
    named = nn.Module()
    named.model = nn.Sequential(*modules, nn.Conv2d(outer, 1, 4, 1, 1))
    return named


def write_deepliif(folder, settings, pad="zeros", seg="S", epoch="latest", *, first=0, judges=True):
    """Write the files of all networks; return them by name, such as G1, GS0 and D1."""
    torch.manual_seed(0)
    model, count = settings.model, len(settings.modalities)
    translation = [str(number) for number in range(1, count + 1)]
    segmentation = [f"{seg}{number}" for number in range(first, first + count + 1)]
    networks = {f"G{name}": resnet(model.width, model.blocks, pad) for name in translation}
    networks |= {f"G{name}": unet(model.width, model.unet_depth) for name in segmentation}
    if judges:
        sizes = model.discriminator_width, model.discriminator_layers
        networks |= {f"D{name}": patch_gan(*sizes) for name in [*translation, *segmentation]}
    for name, network in networks.items():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        torch.save(network.state_dict(), folder / f"{epoch}_net_{name}.pth")
    return networks


@pytest.mark.parametrize(
    ("pad", "seg", "first", "epoch", "file"),
    [
        ("zeros", "S", 0, "latest", ""),
        ("zeros", "3", 1, "latest", "latest_net_G31.pth"),
        ("reflect", "S", 1, "160", "160_net_D1.pth"),
    ],
)
def test_networks_of_deepliif_make_and_judge_the_same_images(
    pad, seg, first, epoch, file, tmp_path
):
    theirs = write_deepliif(tmp_path, SETTINGS, pad, seg, epoch, first=first)
    model = replace(SETTINGS.model, padding=pad)
    settings = replace(SETTINGS, model=model, pretrained=tmp_path / file)
    networks = Networks(settings).eval()
    said = load_pretrained(networks, settings)
    assert said == f"loaded 5 generators and discriminators of DeepLIIF in {tmp_path}"

    strips = torch.rand(2, 4, 3, 32, 32) * 2 - 1
    for network in theirs.values():
        network.eval()
    translations = [theirs[f"G{number}"].model(strips[:, 0]) for number in (1, 2)]
    names = [f"{seg}{number}" for number in range(first, first + 3)]
    tiles = zip(names, [strips[:, 0], *translations], strict=True)
    made = sum(theirs[f"G{name}"].model(tile) / 3 for name, tile in tiles)
    generated = networks.generators(strips[:, 0])
    torch.testing.assert_close(generated, torch.stack([*translations, made], dim=1))

    pairs = [(f"D{number}", strips[:, 0], tile) for number, tile in enumerate(translations, 1)]
    judged = [theirs[name].model(torch.cat(tiles, dim=1)) for name, *tiles in pairs]
    seg_maps = [
        theirs[f"D{name}"].model(torch.cat([strips[:, number], made], dim=1)) / 3
        for number, name in enumerate(names)
    ]
    torch.testing.assert_close(networks.discriminators(strips, generated), [*judged, sum(seg_maps)])


def test_generators_alone_are_loaded_as_they_are_published(tmp_path):
    write_deepliif(tmp_path, SETTINGS, judges=False)
    settings = replace(SETTINGS, pretrained=tmp_path)
    networks = Networks(settings)
    before = networks.discriminators.state_dict()["translation.0.0.weight"].clone()
    said = load_pretrained(networks, settings)
    assert said == f"loaded 5 generators of DeepLIIF in {tmp_path}; discriminators: random"
    assert torch.equal(before, networks.discriminators.state_dict()["translation.0.0.weight"])


@pytest.mark.long
def test_files_of_deepliif_s_own_sizes_have_our_shapes():
    with torch.device("meta"):
        ours, width = Networks(FULL), FULL.model.width
        theirs = [resnet(width, 9, "zeros"), unet(width, 9), patch_gan(width, 4)]
    generators, discriminators = ours.generators, ours.discriminators
    matched = generators.translation[3], generators.segmentation[4], discriminators.translation[0]
    for network, other in zip(matched, theirs, strict=True):
        shapes = [[tensor.shape for tensor in n.state_dict().values()] for n in (network, other)]
        assert shapes[0] == shapes[1]
    assert next(iter(theirs[1].state_dict())) == "model.model.0.weight"
    assert "model.10.conv_block.0.weight" in theirs[0].state_dict()


def test_files_that_do_not_fit_are_named(tmp_path):
    write_deepliif(tmp_path, SETTINGS, pad="reflect")
    model = replace(SETTINGS.model, padding="reflect")

    def refused(message, file="", **changes):
        settings = replace(SETTINGS, pretrained=tmp_path / file, model=replace(model, **changes))
        with pytest.raises(PretrainedError, match=message):
            load_pretrained(Networks(settings), settings)

    refused(r"latest_net_G1\.pth.*set model\.padding=reflect", padding="zeros")
    refused(r"net_G1\.pth does not fit the model: expected \d+ tensors in the order", blocks=3)
    refused(r"net_D1\.pth does not fit the model", discriminator_layers=1)
    refused("another epoch is chosen by its file, such as latest_net_G1", "9_net_G1.pth")
    (tmp_path / "latest_net_DS1.pth").unlink()
    refused(r"latest_net_DS1\.pth cannot be read")
    (tmp_path / "latest_net_GS2.pth").unlink()
    refused(r"latest_net_GS2\.pth cannot be read")
    for file in tmp_path.iterdir():
        file.unlink()
    refused(r"must have latest_net_G1\.pth and so on; serialized models \(G1\.pt\) are not read$")


def test_an_export_is_loaded(tmp_path):
    settings = replace(SETTINGS, pretrained=tmp_path / "generators.safetensors")
    source, target = Generators(SETTINGS), Networks(SETTINGS)
    save_file(source.state_dict(), settings.pretrained)
    assert load_pretrained(target, settings) == f"loaded {settings.pretrained}"
    state = target.generators.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.state_dict().items())
