from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.gpt.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, load, save
from recipes.gpt.config import ModelSettings
from recipes.gpt.model import Decoder
from recipes.pretrained import PretrainedError

SETTINGS = ModelSettings(width=16, depth=1, heads=4, key_heads=2, hidden=24)
TEXT = SimpleNamespace(around=(0, 1), tokenizer=SimpleNamespace(save=lambda path: None))


def make(settings=SETTINGS, seed=0):
    torch.manual_seed(seed)
    return Decoder(settings, 11)


@pytest.fixture
def folder(tmp_path):
    save(make(), SETTINGS, TEXT, tmp_path / "llama")
    return tmp_path / "llama"


def edit(folder, **changes):
    path = folder / CONFIG_FILE
    content = {**json.loads(path.read_text()), **changes}
    kept = {name: value for name, value in content.items() if value != "missing"}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_read_back_with_its_bits(tied, tmp_path):
    settings = replace(SETTINGS, tied=tied)
    saved, loaded = make(settings), make(settings, seed=1)
    save(saved, settings, TEXT, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS_FILE)) != tied
    assert load(loaded, settings, tmp_path).startswith(f"parameters of {tmp_path}: ")
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied


def test_parameters_in_several_files_are_read(folder):
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    model = make(seed=1)
    load(model, SETTINGS, folder)
    assert torch.equal(model.norm.weight, make().norm.weight)
    assert torch.equal(model.embed_tokens.weight, make().embed_tokens.weight)

    (folder / "model-1.safetensors").unlink()
    with pytest.raises(PretrainedError, match=r"model-1\.safetensors does not exist$"):
        load(model, SETTINGS, folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"norm.weight": "../x"}}))
    with pytest.raises(PretrainedError, match=r"expected a weight_map to names of files"):
        load(model, SETTINGS, folder)


def test_parameters_of_other_dtypes_and_older_files_are_read(folder):
    tensors = {n: t.bfloat16() for n, t in load_file(folder / WEIGHTS_FILE).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, folder / WEIGHTS_FILE)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    edit(folder, rope_theta="missing", rope_scaling="missing", rope_parameters=rope)
    model = make(seed=1)
    load(model, SETTINGS, folder)
    expected = make().embed_tokens.weight.bfloat16().float()
    assert model.embed_tokens.weight.dtype == torch.float32
    assert torch.equal(model.embed_tokens.weight, expected)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"hidden_size": 32}, ["hidden_size is 32: set model.width=32, got 16"]),
        (
            {"num_key_value_heads": "missing", "vocab_size": 12},
            [
                "num_key_value_heads is 4: set model.key_heads=4, got 2",
                "vocab_size is 12: set model.vocabulary=12, got 11",
            ],
        ),
        (
            {"tie_word_embeddings": "missing"},
            ["tie_word_embeddings is False: set model.tied=false, got True"],
        ),
        ({"attention_bias": True}, ["attention_bias is True, which this model does not have"]),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            ["rope_type is llama3, which this model does not have"],
        ),
        ({"head_dim": 8}, ["head_dim is 8, expected hidden_size / num_attention_heads"]),
    ],
)
def test_another_shape_is_refused_with_what_to_set(changes, lines, folder):
    edit(folder, **changes)
    expected = f"{folder / CONFIG_FILE} is of another shape:\n  " + "\n  ".join(lines)
    with pytest.raises(PretrainedError, match=f"^{re.escape(expected)}$"):
        load(make(), SETTINGS, folder)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "missing", "architectures": "missing"}, "None"),
    ],
)
def test_another_architecture_is_named(changes, kind, folder):
    edit(folder, **changes)
    message = rf"config\.json is of {kind}; this recipe's model is LlamaForCausalLM"
    with pytest.raises(PretrainedError, match=message):
        load(make(), SETTINGS, folder)


def test_missing_and_damaged_files_are_named(folder, tmp_path):
    with pytest.raises(PretrainedError, match=r"none/config\.json does not exist; expected a fold"):
        load(make(), SETTINGS, tmp_path / "none")
    (folder / WEIGHTS_FILE).write_bytes(b"x" * 20)
    with pytest.raises(PretrainedError, match=r"model\.safetensors cannot be read as safetensors"):
        load(make(), SETTINGS, folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(PretrainedError, match=r"model\.safetensors does not exist$"):
        load(make(), SETTINGS, folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PretrainedError, match=r"does not exist; pickled files \(\.bin\) are not"):
        load(make(), SETTINGS, folder)
    for content in ("[]", "{"):
        (folder / CONFIG_FILE).write_text(content)
        with pytest.raises(PretrainedError, match=r"config\.json cannot be read as JSON"):
            load(make(), SETTINGS, folder)


def test_parameters_that_do_not_fit_are_listed(folder):
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(
        PretrainedError, match=r"does not fit the model:\n  norm\.weight is missing"
    ):
        load(make(), SETTINGS, folder)
