from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.comm.base import Alone
from samestep.config import Config
from samestep.data.batch import Batch
from samestep.data.random_state import key, set_generators
from samestep.errors import LossError
from samestep.step import exchange
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import LossSpec
from samestep.step.replicas import replicate
from tests.bits import bits
from tests.worlds import in_processes, on_hosts

LANES = 5
CPU = torch.device("cpu")


class Clip(nn.Module):
    """Two towers with dropout, and a temperature that only the loss uses."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(6, 70), nn.GELU(), nn.Dropout(dropout))
        self.text = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Dropout(dropout))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Linear(2, 2)


def pairs(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 6, generator=generator)
    return images, images @ torch.randn(6, 5, generator=generator)


def embed(model, batch):
    images, texts = batch
    return {
        "image": F.normalize(model.image(images), dim=1),
        "text": F.normalize(model.text(texts), dim=1),
        "number": images[:, 0] > 0,
    }


def clip_loss(model, embeddings):
    logits = model.temperature.exp() * embeddings["image"] @ embeddings["text"].T
    targets = torch.arange(len(logits))
    loss = F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)
    return loss, {"positive": embeddings["number"].float().mean()}


def sizes_of(size, lanes):
    return [len(part) for part in torch.arange(size).tensor_split(lanes)]


def gradients(model):
    return {
        name: None if parameter.grad is None else bits(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def assert_close(model, reference):
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None
        else:
            error = (parameter.grad.double() - expected.grad.double()).norm()
            assert error < 1e-5 * expected.grad.double().norm()


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_the_gradient_is_that_of_a_plain_loop_over_whole_batches(lanes):
    images, texts = pairs(37)
    reference = Clip()
    with ss.init(lanes=lanes) as run:
        model = run.replicate(Clip())
        batches = run.batches(TensorDataset(images, texts), 16, shuffle=False)
        for batch in batches:  # of 16, 16 and 5 samples
            means = run.backward(clip_loss, model, batch, embed=embed)
            samples = slice(16 * run.step, 16 * (run.step + 1))
            loss, metrics = clip_loss(
                reference, embed(reference, (images[samples], texts[samples]))
            )
            loss.backward()
            assert means["loss"] == pytest.approx(loss.item(), rel=1e-6)
            assert means["positive"] == pytest.approx(metrics["positive"].item())
            assert_close(model, reference)
            if lanes == 1:
                assert gradients(model) == gradients(reference)
    assert run.step == 3


def test_both_passes_of_a_lane_draw_the_same_random_numbers():
    images, texts = pairs(20)
    reference = Clip(dropout=0.5)
    lanes, offset = [], 0
    with ss.init(lanes=6, seed=3) as run:
        (batch,) = run.batches(TensorDataset(images, texts), 20, shuffle=False)
        for lane, size in enumerate(batch.counts):
            set_generators(key(3, "lane", run.step, 0, lane))
            part = slice(offset, offset + size)
            lanes.append(embed(reference, (images[part], texts[part])))
            offset += size
        embeddings = {name: torch.cat([lane[name] for lane in lanes]) for name in lanes[0]}
        clip_loss(reference, embeddings)[0].backward()
        model = run.replicate(Clip(dropout=0.5))
        run.backward(clip_loss, model, batch, embed=embed)
    assert_close(model, reference)


def everything(world, lanes=LANES, bucket_bytes=None):
    """Return the gradients and means of three batches, with few samples, and of a part."""
    if bucket_bytes is not None:
        exchange.BUCKET_BYTES = bucket_bytes
    engine = LaneEngine(world, Config(), lanes, [CPU])
    model = Clip(dropout=0.2)
    replicate(model, CPU, world)
    engine.add(model)
    history = []
    for step, size in enumerate([23, 3, 12]):
        counts = sizes_of(size, lanes)[:: 1 if step else -1]
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        images, texts = pairs(size, seed=step)
        batches = [
            (images[ends[lane] : ends[lane + 1]], texts[ends[lane] : ends[lane + 1]])
            for lane in engine.own
            if counts[lane]
        ]
        update = model.text if step == 2 else model
        spec = LossSpec(clip_loss, model, embed=embed)
        result = engine.backward(
            spec, Batch(0, engine.own, counts, iter(batches)), update, (step, 0), dict
        )
        history.append([gradients(model), [(lane.lane, lane.metrics) for lane in result.results]])
        if step == 0:
            model.zero_grad()  # the next two are added
    return history


def test_the_bits_are_the_same_at_any_number_of_workers():
    (expected,) = in_processes(1, everything)
    first = expected[0][0]
    assert [name for name, gradient in first.items() if gradient is None] == [
        "spare.weight",
        "spare.bias",
    ]
    assert [lane for lane, _ in expected[1][1]] == [0, 1, 2]
    for workers in (2, 3):
        assert in_processes(workers, everything) == [expected] * workers
        assert on_hosts(workers, workers, everything, LANES, 300) == [expected] * workers


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_with_one_lane_exchange_during_the_second_pass(workers):
    (expected,) = in_processes(1, everything, workers)
    assert in_processes(workers, everything, workers) == [expected] * workers
    assert on_hosts(workers, workers, everything, workers, 300) == [expected] * workers


def test_the_first_lane_may_have_no_samples():
    def body(world):
        engine = LaneEngine(world, Config(), 4, [CPU])
        model = Clip()
        engine.add(model)
        counts = [0, 3, 0, 2]
        images, texts = pairs(5)
        parts = {1: slice(0, 3), 3: slice(3, 5)}
        batches = [(images[parts[n]], texts[parts[n]]) for n in engine.own if n in parts]
        batch = Batch(0, engine.own, counts, iter(batches))
        engine.backward(LossSpec(clip_loss, model, embed=embed), batch, model, (0, 0), dict)
        reference = Clip()
        clip_loss(reference, embed(reference, (images, texts)))[0].backward()
        assert_close(model, reference)
        return gradients(model)

    (expected,) = in_processes(1, body)
    for workers in (2, 3):
        assert in_processes(workers, body) == [expected] * workers


class Normed(nn.Module):
    """BatchNorm in the encoder, and a queue that the loss fills."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.register_buffer("queue", torch.zeros(3, 4))


