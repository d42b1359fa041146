"""Initialize a detector with another run's parameters, or its backbone with a ResNet's.

A ResNet-50 may be of detectron2 (its R-50.pkl with Caffe2's names, or a trained model), of
maskrcnn-benchmark, or of torchvision. Their batch norm becomes `model.norm=frozen`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from recipes.detect.config import Settings
from recipes.detect.model import Detector
from recipes.pretrained import (
    PretrainedError,
    check_fit,
    load,
    read_file,
    read_parameters,
    renamed,
)

MEAN = (0.485, 0.456, 0.406)  # of red, green and blue, for all of these files
STD = (0.229, 0.224, 0.225)  # of torchvision; the others see pixels from 0 to 255, blue first
EPSILON = 1e-5  # of batch norm
TORCHVISION = "torchvision"
MASKS = ("mask_branch.", "control_head.")

CAFFE2_ENDS = {
    "w": "weight",
    "bn_s": "norm.weight",
    "bn_b": "norm.bias",
    "bn_rm": "norm.running_mean",
    "bn_riv": "norm.running_var",
}
CAFFE2_BRANCHES = {
    "branch1": "shortcut",
    "branch2a": "conv1",
    "branch2b": "conv2",
    "branch2c": "conv3",
}
CAFFE2_BLOCK = re.compile(r"res(\d)_(\d+)_(branch\w+?)_(w|bn_\w+)")
CAFFE2_STEM = re.compile(r"(?:res_)?conv1_(w|bn_\w+)")
TORCHVISION_NAMES = (  # to detectron2's
    (r"^layer([1-4])\.", lambda match: f"res{int(match[1]) + 1}."),
    (r"downsample\.0\.", "shortcut."),
    (r"downsample\.1\.", "shortcut.norm."),
    (r"(^|\.)bn([123])\.", r"\1conv\2.norm."),
    (r"^conv1\.", "stem.conv1."),
)
PREFIX = re.compile(r"^backbone\.(bottom_up\.|body\.)?")
BLOCK = re.compile(r"res([2-5])\.(\d+)\.(?:conv([123])|shortcut)\.(.+)")
STEM = re.compile(r"stem\.conv1\.(.+)")


def initialize(model: Detector, settings: Settings, *, evaluates: bool) -> str:
    """Load the file `pretrained`, if any, and describe the initial parameters.

    Heads for other classes, and masks that the file or the model lacks, are not loaded. Raises
    `PretrainedError` if parameters do not fit, and if parts are missing that `evaluates` needs.
    """
    path = settings.pretrained
    if path is None:
        if settings.model.norm == "frozen":
            needed = "--pretrained FILE with the statistics of its batch norm"
            raise PretrainedError(f"model.norm=frozen needs {needed}")
        return "initial parameters: random"
    saved = read_parameters(path)
    backbone = {renamed: name for name in saved if (renamed := detectron2_name(name))}
    if backbone:
        if evaluates:
            raise PretrainedError(f"{path} is a backbone, whose heads are not trained: no scores")
        of_backbone = {name: saved[old] for name, old in backbone.items()}
        return load_backbone(model, settings, of_backbone, is_torchvision(path, saved))
    state, notes = model.state_dict(), []
    masks_in_both = {any(name.startswith(MASKS) for name in names) for names in (saved, state)}
    if masks_in_both == {False, True}:
        if evaluates and model.has_masks:
            raise PretrainedError(f"{path} has no mask branch: evaluate with model.masks=false")
        saved = {name: tensor for name, tensor in saved.items() if not name.startswith(MASKS)}
        saved |= {name: tensor for name, tensor in state.items() if name.startswith(MASKS)}
        notes = ["mask branch not loaded"]
    notes += load(model, saved, path, head="class_head", outputs="classes", evaluates=evaluates)
    return "; ".join([f"loaded {path}", *notes])


def load_backbone(
    model: Detector, settings: Settings, saved: Mapping[str, Tensor], torchvision: bool
) -> str:
    """Load a ResNet's parameters, with detectron2's names, into the backbone; describe it.

    The first convolution is changed to images that are red first and have `data.std`. Raises
    `PretrainedError` if settings do not match the file, and for parameters that do not fit.
    """
    path, first = settings.pretrained, not torchvision
    wrong = {
        "model.norm=frozen": settings.model.norm != "frozen",
        f"model.stride_in_first={str(first).lower()}": settings.model.stride_in_first != first,
        f"data.mean={list(MEAN)}": tuple(settings.data.mean) != MEAN,
    }
    if needed := " ".join(f"{text!r}" for text, is_wrong in wrong.items() if is_wrong):
        raise PretrainedError(f"{path} is a ResNet with batch norm, which needs {needed}")
    parameters: dict[str, Tensor] = {}
    for name in saved:
        parameters |= _converted(name, saved)
    stem = parameters.get("backbone.stem.0.weight")
    if stem is not None:
        red_first = stem if torchvision else stem.flip(1)  # [width, 3, 7, 7]
        scale = torch.tensor(settings.data.std) * (1 / torch.tensor(STD) if torchvision else 255.0)
        parameters["backbone.stem.0.weight"] = red_first * scale[:, None, None]
    state = model.state_dict()
    of_backbone = {name: state[name] for name in state if name.startswith("backbone.")}
    check_fit(path, parameters, of_backbone)
    model.load_state_dict(state | parameters)
    return f"loaded the backbone of {path}; pyramid and heads: random"


def is_torchvision(path: Path, saved: Mapping[str, Tensor]) -> bool:
    """Return whether a ResNet is torchvision's, or converted from it for detectron2."""
    content = read_file(path) if path.suffix == ".pkl" else {}
    author = content.get("__author__") if isinstance(content, Mapping) else None
    return author == TORCHVISION or "layer1.0.conv1.weight" in saved


