"""Backbones of other programs, in files of their real names and shapes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from recipes.detect.config import DataSettings, ModelSettings, Settings
from recipes.detect.model import Detector
from recipes.detect.pretrained import initialize
from recipes.pretrained import PretrainedError

MODEL = ModelSettings(width=8, tower=1, mask_width=8, norm="frozen", stride_in_first=True)
R50 = {"blocks": (3, 4, 6, 3), "widths": (256, 512, 1024, 2048), "stem_width": 64}
FEW = {"blocks": (1, 2, 1, 1), "widths": (16, 32, 64, 128), "stem_width": 8}
STD = [[[0.229]], [[0.224]], [[0.225]]]
KERNELS = {"conv1": 1, "conv2": 3, "conv3": 1}


def settings(path, **changes):
    model = replace(MODEL, **{name: changes[name] for name in changes if hasattr(MODEL, name)})
    data = DataSettings(**{name: changes[name] for name in changes if name in ("mean", "std")})
    return Settings(pretrained=path, model=model, data=data)


def detector(settings, classes=2):
    torch.manual_seed(3)
    return Detector(settings.model, classes)


def resnet(sizes, *, statistics=True):
    """Return the tensors of detectron2's ResNet by its names, with small random values."""
    draw, named = torch.Generator().manual_seed(1), {}

    def add(name, inputs, outputs, kernel):
        shape = (outputs, inputs, kernel, kernel)
        named[f"{name}.weight"] = torch.randn(shape, generator=draw) / (inputs * kernel**2) ** 0.5
        for kind in ("weight", "bias", *["running_mean", "running_var"] * statistics):
            named[f"{name}.norm.{kind}"] = torch.rand(outputs, generator=draw) / 2 + 0.5

    add("stem.conv1", 3, sizes["stem_width"], 7)
    inputs = sizes["stem_width"]
    for stage, (blocks, width) in enumerate(
        zip(sizes["blocks"], sizes["widths"], strict=True), start=2
    ):
        for block in range(blocks):
            if block == 0:
                add(f"res{stage}.0.shortcut", inputs, width, 1)
            inner = width // 4
            convolutions = {
                "conv1": (inputs, inner),
                "conv2": (inner, inner),
                "conv3": (inner, width),
            }
            for name, (before, after) in convolutions.items():
                add(f"res{stage}.{block}.{name}", before, after, KERNELS[name])
            inputs = width
    return named


def caffe2_name(name):
    for here, there in (
        ("stem.conv1.norm", "res_conv1_bn"),
        ("stem.conv1", "conv1"),
        (".norm", "_bn"),
        ("shortcut", "branch1"),
        *((f"conv{number}", f"branch2{letter}") for number, letter in enumerate("abc", start=1)),
    ):
        if not (there.startswith("branch") and name.startswith(("conv1", "res_conv1"))):
            name = name.replace(here, there)
    name = name.replace(".", "_")
    if name.endswith("_bn_weight"):
        return name.removesuffix("weight") + "s"
    return name.removesuffix("weight") + "w" if name.endswith("weight") else name[:-3]


def torchvision_name(name):
    name = name.removeprefix("stem.").replace("shortcut.norm", "downsample.1")
    name = name.replace("shortcut", "downsample.0")
    for number in (1, 2, 3):
        name = name.replace(f"conv{number}.norm", f"bn{number}")
    for stage in (2, 3, 4, 5):
        name = name.replace(f"res{stage}.", f"layer{stage - 1}.")
    return name


