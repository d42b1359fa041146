from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from recipes.gpt.config import ModelSettings
from recipes.gpt.model import Decoder, attention_mask, hidden_features
from recipes.settings import SettingsError

SMALL = ModelSettings(width=16, depth=2, heads=4, key_heads=2)
VOCABULARY = 11


def make(settings=SMALL):
    torch.manual_seed(0)
    return Decoder(settings, VOCABULARY)


def tokens_of(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def test_a_token_sees_only_itself_and_earlier_ones():
    model, tokens = make(), tokens_of(1, 6)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % VOCABULARY
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


def test_packed_documents_give_the_logits_that_each_gives_alone():
    model, tokens = make(), tokens_of(1, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0]])
    packed = model(tokens, positions, documents)
    alone = [model(tokens[:, part]) for part in (slice(3), slice(3, 6))]
    torch.testing.assert_close(packed[:, :6], torch.cat(alone, dim=1))


def test_no_gradient_crosses_the_documents_of_a_row():
    model, tokens = make(), tokens_of(1, 6)
    embedded = []
    model.embed_tokens.register_forward_hook(
        lambda _, __, output: embedded.append(output) or output.retain_grad()
    )
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    model(tokens, documents=documents)[0, 3:].square().sum().backward()
    (gradient,) = (part.grad[0].abs().sum(1) for part in embedded)
    assert torch.equal(gradient[:3], torch.zeros(3))
    assert (gradient[3:] > 0).all()


def test_the_mask_is_causal_and_within_documents():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    mask = attention_mask(torch.tensor([[0, 0, 1, -1]]))
    assert torch.equal(mask, torch.tensor(expected).bool()[None, None])


def test_shared_keys_equal_repeated_ones():
    shared = make()
    whole = Decoder(replace(SMALL, key_heads=None), VOCABULARY)
    state = shared.state_dict()
    for name, value in state.items():
        if "k_proj" in name or "v_proj" in name:  # [key heads * 4, width]
            state[name] = value.view(2, 4, 16).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    tokens = tokens_of(2, 5)
    torch.testing.assert_close(shared(tokens), whole(tokens))


def test_scores_depend_on_distances_and_not_on_positions():
    model, tokens = make(), tokens_of(1, 5)
    for layer in model.layers:  # so that attention is far from a mean
        layer.self_attn.q_proj.weight.data *= 100
    moved = torch.arange(5)[None] + 100
    torch.testing.assert_close(model(tokens), model(tokens, moved), atol=1e-4, rtol=1e-4)
    spread = torch.arange(5)[None] * 3
    assert not torch.allclose(model(tokens), model(tokens, spread), atol=1e-4)


def test_the_initial_loss_is_that_of_equal_probabilities():
    model, tokens = make(), tokens_of(4, 9)
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.05)


def test_tied_embeddings_are_one_parameter():
    tied, untied = make(), make(replace(SMALL, tied=False))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == VOCABULARY * SMALL.width


def test_projections_into_the_residual_stream_are_smaller_with_depth():
    model = make(replace(SMALL, width=64, depth=8))
    assert model.layers[0].mlp.down_proj.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(SMALL, 64), (replace(SMALL, width=256), 704), (replace(SMALL, hidden=5), 5)],
)
def test_hidden_features_follow_from_the_width(settings, expected):
    assert hidden_features(settings) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"model\.width must be an even multiple of model\.heads \(3\), got 16"),
        ({"heads": 16}, r"model\.width must be an even multiple of model\.heads \(16\), got 16"),
        ({"key_heads": 3}, r"model\.heads must be a multiple of model\.key_heads \(3\), got 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        make(replace(SMALL, **changes))
