from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from recipes.gpt import training
from recipes.gpt.config import ModelSettings, OptimizerSettings, Settings
from recipes.gpt.model import Decoder
from recipes.settings import SettingsError

VOCABULARY = 13


def make():
    torch.manual_seed(0)
    return Decoder(ModelSettings(width=16, depth=2, heads=2), VOCABULARY)


def rows(*documents, length=6):
    packed = ss.Packed([torch.tensor(document) for document in documents], length=length)
    parts = [packed[number] for number in range(len(packed))]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


BATCH = {**rows([1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 1]), "source": torch.tensor([1, 0, 1])}


def test_the_loss_is_the_sum_over_the_tokens_of_each_source():
    model = make()
    loss, metrics = training.training_loss(model, BATCH, ("code", "prose"))
    logits = model(BATCH["tokens"], BATCH["positions"], BATCH["documents"])
    expected = F.cross_entropy(logits.flatten(0, 1), BATCH["targets"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert training.count_targets(BATCH) == 10
    sums, counts = zip(metrics["code/loss"], metrics["prose/loss"], strict=True)
    torch.testing.assert_close(sum(sums), loss)
    assert [int(count) for count in counts] == [6, 4]


def test_bits_per_byte_are_those_of_a_code():
    source = SimpleNamespace(held_out_targets=8, held_out_bytes=4)
    other = SimpleNamespace(held_out_targets=2, held_out_bytes=12)
    text = SimpleNamespace(sources={"a": source, "b": other})
    means = {"a": math.log(2), "b": math.log(8)}  # 1 and 3 bits per token
    assert training.bits_per_byte(text, means) == pytest.approx({"a": 2, "b": 0.5, "all": 14 / 16})


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 1 / 3), (1, 2 / 3), (2, 1), (7, 1), (8, 0.9 + 0.1), (9, 0.55), (10, 0.1), (11, 0.1)],
)
def test_the_rate_warms_up_stays_and_decays(step, expected):
    found = training.factor(step, steps=10, warmup=2, decay=2, final=0.1)
    assert found == pytest.approx(expected)


def test_a_rate_without_decay_stays_until_the_end():
    assert training.factor(9, steps=10, warmup=0, decay=0, final=0.0) == 1


def test_the_rate_of_all_groups_is_that_of_the_step():
    optimizers = training.make_optimizers(make(), OptimizerSettings())
    settings = Settings(steps=100, optimizer=OptimizerSettings(learning_rate=0.5, decay=0.1))
    assert training.set_rate(optimizers, 95, settings) == pytest.approx(0.25)
    assert [group["lr"] for group in optimizers["optimizer"].param_groups] == [0.25, 0.25]


@given(
    step=st.integers(0, 30),
    double_at=st.lists(st.integers(1, 30), max_size=4).map(tuple),
)
def test_tokens_are_those_of_all_batches(step, double_at):
    settings = Settings(batch_size=3, double_at=double_at)
    sizes = [training.batch_size_at(number, settings) for number in range(step)]
    assert training.tokens_until(step, settings) == sum(sizes) * settings.data.length


def test_a_batch_doubles_at_each_step():
    settings = Settings(batch_size=2, double_at=(2, 4))
    assert [training.batch_size_at(step, settings) for step in range(6)] == [2, 2, 4, 4, 8, 8]


def test_norms_do_not_decay():
    (optimizer,) = training.make_optimizers(make(), OptimizerSettings()).values()
    shapes = [{p.ndim for p in group["params"]} for group in optimizer.param_groups]
    assert shapes == [{2}, {1}]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_has_the_matrices_of_the_layers():
    model = make()
    optimizers = training.make_optimizers(model, OptimizerSettings(name="muon"))
    assert list(optimizers) == ["optimizer", "muon"]
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [
        {by_id[id(p)] for group in each.param_groups for p in group["params"]}
        for each in optimizers.values()
    ]
    assert names[1] == {name for name in by_id.values() if "proj" in name}
    assert names[0] | names[1] == set(by_id.values())
    assert not names[0] & names[1]


def test_a_torch_without_muon_is_said(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SettingsError, match=r"optimizer\.name=muon needs PyTorch 2\.9 or newer"):
        training.make_optimizers(make(), OptimizerSettings(name="muon"))


def test_the_most_likely_tokens_follow():
    model, tokens = make(), torch.tensor([[1, 2, 3]])
    made = training.generate(model, tokens, count=4, temperature=0.0, length=5)
    for number in range(4):
        seen = torch.cat([tokens, made[:, :number]], dim=1)[:, -5:]
        assert made[0, number] == model(seen)[0, -1].argmax()


def test_sampled_tokens_have_the_frequencies_of_their_probabilities():
    model, tokens = make(), torch.tensor([[1, 2]]).expand(4000, -1)
    model.lm_head.weight.data *= 10
    found = training.generate(model, tokens, count=1, temperature=2.0, length=2).flatten()
    expected = (model(tokens[:1])[0, -1] / 2).softmax(-1)
    frequencies = torch.bincount(found, minlength=VOCABULARY) / 4000
    torch.testing.assert_close(frequencies, expected, atol=0.03, rtol=0)
