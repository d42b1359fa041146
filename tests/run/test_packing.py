"""Rows of packed documents train a language model with the same bits at any number of workers."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from tests.jobs import fit, left_by
from tests.workers import run_workers

VOCABULARY = 50


def documents():
    """Return 40 documents of 0 to 38 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(VOCABULARY, (number * 7 % 39,), generator=generator) for number in range(40)
    ]


class Model(nn.Module):
    """One block of attention, within documents."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(16, 16)
        self.inputs, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, row):
        same = row["documents"][:, None, :, None] == row["documents"][:, None, None, :]
        hidden = self.tokens(row["tokens"]) + self.positions(row["positions"])  # [rows, length, 16]
        q, k, v = (part[:, None] for part in self.inputs(hidden).chunk(3, -1))
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, same & same.tril())[:, 0]
        return self.head(hidden)


def loss_of(model, row):
    return F.cross_entropy(model(row).flatten(0, 1), row["targets"].flatten(), reduction="sum")


def mean_of(model, row):
    return F.cross_entropy(model(row).flatten(0, 1), row["targets"].flatten())


def targets_of(row):
    return (row["targets"] != -100).sum()


def job(run, folder, loss_fn=mean_of, loader_workers=0):
    file = ss.TokenFile(folder / "data.bin")
    model = run.replicate(Model())
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), 0.01))
    packed = ss.Packed(file, length=16, vocabulary=VOCABULARY)
    options = {"count": targets_of, "loader_workers": loader_workers, "batch_size": 10}
    return fit(run, model, optimizer, packed, loss_fn=loss_fn, epochs=1, **options)


@pytest.fixture
def folder(tmp_path):
    ss.TokenFile.write(tmp_path / "data.bin", documents(), dtype="uint16")
    return tmp_path


def test_a_model_has_the_same_bits_at_1_2_and_3_workers(folder):
    body = partial(job, folder=folder)
    first = left_by(body, folder / "1", 1, lanes=4)
    assert left_by(body, folder / "2", 2, lanes=4) == first
    assert left_by(partial(body, loader_workers=2), folder / "3", 3, lanes=4) == first
    assert len(first) > 10


def test_the_loss_and_gradient_are_those_of_the_mean_over_all_targets(folder):
    packed = ss.Packed(documents(), length=16)
    whole = torch.utils.data.default_collate(list(packed))
    options = {"count": targets_of}
    with ss.init(lanes=4) as run:
        model = run.replicate(Model())
        mean_of(model, whole).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        loss = mean_of(model, whole)
        for batch in run.batches(packed, len(packed), epochs=1):
            for loss_fn in (mean_of, lambda model, row: loss_of(model, row) / targets_of(row)):
                model.zero_grad()
                means = run.backward(loss_fn, model, batch, **options)
                torch.testing.assert_close(means["loss"], loss.item())
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(parameter.grad, expected[name])
            model.zero_grad()
            means = run.backward(loss_of, model, batch, reduction="sum", **options)
            torch.testing.assert_close(means["loss"], loss.item())
            torch.testing.assert_close(model.head.weight.grad, expected["head.weight"])


@pytest.mark.parametrize("batch_size", [1, 5])
def test_an_evaluation_divides_by_the_bytes_of_all_targets(batch_size):
    sizes = torch.arange(VOCABULARY) % 4  # bytes of each token, none of some

    def bytes_in(row):
        return sizes[row["targets"][row["targets"] != -100]].sum()

    packed = ss.Packed(documents(), length=16)
    whole = torch.utils.data.default_collate(list(packed))
    with ss.init(lanes=2) as run:
        model = run.replicate(Model())
        got = run.evaluate(
            lambda model, row: {"nats": loss_of(model, row).double() / bytes_in(row)},
            model,
            packed,
            batch_size,
            count=bytes_in,
        )
        expected = loss_of(model, whole).item() / bytes_in(whole).item()
    assert got["nats"] == pytest.approx(expected, rel=1e-6)


def test_a_mean_over_targets_without_their_count_is_refused():
    with ss.init(lanes=4) as run:
        model = run.replicate(Model())
        for batch in run.batches(ss.Packed(documents(), length=16), 10, epochs=1):
            with pytest.raises(ss.LossError, match="count"):
                run.backward(mean_of, model, batch)
            break


def tokens_of_run(numbered, folder, stop_after):
    """Return the tokens that this worker has used."""
    seen = []
    with suppress(SystemExit), ss.init(lanes=4, dir=folder, stop_after=stop_after) as run:
        run.track(model=run.replicate(nn.Linear(1, 1)))
        for batch in run.batches(ss.Packed(numbered, length=16), 7, epochs=1):
            for rows in batch:
                seen += rows["tokens"][rows["documents"] >= 0].tolist()
    return seen


def test_a_run_that_is_resumed_within_an_epoch_has_each_token_once(tmp_path):
    lengths = [len(document) for document in documents()]
    numbered = torch.arange(sum(lengths)).split(lengths)
    before = run_workers(tokens_of_run, 3, numbered, tmp_path, 2)
    after = run_workers(tokens_of_run, 2, numbered, tmp_path, None)
    used = list(chain.from_iterable(before))
    assert len(used) == len(set(used)) == 2 * 7 * 16
    assert all(after)
    assert sorted(chain(used, *after)) == list(range(sum(lengths)))


def test_that_documents_are_split_is_said_once(capfd):
    def body():
        packed = ss.Packed(documents(), length=16)
        with ss.init(lanes=4) as run:
            for name in ("one", "two"):
                for _ in run.batches(packed, 10, steps=1, name=name):
                    pass

    run_workers(body, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if "are split" in line]
    assert len(lines) == 1
    assert "40 documents, 22 longer than a row" in lines[0]
