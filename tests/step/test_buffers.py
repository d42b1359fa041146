from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

import samestep as ss
from samestep.errors import ModelError
from samestep.step.buffers import Buffers
from samestep.step.layout import Assignment, lanes_of, tree_sum
from samestep.step.replicas import Replicas
from tests.bits import bits
from tests.workers import run_workers
from tests.worlds import in_processes, in_threads

CPU = torch.device("cpu")
MASK = torch.triu(torch.full((3, 3), -math.inf), diagonal=1)
GAPS = torch.tensor([0.1, math.nan, -0.0, math.inf], dtype=torch.float64)


class Model(torch.nn.Module):
    """Buffers of several dtypes; a lane writes those whose names it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.linspace(-1, 1, 7))
        self.register_buffer("precise", torch.tensor([1 / 3, -7.0], dtype=torch.float64))
        self.register_buffer("rounded", torch.tensor([0.1, 3.0, 5.0], dtype=torch.bfloat16))
        self.register_buffer("signed", torch.zeros(2))
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([True, False, False]))
        self.register_buffer("table", torch.arange(6).view(3, 2).T)
        self.register_buffer("mask", MASK.clone())
        self.register_buffer("gaps", GAPS.clone())
        self.register_buffer("tokens", torch.tensor([1e-3, 2.0**24]))
        self.register_buffer("lowest", torch.full((2,), math.inf))
        self.register_buffer("ages", torch.tensor([9, 2**62 + 1]))
        self.register_buffer("nothing", torch.zeros(0))
        self.tied = torch.nn.Module()
        self.tied.register_buffer("alias", self.running)

    def write(self, lane, names):
        generator = torch.Generator().manual_seed(lane)
        for name in names:
            buffer = getattr(self, name)
            if name == "signed":
                buffer.mul_(-1)  # -0.0: equal to 0.0, but with different bits
            elif name in {"lowest", "ages"}:
                buffer.copy_(torch.tensor([-lane, lane % 3]))
            elif buffer.is_floating_point():
                buffer.mul_(0.9).add_(
                    torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                    * 10.0 ** (lane % 5)
                )
            elif buffer.dtype == torch.bool:
                buffer[lane % 3] = True
            else:
                buffer.add_(lane + 1)


RULES = {
    "running": "mean",
    "precise": "mean",
    "rounded": "mean",
    "signed": "mean",
    "steps": "first",
    "seen": "max",
    "table": "sum",
    "tokens": "sum",
    "lowest": "min",
    "ages": "min",
}
WRITABLE = list(RULES)


def after_a_step(world, lanes, writes):
    """Return the bits of all buffers after two equal steps.

    `writes` has the names for each lane with samples, and None for other lanes.
    """
    model = Model()
    buffers = Buffers(world, Assignment(world.size, lanes), Replicas([CPU], range(lanes)))
    buffers.add(model, RULES)
    buffers.add(model.tied)
    for _ in range(2):
        start = [buffer.clone() for buffer in model.buffers()]
        buffers.begin_step()
        for lane in lanes_of(world.rank, world.size, lanes):
            if writes[lane] is not None:
                assert [bits(buffer) for buffer in model.buffers()] == [
                    bits(buffer) for buffer in start
                ]
                model.write(lane, writes[lane])
                buffers.end_lane(lane)
        written = world.all_gather_json(buffers.written(), "sharing written buffers")
        buffers.end_step(
            sorted({number for numbers in written for number in numbers}),
            [n for n in range(lanes) if writes[n] is not None],
        )
    return {name: bits(buffer) for name, buffer in model.named_buffers()}


def expected_after(lanes, writes):
    """Return the expected bits: the rule, over the lanes with samples."""
    model = Model()
    with_samples = [lane for lane in range(lanes) if writes[lane] is not None]
    for _ in range(2):
        of_lane = {}
        for lane in with_samples:
            of_lane[lane] = copy_of(model)
            of_lane[lane].write(lane, writes[lane])
        for name in {name for lane in with_samples for name in writes[lane]}:
            values = {lane: getattr(lane_model, name) for lane, lane_model in of_lane.items()}
            buffer = getattr(model, name)
            buffer.copy_(combined(RULES[name], buffer, values, lanes))
    return {name: bits(buffer) for name, buffer in model.named_buffers()}


def copy_of(model):
    copy = Model()
    copy.load_state_dict(model.state_dict())
    return copy


def combined(rule, start, values, lanes):
    """Return the value of a buffer after a step, from those of lanes with samples."""
    if rule == "mean":
        return tree_mean(values, lanes)
    if rule == "sum":
        wide = torch.float64 if start.is_floating_point() else torch.int64
        changes = {lane: value.to(wide) - start.to(wide) for lane, value in values.items()}
        return start.to(wide) + total(changes, lanes)
    if rule in {"min", "max"}:
        stacked = torch.stack([*values.values()])  # [lanes, ...]
        return stacked.amin(0) if rule == "min" else stacked.amax(0)
    return next(iter(values.values()))


def total(values, lanes):
    """Return the sum along the tree; lanes without a value add zeros."""

    def leaf(span):
        if span[1] - span[0] > 1:
            return None
        return values.get(span[0], torch.zeros_like(next(iter(values.values()))))

    return tree_sum((0, lanes), leaf, torch.add)


def tree_mean(values, lanes):
    return total({lane: value.double() for lane, value in values.items()}, lanes) / len(values)


@st.composite
def steps(draw):
    lanes = draw(st.integers(1, 9))
    names = st.lists(st.sampled_from(WRITABLE), unique=True, max_size=len(WRITABLE))
    return lanes, [draw(st.none() | names) for _ in range(lanes)]


@given(steps(), st.integers(1, 5))
def test_all_workers_agree_on_the_rule(step, workers):
    lanes, writes = step
    workers = min(workers, lanes)
    assert (
        in_threads(workers, after_a_step, lanes, writes)
        == [expected_after(lanes, writes)] * workers
    )


def test_processes_agree_on_the_rule():
    """Only lane 2 writes some; lanes 4 to 7, which are all of the last worker, have no samples."""
    cases = [
        (
            8,
            [
                ["running", "steps"],
                [],
                ["precise", "seen", "table"],
                ["running"],
                None,
                None,
                None,
                None,
            ],
        ),
        (8, [None, None, None, ["rounded"], WRITABLE, None, ["signed"], []]),
        (3, [["steps"], ["steps"], None]),
        (3, [[], [], []]),
        (3, [None, None, None]),
    ]
    expected = [expected_after(lanes, writes) for lanes, writes in cases]
    for workers in (1, 2, 3):
        assert (
            in_processes(workers, lambda world: [after_a_step(world, *case) for case in cases])
            == [expected] * workers
        )


def test_batch_norm_over_lanes():
    """BatchNorm writes without a version change; its statistics are averaged over lanes."""
    # [lanes, samples, features]
    inputs = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    lone = [torch.nn.BatchNorm1d(5) for _ in inputs]
    for norm, batch in zip(lone, inputs, strict=True):
        norm(batch)
    expected = [
        tree_mean(dict(enumerate(values)), 4)
        for values in zip(*([norm.running_mean, norm.running_var] for norm in lone), strict=True)
    ]

    def body(world):
        norm = torch.nn.BatchNorm1d(5)
        buffers = Buffers(world, Assignment(world.size, 4), Replicas([CPU], range(4)))
        buffers.add(norm)
        buffers.begin_step()
        for lane in lanes_of(world.rank, world.size, 4):
            norm(inputs[lane])
            buffers.end_lane(lane)
        buffers.end_step(buffers.written(), range(4))
        return [bits(norm.running_mean), bits(norm.running_var), int(norm.num_batches_tracked)]

    for workers in (1, 2):
        assert (
            in_processes(workers, body)
            == [[bits(mean.float()) for mean in expected] + [1]] * workers
        )


class Counter(torch.nn.Module):
    """Writes a buffer in the forward pass; `write` gets the buffer and the lane's samples."""

    def __init__(self, write, **buffers):
        super().__init__()
        self.layer, self.write = torch.nn.Linear(1, 1), write
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, batch):
        with torch.no_grad():
            self.write(self, batch[0])
        return self.layer(batch[0]).mean()