def reference(named, blocks_by_stage, images, first):
    """Return the last stage of the ResNet, as its papers define it, for images of the file."""

    def layer(x, name, stride=1):
        weight = named[f"{name}.weight"]
        x = F.conv2d(x, weight, None, stride, weight.shape[2] // 2)
        mean, variance = (
            named.get(f"{name}.norm.{kind}", default)
            for kind, default in (("running_mean", torch.zeros(x.shape[1])), ("running_var", None))
        )
        variance = torch.ones(x.shape[1]) - 1e-5 if variance is None else variance
        norm = named[f"{name}.norm.weight"], named[f"{name}.norm.bias"]
        return F.batch_norm(x, mean, variance, *norm, eps=1e-5)

    x = F.max_pool2d(layer(images, "stem.conv1", 2).relu(), 3, 2, 1)
    for stage, blocks in enumerate(blocks_by_stage, start=2):
        for block in range(blocks):
            stride, place = (2 if block == 0 and stage > 2 else 1), f"res{stage}.{block}"
            strides = (stride, 1) if first else (1, stride)
            body = layer(x, f"{place}.conv1", strides[0]).relu()
            body = layer(layer(body, f"{place}.conv2", strides[1]).relu(), f"{place}.conv3")
            x = (body + (layer(x, f"{place}.shortcut", stride) if block == 0 else x)).relu()
    return x


def arrays(named):
    return {name: tensor.numpy() for name, tensor in named.items()}


def write(path, content):
    path.write_bytes(pickle.dumps(content, 2))
    return path


def save_as(kind, named, folder):
    """Save a ResNet as a program does; return the file."""
    if kind == "caffe2":
        renamed = {caffe2_name(name): named[name] for name in named}
        return write(folder / "R-50.pkl", arrays(renamed))
    if kind == "detectron2":
        prefixed = {f"backbone.bottom_up.{name}": named[name] for name in named}
        heads = {"roi_heads.box_predictor.bbox_pred.weight": torch.zeros(8, 4)}
        content = {"model": arrays(prefixed | heads), "__author__": "Detectron2 Model Zoo"}
        return write(folder / "model_final.pkl", content)
    if kind == "torchvision":
        torch.save({torchvision_name(name): named[name] for name in named}, folder / "r50.pth")
        return folder / "r50.pth"
    content = {"model": arrays(named), "__author__": "torchvision", "matching_heuristics": True}
    return write(folder / "R-50.pkl", content)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, FEW) for kind in ("caffe2", "detectron2", "torchvision", "converted")),
        pytest.param("caffe2", R50, marks=pytest.mark.long),
    ],
)
def test_a_resnet_computes_what_it_computed_before(kind, sizes, tmp_path):
    named = resnet(sizes, statistics=kind != "caffe2")
    first, file = kind in ("caffe2", "detectron2"), save_as(kind, named, tmp_path)
    run = settings(file, stride_in_first=first, std=(0.2, 0.3, 0.4), **sizes)
    model = detector(run)
    assert "loaded the backbone" in initialize(model, run, evaluates=False)

    pixels = torch.rand(1, 3, 64, 96)  # red first, in [0, 1]
    mean = torch.tensor(run.data.mean)[:, None, None]
    theirs = (pixels - mean).flip(1) * 255 if first else (pixels - mean) / torch.tensor(STD)
    ours = (pixels - mean) / torch.tensor(run.data.std)[:, None, None]
    expected = reference(named, sizes["blocks"], theirs, first)
    torch.testing.assert_close(model.backbone(ours)[32], expected, rtol=2e-3, atol=2e-3)
    assert not [name for name, _ in model.backbone.named_parameters() if "body.1" in name]


def test_settings_that_do_not_match_a_resnet_are_named(tmp_path):
    file = save_as("caffe2", resnet(FEW, statistics=False), tmp_path)
    wrong = {"norm": "group", "stride_in_first": False, "mean": (0.5, 0.5, 0.5)}
    run = settings(file, **FEW, **wrong)
    with pytest.raises(PretrainedError) as caught:
        initialize(detector(run), run, evaluates=False)
    for setting in ("model.norm=frozen", "model.stride_in_first=true", "data.mean=[0.485, 0.456, "):
        assert setting in str(caught.value)
    with pytest.raises(PretrainedError, match="is a backbone, whose heads are not trained"):
        initialize(detector(run), run, evaluates=True)
    other = settings(file, **{**FEW, "blocks": (1, 1, 1, 1)})
    left_over = r"backbone\.stages\.1\.1\.body.* is not in the model"
    with pytest.raises(PretrainedError, match=left_over):
        initialize(detector(other), other, evaluates=False)
    alone = settings(None, **FEW)
    with pytest.raises(PretrainedError, match=r"model\.norm=frozen needs --pretrained"):
        initialize(detector(alone), alone, evaluates=False)


# Exports of the recipe

SMALL = {
    "blocks": (1, 1),
    "widths": (8, 8),
    "bottleneck": 1,
    "stem_width": 8,
    "strides": (4, 8),
    "norm": "group",
}


def exported(folder, classes=2, **changes):
    torch.manual_seed(0)
    run = settings(folder / "model.safetensors", **SMALL, **changes)
    model = Detector(run.model, classes)
    save_file(model.state_dict(), run.pretrained)
    return model, run


def equal(left, right, besides=()):
    return all(
        torch.equal(tensor, right.state_dict()[name])
        for name, tensor in left.state_dict().items()
        if not name.startswith(besides)
    )


def test_an_export_is_loaded_and_a_head_for_other_classes_is_not_evaluated(tmp_path):
    source, run = exported(tmp_path)
    target = detector(run)
    assert initialize(target, run, evaluates=True) == f"loaded {run.pretrained}"
    assert equal(source, target)

    target = detector(run, classes=5)
    said = initialize(target, run, evaluates=False)
    assert "class_head not loaded: it has 5 classes, the file has 2 classes" in said
    assert equal(source, target, besides=("class_head.",))
    with pytest.raises(PretrainedError, match="class_head has 5 classes, the file has 2 classes"):
        initialize(detector(run, classes=5), run, evaluates=True)


@pytest.mark.parametrize("masks", [True, False])
def test_masks_that_only_one_of_both_has_are_left_out(masks, tmp_path):
    source, run = exported(tmp_path, masks=masks)
    other = replace(run, model=replace(run.model, masks=not masks))
    target = detector(other)
    assert initialize(target, other, evaluates=False).endswith("mask branch not loaded")
    assert torch.equal(target.class_head.weight, source.class_head.weight)
    if masks:
        initialize(detector(other), other, evaluates=True)
    else:
        with pytest.raises(PretrainedError, match="has no mask branch"):
            initialize(detector(other), other, evaluates=True)


def test_a_frozen_norm_is_not_trained():
    model = detector(settings(None))
    assert not [1 for module in model.backbone.modules() if isinstance(module, nn.GroupNorm)]
    assert {name for name, _ in model.backbone.named_buffers()} > {"stem.1.weight", "stem.1.bias"}
