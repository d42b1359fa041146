"""Checkpoints of recipes/gpt are those of transformers' Llama, in both directions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="transformers is missing: run `make integrations`")

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import samestep as ss
from recipes.gpt import checkpoint
from recipes.gpt.config import DataSettings, ModelSettings
from recipes.gpt.data import open_text
from recipes.gpt.model import Decoder
from recipes.pretrained import PretrainedError
from tests.recipes.gpt.small import words

# transformers warns of its own options
pytestmark = pytest.mark.filterwarnings("default")
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
}
SETTINGS = {"width": 32, "depth": 2, "heads": 4, "key_heads": 2, "hidden": 64}
TEXT = SimpleNamespace(around=(0, 1), tokenizer=SimpleNamespace(save=lambda path: None))


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or it would leave a thread behind


def packed():
    """Return a batch of packed documents, whose second row begins within one."""
    documents = [torch.randint(97, (length,)) for length in (5, 12, 7)]
    rows = ss.Packed(documents, length=12)
    parts = [rows[number] for number in range(len(rows))]
    return documents, {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(("tied", "theta"), [(True, 10_000.0), (False, 500_000.0)])
def test_transformers_computes_the_logits_of_an_exported_model(tied, theta, tmp_path):
    torch.manual_seed(1)
    settings = ModelSettings(**SETTINGS, tied=tied, rope_theta=theta)
    model = Decoder(settings, 97)
    for parameter in model.parameters():  # far from what it is at the start
        parameter.data += torch.randn_like(parameter) / 10
    checkpoint.save(model, settings, TEXT, tmp_path)
    llama, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert llama.config.rope_parameters["rope_theta"] == theta
    tokens = torch.randint(97, (3, 10))
    torch.testing.assert_close(model(tokens), llama(tokens).logits, atol=1e-5, rtol=1e-5)

    documents, batch = packed()
    logits = model(batch["tokens"], batch["positions"], batch["documents"])
    expected = llama(documents[0][None]).logits
    torch.testing.assert_close(logits[:1, :5], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_checkpoint_of_transformers_is_loaded(shard_size, tmp_path):
    torch.manual_seed(2)
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    config = LlamaConfig(**SHAPE, rope_parameters=rope, tie_word_embeddings=False)
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / checkpoint.INDEX_FILE).exists() == (shard_size == "20KB")
    settings = ModelSettings(**SETTINGS, tied=False, rope_theta=50_000.0, norm_epsilon=1e-6)
    model = Decoder(settings, 97)
    checkpoint.load(model, settings, tmp_path)
    tokens = torch.randint(97, (3, 10))
    torch.testing.assert_close(model(tokens), llama(tokens).logits, atol=1e-5, rtol=1e-5)


def test_a_config_of_transformers_says_what_to_set(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    settings = ModelSettings(**{**SETTINGS, "width": 64}, norm_epsilon=1e-5)
    with pytest.raises(PretrainedError) as caught:
        checkpoint.load(Decoder(settings, 97), settings, tmp_path)
    assert "hidden_size is 32: set model.width=32, got 64" in str(caught.value)
    assert "rms_norm_eps is 1e-06: set model.norm_epsilon=1e-06, got 1e-05" in str(caught.value)
    assert "tie_word_embeddings is False: set model.tied=false, got True" in str(caught.value)


def test_transformers_reads_the_tokenizer_of_a_run(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(words(number))
    settings = DataSettings(path=tmp_path / "texts", vocabulary=280, length=16)
    text = open_text(settings, tmp_path / "text", lambda prepare: prepare(), print)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "text" / "tokenizer.json"))
    assert tokenizer.encode(words(0), add_special_tokens=False) == text.encode(words(0))[1:]