def fill(model, embeddings):
    (embedded,) = embeddings
    loss = (embedded @ torch.cat([embedded, model.queue]).T).logsumexp(1).mean()
    model.queue.copy_(torch.cat([embedded.detach(), model.queue])[:3])
    return loss


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_are_updated_once(devices):
    images, _ = pairs(12)
    with ss.init(lanes=4, devices=["cpu"] * devices) as run:
        model, plain = run.replicate(Normed()), Normed()
        (batch,) = run.batches(images, 12, shuffle=False)
        run.backward(fill, model, batch, embed=lambda model, batch: [model.net(batch)])
        parts = [plain.net(part) for part in images.split(3)]
        assert torch.equal(model.queue, parts[0])
        assert model.net[1].num_batches_tracked == 1
        mean = sum(part.mean(0) for part in map(plain.net[0], images.split(3))) / 4
        assert torch.allclose(model.net[1].running_mean, 0.1 * mean, atol=1e-6)


def test_buffers_that_are_added_after_a_step_without_any_are_restored():
    engine, model = LaneEngine(Alone(), Config(), 2, [CPU]), Clip()
    engine.add(model)
    images, texts = pairs(4)

    def backward(loss_fn):
        batches = iter([(images[:2], texts[:2]), (images[2:], texts[2:])])
        batch = Batch(0, range(2), [2, 2], batches)
        engine.backward(LossSpec(loss_fn, model, embed=embed), batch, model, (0, 0), dict)

    def failing_loss(*_):
        raise ValueError("no loss")

    backward(clip_loss)
    norm = nn.BatchNorm1d(2)
    engine.add(norm)
    norm.running_mean.fill_(5)
    with pytest.raises(ValueError, match="no loss"):
        backward(failing_loss)
    assert norm.running_mean.tolist() == [5, 5]


def test_frozen_and_unused_embeddings_get_no_gradient():
    images, texts = pairs(9)
    with ss.init(lanes=3) as run:
        model = run.replicate(Clip())
        (batch,) = run.batches(TensorDataset(images, texts), 9, shuffle=False)

        def frozen(model, batch):
            with torch.no_grad():
                image = model.image(batch[0])
            return image, model.text(batch[1]), model.image(batch[0])

        def loss_fn(model, embeddings):
            image, text, _ = embeddings
            assert not image.requires_grad
            return (model.temperature * image @ text.T).square().mean()

        run.backward(loss_fn, model, batch, embed=frozen)
        reference = Clip()
        loss_fn(reference, frozen(reference, (images, texts))).backward()
        assert_close(model, reference)
        # A loss of parameters of its own only, such as a linear probe.
        probed = run.replicate(Clip())
        means = run.backward(
            lambda model, image: model.temperature * image.square().mean(),
            probed,
            batch,
            embed=lambda model, batch: batch[0],
        )
        assert probed.temperature.grad == pytest.approx(means["loss"] / 1.5)
        assert probed.text[0].weight.grad is None