def detectron2_name(name: str) -> str | None:
    """Return detectron2's name of a backbone's tensor, None for all other tensors."""
    if block := CAFFE2_BLOCK.fullmatch(name):
        stage, number, branch, end = block.groups()
        if branch in CAFFE2_BRANCHES and end in CAFFE2_ENDS:
            return f"res{stage}.{number}.{CAFFE2_BRANCHES[branch]}.{CAFFE2_ENDS[end]}"
    if (stem := CAFFE2_STEM.fullmatch(name)) and stem[1] in CAFFE2_ENDS:
        return f"stem.conv1.{CAFFE2_ENDS[stem[1]]}"
    short = PREFIX.sub("", name)
    if short.startswith("stem.bn1."):  # of maskrcnn-benchmark
        short = short.removeprefix("stem.")
    short = renamed(short, TORCHVISION_NAMES)
    if short.endswith("num_batches_tracked"):
        return None
    return short if BLOCK.fullmatch(short) or STEM.fullmatch(short) else None


def _converted(name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a convolution under our name, or a batch norm as a factor and an offset."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight":  # the other tensors of a norm come with its weight
        return {}
    if not layer.endswith(".norm"):
        return {f"{_ours(layer, 0)}.weight": saved[name]}
    weight, bias = saved[name], saved[f"{layer}.bias"]
    # Caffe2's R-50 has the statistics in factor and offset already
    if f"{layer}.running_var" in saved:
        weight = weight / (saved[f"{layer}.running_var"] + EPSILON).sqrt()
        bias = bias - saved[f"{layer}.running_mean"] * weight
    ours = _ours(layer.removesuffix(".norm"), 1)
    return {f"{ours}.weight": weight, f"{ours}.bias": bias}


def _ours(layer: str, offset: int) -> str:
    """Return our name of a layer's convolution (offset 0) or norm (1)."""
    if layer == "stem.conv1":
        return f"backbone.stem.{offset}"
    stage, block, part = layer.split(".")
    place = f"backbone.stages.{int(stage.removeprefix('res')) - 2}.{block}"
    if part == "shortcut":
        return f"{place}.shortcut.{offset}"
    return f"{place}.body.{3 * (int(part.removeprefix('conv')) - 1) + offset}"
