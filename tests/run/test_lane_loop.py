"""A loop over the lanes of a batch computes the same bits as a loss function."""

from __future__ import annotations

import random
from contextlib import suppress
from weakref import WeakSet

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.errors import LossError, ModelError, OptimizerError
from tests.jobs import Net, fingerprint, images
from tests.workers import run_workers


def loss_fn(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"size": float(len(logits))}


def words(batch):
    return int((batch[1] > 2).sum())


def counted_loss(model, batch):
    logits, labels = model(batch[0]), batch[1]
    kept = labels > 2
    return F.cross_entropy(logits, labels, reduction="none")[kept].sum() / kept.sum().clamp(min=1)


def summed_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def stream(lane):
    generator = torch.Generator().manual_seed(lane)
    while True:
        yield torch.randn(3, 1, 8, 8, generator=generator), torch.tensor([1, 2, 3])


def embed(model, batch):
    features = model(batch[0])
    return {"left": features, "right": features + 0.1 * torch.randn_like(features)}


def contrast(model, embeddings):
    scores = embeddings["left"] @ embeddings["right"].T
    return F.cross_entropy(scores, torch.arange(len(scores))), {"noise": torch.rand(())}


# name: (loss function, options of run.backward and batch.lanes)
LOSSES = {
    "samples": (loss_fn, {}),
    "count": (counted_loss, {"count": words}),
    "sum": (summed_loss, {"reduction": "sum"}),
    "embed": (contrast, {"embed": embed}),
}


def gradient(run, batch, model, name, *, inline):
    function, options = LOSSES[name]
    if not inline:
        return run.backward(function, model, batch, **options)
    for lane_batch in batch.lanes(model, **options):
        returned = function(model, lane_batch)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        batch.backward(loss, **metrics)
    return batch.means


