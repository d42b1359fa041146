from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.step.buffers import Buffers
from samestep.step.layout import lanes_of, tree_sum
from samestep.step.replicas import Replicas
from tests.bits import bits
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
        self.register_buffer("nothing", torch.zeros(0))
        self.tied = torch.nn.Module()
        self.tied.register_buffer("alias", self.running)

    def write(self, lane, names):
        generator = torch.Generator().manual_seed(lane)
        for name in names:
            buffer = getattr(self, name)
            if name == "signed":
                buffer.mul_(-1)  # -0.0: equal to 0.0, but with different bits
            elif buffer.is_floating_point():
                buffer.mul_(0.9).add_(
                    torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                    * 10.0 ** (lane % 5)
                )
            elif buffer.dtype == torch.bool:
                buffer[lane % 3] = True
            else:
                buffer.add_(lane + 1)


WRITABLE = ["running", "precise", "rounded", "signed", "steps", "seen", "table"]


def after_a_step(world, lanes, writes):
    """Return the bits of all buffers after two equal steps.

    `writes` has the names for each lane with samples, and None for other lanes.
    """
    model = Model()
    buffers = Buffers(world, lanes, Replicas([CPU], range(lanes)))
    buffers.add(model)
    buffers.add(model.tied)
    for _ in range(2):
        start = [buffer.clone() for buffer in model.buffers()]
        buffers.begin_step([])
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
    """Return the expected bits: the tree mean of lanes with samples, or the first one's value."""
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
            buffer.copy_(
                tree_mean(values, lanes) if buffer.is_floating_point() else values[with_samples[0]]
            )
    return {name: bits(buffer) for name, buffer in model.named_buffers()}


def copy_of(model):
    copy = Model()
    copy.load_state_dict(model.state_dict())
    return copy


def tree_mean(values, lanes):
    def leaf(span):
        if span[1] - span[0] > 1:
            return None
        first = next(iter(values.values()))
        return (
            values[span[0]].double()
            if span[0] in values
            else torch.zeros(first.shape, dtype=torch.float64)
        )

    return tree_sum((0, lanes), leaf, torch.add) / len(values)


@st.composite
def steps(draw):
    lanes = draw(st.integers(1, 9))
    names = st.lists(st.sampled_from(WRITABLE), unique=True, max_size=len(WRITABLE))
    return lanes, [draw(st.none() | names) for _ in range(lanes)]


@settings(max_examples=60)
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
        buffers = Buffers(world, 4, Replicas([CPU], range(4)))
        buffers.add(norm)
        buffers.begin_step([])
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
