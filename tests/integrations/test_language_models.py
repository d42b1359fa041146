"""LoRA, as on docs/lora.md: the same adapters at any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is missing: run `make integrations`")
pytest.importorskip("transformers", reason="transformers is missing: run `make integrations`")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import samestep as ss
from samestep.cli import main
from tests.docs.blocks import ROOT, blocks_of

# transformers and peft warn of options and of torch's own deprecations
pytestmark = pytest.mark.filterwarnings("default")
PAGE = ROOT / "docs" / "lora.md"
(PROGRAM,) = (block.text for block in blocks_of(PAGE) if block.test == "not run: needs peft")
WEIGHTS = "adapter/adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the program and a small checkpoint with random weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its progress bars start no thread
    Path("train.py").write_text(PROGRAM)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, intermediate_size=64, num_key_value_heads=2, **sizes)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained("base")
    return tmp_path


def test_adapters_are_the_same_at_1_worker_and_after_a_resume_at_another_number(folder):
    base = Path("base/model.safetensors").read_bytes()
    assert main(["run", "-n", "1", "--dir", "one", "train.py"]) == 0
    expected = Path(WEIGHTS).read_bytes()
    Path(WEIGHTS).unlink()
    assert main(["run", "-n", "2", "--dir", "two", "--stop-after", "3", "train.py"]) == 0
    assert not Path(WEIGHTS).exists()
    assert main(["run", "-n", "3", "--dir", "two", "train.py"]) == 0
    assert Path(WEIGHTS).read_bytes() == expected
    assert Path("base/model.safetensors").read_bytes() == base

    snapshot = ss.read_snapshot("two")
    saved = snapshot.state["adapters"]
    adapters = load_file(WEIGHTS)
    assert saved.keys() == adapters.keys()
    assert all(torch.equal(saved[name], adapters[name]) for name in saved)

    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "adapter").eval()
    row = ss.Packed([torch.arange(20)], length=20)[0]
    with torch.no_grad():
        logits = loaded(input_ids=row["tokens"][None]).logits[0]
        with loaded.disable_adapter():
            before = loaded(input_ids=row["tokens"][None]).logits[0]
    losses = [torch.nn.functional.cross_entropy(out, row["targets"]) for out in (logits, before)]
    assert losses[0] < losses[1]
