from __future__ import annotations

import builtins
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel

from recipes.pretrained import PretrainedError
from recipes.vit.config import ModelSettings
from recipes.vit.model import VisionTransformer
from recipes.vit.pretrained import load_pretrained, resized_positions

SETTINGS = ModelSettings(
    width=8, depth=2, heads=2, image_size=8, patch_size=2, channels=1, classes=3
)
PADDLE_LAYERS = {
    "patch_embed.proj": "patch_embedding.patch_embedding",
    "norm": "encoder.encoder_norm",
    "head": "classifier",
    **{
        f"blocks.{block}.{ours}": f"encoder.layers.{block}.{theirs}"
        for block in range(2)
        for ours, theirs in {
            "norm1": "attn_norm",
            "norm2": "mlp_norm",
            "attn.qkv": "attn.qkv",
            "attn.proj": "attn.out",
            "mlp.fc1": "mlp.fc1",
            "mlp.fc2": "mlp.fc2",
        }.items()
    },
}
PADDLE_TOKENS = {
    "first": {
        "cls_token": "patch_embedding.cls_token",
        "pos_embed": "patch_embedding.position_embeddings",
    },
    "second": {"cls_token": "cls_token", "pos_embed": "position_embedding"},
}


def model(seed=0, **changes):
    torch.manual_seed(seed)
    return VisionTransformer(replace(SETTINGS, **changes))


def equal(model, other, *, besides=()):
    states = model.state_dict(), other.state_dict()
    return all(
        torch.equal(states[0][name], states[1][name]) for name in states[0] if name not in besides
    )


def paddle_state(source, generation="second"):
    named = {}
    for name, value in source.state_dict().items():
        layer, _, kind = name.rpartition(".")
        array = value.numpy()
        paddle_name = PADDLE_TOKENS[generation].get(name) or f"{PADDLE_LAYERS[layer]}.{kind}"
        named[paddle_name] = array.T.copy() if array.ndim == 2 else array
    return named


def save(path, content, protocol=4):
    path.write_bytes(pickle.dumps(content, protocol))
    return path


# Files that fit


def test_safetensors_are_loaded(tmp_path):
    source, target = model(1), model(2)
    save_file(source.state_dict(), tmp_path / "a.safetensors")

    assert (
        load_pretrained(target, tmp_path / "a.safetensors")
        == f"loaded {tmp_path / 'a.safetensors'}"
    )
    assert equal(source, target)


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state},
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "pth.tar"])
def test_state_dicts_of_torch_and_timm_are_loaded(tmp_path, wrapper, suffix):
    source, target = model(1), model(2)
    torch.save(wrapper(source.state_dict()), tmp_path / f"a.{suffix}")

    load_pretrained(target, tmp_path / f"a.{suffix}")

    assert equal(source, target)


def test_averages_are_loaded_as_models(tmp_path):
    source, target = model(1), model(2)
    torch.save(AveragedModel(source).state_dict(), tmp_path / "a.pth")
    load_pretrained(target, tmp_path / "a.pth")
    assert equal(source, target)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("generation", PADDLE_TOKENS)
def test_files_of_paddlevit_are_loaded(tmp_path, generation, protocol):
    source, target = model(1), model(2)
    state = paddle_state(source, generation) | {
        "StructuredToParameterName@@": {"cls_token": "parameter_1"}
    }

    load_pretrained(target, save(tmp_path / "a.pdparams", state, protocol))

    assert equal(source, target)


class PaddleTensor:
    """Pickled as paddle.save writes tensors in nested containers."""

    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        return tuple, (("parameter_1", self.array),)


def test_checkpoints_of_paddlevit_are_loaded(tmp_path):
    source, target = model(1), model(2)
    state = OrderedDict((name, PaddleTensor(array)) for name, array in paddle_state(source).items())

    load_pretrained(
        target,
        save(tmp_path / "a.pdparams", {"model": state, "epoch": 7, "optimizer": {"step": 1}}),
    )

    assert equal(source, target)


def test_another_image_size_resizes_the_position_embedding(tmp_path):
    source, target = model(1, image_size=8), model(2, image_size=12)
    torch.save(source.state_dict(), tmp_path / "a.pth")

    report = load_pretrained(target, tmp_path / "a.pth")

    assert "position embedding resized from 17 to 37 tokens" in report
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(target.blocks[1].mlp.fc2.weight, source.blocks[1].mlp.fc2.weight)


@pytest.mark.parametrize("change", [{"classes": 5}, {}])
def test_a_head_that_does_not_fit_keeps_its_values(tmp_path, change):
    source, target, untouched = model(1, **change), model(2), model(2)
    state = source.state_dict()
    if not change:
        del state["head.weight"], state["head.bias"]
    torch.save(state, tmp_path / "a.pth")

    report = load_pretrained(target, tmp_path / "a.pth")

    assert (
        f"head not loaded: it has 3 classes, the file has {'5 classes' if change else 'none'}"
        in report
    )
    assert equal(source, target, besides=("head.weight", "head.bias"))
    assert torch.equal(target.head.weight, untouched.head.weight)
    with pytest.raises(PretrainedError, match=r"head has 3 classes, the file has .*; scores"):
        load_pretrained(model(2), tmp_path / "a.pth", evaluates=True)


# Position embeddings