def trained(inline, options, source="batches", name="samples", size=40):
    """Return a hash of all results of a training with dropout, BatchNorm and clipping."""
    with ss.init(**{"lanes": 4, "timeout": 60, **options}) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
        run.track(model=model, optimizer=optimizer)
        samples = images(size)
        loops = {
            "batches": lambda: run.batches(samples, 16, epochs=2, loader_workers=1),
            "groups": lambda: run.batches(
                samples, 8, steps=4, group_by=[n % 3 for n in range(size)]
            ),
            "streams": lambda: run.streams(stream, steps=3, name="s"),
        }
        results = []
        for batch in loops[source]():
            for _ in range(2):  # gradients add up
                results += gradient(run, batch, model, name, inline=inline).values()
            results.append(float(run.clip_grad_norm(model, 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint([model.state_dict(), results, torch.rand(3), random.random()])


@pytest.mark.parametrize(
    ("options", "source", "name"),
    [
        pytest.param({}, "batches", "samples", id="samples"),
        pytest.param({"precision": "bfloat16"}, "groups", "samples", id="bfloat16 and groups"),
        pytest.param({}, "batches", "count", id="count", marks=pytest.mark.long),
        pytest.param({"devices": 2}, "batches", "sum", id="sum and two devices"),
        pytest.param({}, "streams", "samples", id="streams", marks=pytest.mark.long),
        pytest.param({}, "batches", "embed", id="embed"),
        pytest.param(
            {"lanes": 1}, "batches", "embed", id="embed with one lane", marks=pytest.mark.long
        ),
    ],
)
def test_a_loop_has_the_bits_of_a_loss_function(options, source, name):
    torch.manual_seed(1)
    expected = trained(False, options, source, name)
    torch.manual_seed(1)
    assert trained(True, options, source, name) == expected


@pytest.mark.parametrize(
    ("workers", "name", "size", "environment"),
    [
        pytest.param(3, "samples", 40, {}, id="one host", marks=pytest.mark.long),
        pytest.param(3, "samples", 17, {}, id="a worker without samples", marks=pytest.mark.long),
        # gradients are exchanged during the backward pass of the last lane
        pytest.param(
            3, "samples", 40, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, id="three hosts"
        ),
        pytest.param(2, "embed", 40, {}, id="embed", marks=pytest.mark.long),
        pytest.param(3, "embed", 17, {}, id="embed and a worker without samples"),
    ],
)
def test_workers_have_the_bits_of_one(workers, name, size, environment):
    options = ({}, "batches", name, size)
    expected = trained(False, *options)
    results = run_workers(trained, workers, True, *options, environment=environment)
    assert results == [expected] * workers


def adversarial(inline):
    """Return the losses and gradients of a generator and a discriminator that take turns."""
    with ss.init(lanes=2) as run:
        torch.manual_seed(0)
        generator, judge = run.replicate(nn.Linear(4, 8)), run.replicate(nn.Linear(8, 1))
        both = run.replicate(nn.ModuleList([generator, judge]))

        def judged(_, noise):
            return F.softplus(judge(generator(noise).detach())).mean()

        def generated(_, noise):
            return F.softplus(-judge(generator(noise))).mean()

        losses = []
        for batch in run.batches([torch.full((4,), float(n)) for n in range(8)], 4, steps=2):
            for loss, modules in ((judged, [judge]), (generated, [generator, judge])):
                if inline:
                    for noise in batch.lanes(*modules):
                        batch.backward(loss(None, noise))
                    losses.append(batch.means["loss"])
                else:
                    update = judge if len(modules) == 1 else both
                    losses.append(run.backward(loss, None, batch, update=update)["loss"])
        return losses, [parameter.grad.tolist() for parameter in both.parameters()]


def test_a_generator_and_a_discriminator_take_turns():
    assert adversarial(inline=True) == adversarial(inline=False)


@pytest.fixture
def loop():
    """Return (run, model, optimizer, a batch of 2 lanes) in a loop."""
    # some mistakes are also an error at the end of the run
    with suppress(LossError), ss.init(lanes=2, precision="bfloat16") as run:
        model = run.replicate(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = iter(run.batches(images(8), 8, steps=1))
        yield run, model, optimizer, next(batches)
        batches.close()


def no_loss(run, model, optimizer, batch):
    for _ in batch.lanes(model):
        pass


def two_losses(run, model, optimizer, batch):
    for lane_batch in batch.lanes(model):
        loss, _ = loss_fn(model, lane_batch)
        batch.backward(loss)
        batch.backward(loss)


def own_backward(run, model, optimizer, batch):
    for lane_batch in batch.lanes(model):
        loss_fn(model, lane_batch)[0].backward()


def own_backward_and_ours(run, model, optimizer, batch):
    for lane_batch in batch.lanes(model):
        loss, _ = loss_fn(model, lane_batch)
        loss.backward(retain_graph=True)
        batch.backward(loss)


def metric_in_a_lane(run, model, optimizer, batch):
    accuracy = torchmetrics.MeanMetric()
    for inputs, labels in batch.lanes(model):
        logits = model(inputs)
        accuracy.update(logits.argmax(1) == labels)
        batch.backward(F.cross_entropy(logits, labels))


def metric_in_a_dict(run, model, optimizer, batch):
    scores = {"accuracy": torchmetrics.MeanMetric()}
    for inputs, labels in batch.lanes(model):
        logits = model(inputs)
        scores["accuracy"].update(logits.argmax(1) == labels)
        batch.backward(F.cross_entropy(logits, labels))


def teacher_in_a_lane(run, model, optimizer, batch):
    teacher = nn.PReLU()
    for inputs, labels in batch.lanes(model):
        with torch.no_grad():
            teacher.weight.mul_(0.9)
        batch.backward(F.cross_entropy(model(inputs), labels))


def tensor_in_a_lane(run, model, optimizer, batch):
    total = torch.zeros(())
    for inputs, labels in batch.lanes(model):
        total += labels.sum()
        batch.backward(F.cross_entropy(model(inputs), labels))


def total_in_a_lane(run, model, optimizer, batch):
    running_loss = 0.0
    for inputs, labels in batch.lanes(model):
        loss = F.cross_entropy(model(inputs), labels)
        batch.backward(loss)
        running_loss += loss.item()
    return running_loss


class AverageMeter:
    """As in many scripts for ImageNet."""

    def __init__(self):
        self.value = self.sum = self.count = self.average = 0

    def update(self, value, count):
        self.value = value
        self.sum += value * count
        self.count += count
        self.average = self.sum / self.count


def meter_in_a_lane(run, model, optimizer, batch):
    meters = {"loss": AverageMeter()}
    for inputs, labels in batch.lanes(model):
        loss = F.cross_entropy(model(inputs), labels)
        batch.backward(loss)
        meters["loss"].update(loss.item(), len(inputs))


def patience_in_a_lane(run, model, optimizer, batch):
    patience = ss.Patience(100)
    for inputs, labels in batch.lanes(model):
        loss = F.cross_entropy(model(inputs), labels)
        batch.backward(loss)
        patience.step(loss.item())


def totals_in_a_lane(run, model, optimizer, batch):
    totals = {"loss": 0.0}
    for inputs, labels in batch.lanes(model):
        loss = F.cross_entropy(model(inputs), labels)
        batch.backward(loss)
        totals["loss"] += loss.item()


def state_in_a_lane(run, model, optimizer, batch):
    state = torch.zeros(10)
    for inputs, labels in batch.lanes(model):
        logits = model(inputs) + state
        state = logits.mean(0).detach()
        batch.backward(F.cross_entropy(logits, labels))


def twice(run, model, optimizer, batch):
    lanes = batch.lanes(model)
    for _ in range(2):
        for inputs, labels in lanes:
            batch.backward(F.cross_entropy(model(inputs), labels))


def no_loss_of_the_whole_batch(run, model, optimizer, batch):
    for _ in batch.lanes(model, embed=embed):
        pass


def embed_with_a_count(run, model, optimizer, batch):
    batch.lanes(model, count=words, embed=embed)


def vector(run, model, optimizer, batch):
    for inputs, _ in batch.lanes(model):
        batch.backward(model(inputs))


def nested(run, model, optimizer, batch):
    for _ in batch.lanes(model):
        run.backward(loss_fn, model, batch)


def step_in_a_lane(run, model, optimizer, batch):
    for _ in batch.lanes(model):
        optimizer.step()


def loss_outside(run, model, optimizer, batch):
    batch.backward(sum(parameter.sum() for parameter in model.parameters()))


def means_too_early(run, model, optimizer, batch):
    return batch.means


def without_modules(run, model, optimizer, batch):
    batch.lanes()


def with_a_function(run, model, optimizer, batch):
    batch.lanes(loss_fn)


def with_a_module_without_parameters(run, model, optimizer, batch):
    next(iter(batch.lanes(nn.Identity())))


def with_an_unknown_reduction(run, model, optimizer, batch):
    batch.lanes(model, reduction="max")


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (no_loss, LossError, r"ended lane 0 without batch\.backward\(loss\)"),
        (two_losses, LossError, "was called twice for a lane"),
        (own_backward, LossError, r"instead of loss\.backward"),
        (own_backward_and_ours, LossError, "left a gradient of 'features"),
        (metric_in_a_lane, LossError, "the body of the loop over lanes updated accuracy"),
        (metric_in_a_dict, LossError, "updated scores\\['accuracy'\\]"),
        (teacher_in_a_lane, LossError, "a lane changed the parameter"),
        (tensor_in_a_lane, LossError, "a lane changed the tensor"),
        (total_in_a_lane, LossError, r"changed running_loss, which .* running_loss=\.\.\."),
        (meter_in_a_lane, LossError, r"lanes updated meters\['loss'\], a AverageMeter"),
        (patience_in_a_lane, LossError, "lanes updated patience, a Patience"),
        (
            totals_in_a_lane,
            LossError,
            r"changed totals\['loss'\], which .* read batch\.means",
        ),
        (state_in_a_lane, LossError, "changed state, which the body of the next lane reads"),
        (twice, LossError, "cannot be iterated twice"),
        (no_loss_of_the_whole_batch, LossError, "ended the whole batch without"),
        (embed_with_a_count, ss.ConfigError, "embed cannot be used with count"),
        (vector, LossError, "must return a scalar tensor"),
        (nested, LossError, "cannot begin another computation"),
        (step_in_a_lane, OptimizerError, "computes a lane"),
        (loss_outside, LossError, r"belongs into the body of `for lane_batch in batch\.lanes"),
        (means_too_early, LossError, r"batch\.means is there after the end"),
        (without_modules, ModelError, "needs the replicated modules that get gradients"),
        (with_a_function, ModelError, "got function"),
        (with_a_module_without_parameters, ModelError, "no parameter that requires"),
        (with_an_unknown_reduction, ss.ConfigError, "'mean' or 'sum', got 'max'"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(loop, mistake, error, message):
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(error, match=message):
        mistake(*loop)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]


def leave_lanes_of(run, model, leaves_at):
    """Begin the lanes of a step, and leave a stored iterator, which only the step's end closes."""
    for batch in run.batches(images(8), 4, steps=2):
        lanes = iter(batch.lanes(model))
        if run.step < leaves_at:
            for inputs, labels in lanes:
                batch.backward(F.cross_entropy(model(inputs), labels))
        else:
            before = random.getstate()
            next(lanes)
            assert torch.is_autocast_enabled("cpu")
            yield lanes, before


@pytest.mark.parametrize("leaves_at", [0, 1])
def test_a_step_whose_lanes_were_left_cannot_end(leaves_at):
    with ss.init(lanes=2, precision="bfloat16") as run:
        steps = leave_lanes_of(run, run.replicate(Net()), leaves_at)
        lanes, before = next(steps)
        with pytest.raises(LossError, match="was left before its end"):
            next(steps)
        assert not torch.is_autocast_enabled("cpu")
        assert random.getstate() == before
        assert run.step == leaves_at
        with pytest.raises(LossError, match=r"cannot go on after .* its step"):
            next(lanes)


@pytest.mark.parametrize("leaves", ["break", "exception"])
def test_a_loop_that_is_left_restores_everything_and_is_an_error(loop, leaves):
    run, model, optimizer, batch = loop
    before = torch.get_rng_state(), random.getstate(), fingerprint(model.state_dict())
    lanes = batch.lanes(model)  # stored
    with suppress(ZeroDivisionError):
        for inputs, _ in lanes:
            model(inputs)
            assert torch.is_autocast_enabled("cpu")
            if leaves == "break":
                break
            raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert fingerprint(model.state_dict()) == before[2]
    with pytest.raises(LossError, match="was left before its end"):
        optimizer.step()
    with pytest.raises(LossError, match="was left before its end"):
        run.backward(loss_fn, model, batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_metrics_may_have_a_value_for_each_item(loop, reduction):
    _, model, _, batch = loop
    for inputs, labels in batch.lanes(model, reduction=reduction):
        logits = model(inputs)
        is_large, loss = labels > 4, F.cross_entropy(logits, labels, reduction=reduction)
        scalar = is_large.double().mean() if reduction == "mean" else is_large.sum()
        batch.backward(loss, is_large=is_large, scalar=scalar, label=labels)
    assert batch.means["is_large"] == batch.means["scalar"]
    assert batch.means["label"] == sum(int(labels.sum()) for _, labels in batch) / 8


def test_a_lane_keeps_no_tensors_of_the_lane_before(loop):
    _, model, _, batch = loop
    alive = WeakSet()
    for _ in range(2):
        for inputs, labels in batch.lanes(model):
            logits = model(inputs)
            assert len(alive) <= 1  # of the loop's own variable
            alive.add(logits)
            batch.backward(F.cross_entropy(logits, labels))