def trained(module, steps=1, **options):
    """Train on the numbers 0 to 7 in four lanes."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None])
    with ss.init(lanes=4) as run:
        model = run.replicate(module, **options)
        for batch in run.batches(data, 8, epochs=steps, shuffle=False):
            run.backward(lambda model, batch: model(batch), model, batch)
    return module


def test_a_counter_has_the_samples_of_all_lanes_or_is_refused():
    def count(module, numbers):
        module.tokens += torch.histc(numbers, 2, 0, 7).to(module.tokens.dtype)

    for dtype in (torch.float32, torch.int64):
        for name in ("tokens", "tok*"):
            counter = Counter(count, tokens=torch.tensor([5, 5], dtype=dtype))
            assert trained(counter, 2, buffers={name: "sum"}).tokens.tolist() == [13, 13]
        counter = Counter(count, tokens=torch.tensor([5, 5], dtype=dtype))
        with pytest.raises(ModelError, match=r"different values to the buffer 'layer.tokens'.*sum"):
            trained(torch.nn.Sequential(OrderedDict(layer=counter)))
        assert counter.tokens.tolist() == [5, 5]


def test_lanes_may_write_the_same_values_without_a_rule():
    def count(module, numbers):
        module.calls += 1

    assert trained(Counter(count, calls=torch.tensor(0)), 3).calls == 3
    with pytest.raises(ModelError, match=r"wrote the buffer 'calls', for which .*refuse"):
        trained(Counter(count, calls=torch.tensor(0)), buffers={"calls": "refuse"})


def test_workers_refuse_what_only_lanes_of_different_workers_wrote():
    def enqueue(module, numbers):
        module.queue.copy_(numbers.amax() > 3)

    def body():
        with pytest.raises(ModelError, match="different values to the buffer 'queue'"):
            trained(Counter(enqueue, queue=torch.tensor(0)))

    run_workers(body, 2)  # the lanes of each worker agree


@pytest.mark.parametrize(
    ("write", "became"),
    [
        (lambda module, numbers: module.range.resize_(2), r"torch.float32 \[2\]"),
        (lambda module, numbers: setattr(module, "range", None), "nothing"),
    ],
)
def test_a_buffer_of_another_shape_is_named(write, became):
    counter = Counter(write, range=torch.zeros(0))
    with pytest.raises(ModelError, match=rf"'range' was torch.float32 \[0\] and became {became}"):
        trained(counter)
    assert counter.range.shape == (0,)


def test_wrong_rules_are_refused():
    counter = Counter(None, tokens=torch.tensor(0))
    with pytest.raises(ss.ConfigError, match="one of mean, sum, min, max, first, refuse, got 'su'"):
        trained(counter, buffers={"tokens": "su"})
    with pytest.raises(ModelError, match="rule for 'token', but Counter has only the buffers tok"):
        trained(counter, buffers={"token": "sum"})
    with pytest.raises(ModelError, match=r"'tokens' is torch.int64, for which there is no rule"):
        trained(counter, buffers={"tokens": "mean"})


def test_observers_have_the_range_of_the_batch():
    """And the scale that follows from it, as if the batch were one lane."""
    quantized = FakeQuantize(observer=MovingAverageMinMaxObserver)
    alone = FakeQuantize(observer=MovingAverageMinMaxObserver)
    numbers = torch.arange(8.0)[:, None]

    def observe(module, numbers):
        module.part(numbers.cos() * numbers)

    counter = Counter(observe)
    counter.part = quantized
    trained(counter, 2)
    for _ in range(2):
        alone(numbers.cos() * numbers)
    assert alone.scale != 1
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, quantized.get_buffer(name)), name


@pytest.mark.parametrize(
    "spectral_norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm]
)
def test_spectral_norm_needs_no_rule(spectral_norm):
    torch.manual_seed(0)
    counter = Counter(lambda module, numbers: module.normed(numbers.expand(-1, 5)))
    counter.normed = spectral_norm(torch.nn.Linear(5, 3))
    for vector in counter.buffers():  # the power iteration may have converged already
        vector.copy_(torch.nn.functional.normalize(torch.ones_like(vector), dim=0))
    before = [buffer.clone() for buffer in counter.buffers()]
    trained(counter, 2)
    assert not all(map(torch.equal, before, counter.buffers()))