@given(old=st.integers(1, 9), new=st.integers(1, 9), value=st.floats(-3, 3, width=32))
def test_a_position_embedding_that_is_the_same_everywhere_stays_so(old, new, value):
    positions = torch.full((1, 1 + old**2, 4), value)
    positions[:, 0] = torch.arange(4.0)

    resized = resized_positions(positions, 1 + new**2)

    assert torch.equal(resized[:, 0], positions[:, 0])
    torch.testing.assert_close(resized[:, 1:], torch.full((1, new**2, 4), value))


def test_a_resized_position_embedding_keeps_its_directions():
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    grid = torch.stack([rows, columns], dim=-1).reshape(1, 36, 2)
    resized = resized_positions(torch.cat([torch.zeros(1, 1, 2), grid], dim=1), 1 + 12**2)[
        0, 1:
    ].view(12, 12, 2)
    assert (resized[1:, :, 0] > resized[:-1, :, 0]).all()
    assert (resized[:, 1:, 1] > resized[:, :-1, 1]).all()
    torch.testing.assert_close(resized[..., 0], resized[..., 1].T)


def test_a_position_embedding_that_is_not_square_is_refused():
    with pytest.raises(
        PretrainedError, match="a class token and a square grid, got 18 and 17 tokens"
    ):
        resized_positions(torch.zeros(1, 18, 4), 17)


# Files that do not fit


def test_parameters_that_do_not_fit_are_listed_with_the_nearest_names(tmp_path):
    state = model(1).state_dict()
    state["blocks.0.attn.query_key_value.weight"] = state.pop("blocks.0.attn.qkv.weight")
    state["norm.weight"] = torch.zeros(9)
    target, untouched = model(2), model(2)
    torch.save(state, tmp_path / "a.pth")

    with pytest.raises(PretrainedError) as caught:
        load_pretrained(target, tmp_path / "a.pth")

    message = str(caught.value)
    assert f"{tmp_path / 'a.pth'} does not fit the model" in message
    assert (
        "blocks.0.attn.qkv.weight is missing; the nearest name in the file is "
        "blocks.0.attn.query_key_value.weight" in message
    )
    assert (
        "blocks.0.attn.query_key_value.weight is not in the model; the nearest name there is "
        "blocks.0.attn" in message
    )
    assert "norm.weight must have shape (8,), got (9,)" in message
    assert equal(target, untouched)


@pytest.mark.parametrize("content", [[1, 2], {"cls_token": 3, "pos_embed": "text"}, 5])
@pytest.mark.parametrize("suffix", ["pth", "pdparams"])
def test_a_file_without_parameters_is_named(tmp_path, content, suffix):
    file = tmp_path / f"a.{suffix}"
    torch.save(content, file) if suffix == "pth" else save(file, content)
    with pytest.raises(
        PretrainedError, match=rf"a\.{suffix}: expected (parameters|tensors) by name"
    ):
        load_pretrained(model(), file)


def test_a_file_of_another_kind_is_named(tmp_path):
    with pytest.raises(
        PretrainedError,
        match=r"expected a file that ends in \.safetensors, .*, got .*a\.onnx",
    ):
        load_pretrained(model(), tmp_path / "a.onnx")


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pdparams"])
def test_a_missing_file_is_named(tmp_path, suffix):
    with pytest.raises(PretrainedError, match=rf"a\.{suffix} cannot be read"):
        load_pretrained(model(), tmp_path / f"a.{suffix}")


WHOLE = pickle.dumps(paddle_state(model(1)), 4)


@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_torn_file_of_paddle_is_never_loaded(length):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.pdparams"
        file.write_bytes(WHOLE[:length])
        with pytest.raises(PretrainedError, match="cannot be read"):
            load_pretrained(model(), file)


# Files that would run code


class Attack:
    """A pickle of this calls `function(*arguments)` when it is read without care."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ATTACKS = {
    "system": lambda mark: Attack(os.system, f"touch {mark}"),
    "exec": lambda mark: Attack(builtins.exec, f"open({str(mark)!r}, 'w')"),
    "eval": lambda mark: Attack(builtins.eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Attack(builtins.open, str(mark), "w"),
    "getattr": lambda _: Attack(builtins.getattr, "text", "upper"),
    "array of objects": lambda mark: np.array([Attack(os.system, f"touch {mark}")], dtype=object),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("suffix", ["pdparams", "pth", "pickled.pth", "safetensors"])
def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, attack, protocol, suffix):
    mark, file = tmp_path / "mark", tmp_path / f"evil.{suffix}"
    state = dict(model(1).state_dict()) if suffix == "pth" else paddle_state(model(1))
    state["norm.weight"] = ATTACKS[attack](mark)
    if suffix == "pth":
        torch.save(state, file, pickle_protocol=protocol)
    else:
        save(file, state, protocol)
    target, untouched = model(2), model(2)

    with pytest.raises(PretrainedError, match=r"evil\..* cannot be read"):
        load_pretrained(target, file)

    assert not mark.exists()
    assert equal(target, untouched)


def test_what_was_refused_is_named(tmp_path):
    for file in (tmp_path / "a.pdparams", tmp_path / "a.pth"):
        save(file, {"norm.weight": Attack(os.system, "true")}, 2)
        with pytest.raises(PretrainedError, match=r"got (posix|nt)\.system"):
            load_pretrained(model(), file)