def from_stream(run, sizes):
    """Return a batch whose lanes have `sizes` pairs, and all of its images and texts."""
    images, texts = pairs(sum(sizes))
    parts = list(zip(images.split(sizes), texts.split(sizes), strict=True))
    stream = run.streams(lambda lane: iter([parts[lane]]), name=str(sizes))
    return next(iter(stream)), (images, texts)


@pytest.mark.parametrize("sizes", [[0, 3, 5], [4, 0, 1]])
def test_lanes_of_streams_may_have_any_number_of_items(sizes):
    with ss.init(lanes=3) as run:
        model, reference = run.replicate(Clip()), Clip()
        batch, samples = from_stream(run, sizes)
        run.backward(clip_loss, model, batch, embed=embed)
    clip_loss(reference, embed(reference, samples))[0].backward()
    assert_close(model, reference)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_batch_without_items_has_no_gradient(lanes):
    with ss.init(lanes=lanes) as run:
        model = run.replicate(Clip())
        batch, _ = from_stream(run, [0] * lanes)
        assert list(run.backward(clip_loss, model, batch, embed=embed)) == []
    assert set(gradients(model).values()) == {None}


noise = torch.Generator()


def changes_its_batch(model, batch):
    return embed(model, (batch[0].mul_(2), batch[1]))


def draws_its_own_numbers(model, batch):
    return embed(model, (batch[0] + torch.rand(6, generator=noise), batch[1]))


@pytest.mark.parametrize("wrong", [changes_its_batch, draws_its_own_numbers])
def test_passes_that_differ_are_an_error(wrong):
    with ss.init(lanes=2) as run:
        model = run.replicate(Clip())
        batch, _ = from_stream(run, [2, 3])
        with pytest.raises(
            LossError, match="embed returned different values for lane 0 in its second"
        ):
            run.backward(clip_loss, model, batch, embed=wrong)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, batch: {"a": 3}, "tuple or dict of them, got int in lane 0"),
        (lambda model, batch: model.temperature, "got a scalar tensor in lane 0"),
    ],
)
def test_embeddings_that_are_no_tensors_of_items_are_refused(lanes, wrong, message):
    with ss.init(lanes=lanes) as run:
        model = run.replicate(Clip())
        batch, _ = from_stream(run, [2] * lanes)
        with pytest.raises(LossError, match=message):
            run.backward(clip_loss, model, batch, embed=wrong)


def test_lanes_whose_embeddings_differ_in_shape_are_named():
    def by_size(model, batch):
        return {"image": model.image(batch[0])[:, : 70 - len(batch[0])], "more": batch[1].double()}

    def body(world):
        engine = LaneEngine(world, Config(), 3, [CPU])
        model = Clip()
        engine.add(model)
        batches = [pairs(size) for size in [[2, 2, 3][lane] for lane in engine.own]]
        batch = Batch(0, engine.own, [2, 2, 3], iter(batches))
        with pytest.raises(LossError) as caught:
            engine.backward(LossSpec(clip_loss, model, embed=by_size), batch, model, (0, 0), dict)
        return str(caught.value)

    expected = (
        "got 'image': torch.float32 [items, 68], 'more': torch.float64 [items, 5] in lane 0 and "
        "'image': torch.float32 [items, 67], 'more': torch.float64 [items, 5] in lane 2"
    )
    for workers in (1, 3):
        assert all(message.endswith(expected) for message in in_processes(workers, body))


def test_losses_of_the_whole_batch_are_checked():
    def too_large(model, embeddings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with ss.init(lanes=2) as run:
        model = run.replicate(Clip())
        batch, _ = from_stream(run, [2, 3])
        with pytest.raises(LossError, match=r"got a tensor of shape \(5, 70\) in the whole batch"):
            run.backward(lambda model, embeddings: embeddings["image"], model, batch, embed=embed)
        with pytest.raises(LossError, match="the loss of the whole batch has no gradient"):
            run.backward(lambda model, embeddings: torch.ones(()), model, batch, embed=embed)
        with pytest.raises(ss.OutOfMemoryError, match="the loss of all embeddings does not fit"):
            run.backward(too_large, model, batch, embed=embed)
        with pytest.raises(ss.NonFiniteLossError, match="inf at step 0 of the whole batch"):
            run.backward(
                lambda model, embeddings: embeddings["image"].sum() / 0, model, batch, embed=embed
            )
        for options in ({"count": len}, {"reduction": "sum"}):
            with pytest.raises(ss.ConfigError, match="embed cannot be used with count or red"):
                run.backward(clip_loss, model, batch, embed=embed, **options)
