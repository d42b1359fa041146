from __future__ import annotations

from copy import deepcopy
from itertools import accumulate

import pytest
import torch
from torch import optim

import samestep as ss
from samestep.errors import OptimizerError
from samestep.step.gradients import copy_gradients
from samestep.step.layout import Assignment, Layout, TensorSlice
from samestep.step.optimizer_state import SCALAR_STATE, load_optimizer
from samestep.step.shard import (
    ELEMENTWISE,
    WHOLE,
    Shard,
    check_shardable,
    choose_across,
    newton_schulz_cost,
    owners_of,
)
from tests.bits import bits, digest
from tests.worlds import in_processes, on_hosts

LANES = 8
STEPS = 5
SAVED_AT = 3  # steps before the state is taken
VARIANTS = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True, "foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.Adam, {"amsgrad": True, "fused": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 2}),
]
WHOLE_VARIANTS = [
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"foreach": True, "maximize": True}),
]
if hasattr(optim, "Muon"):
    WHOLE_VARIANTS += [
        (optim.Muon, {}),
        (optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
    ]
SHAPES = [(65, 5), (64,), (7,), (), (2, 3, 4, 4), (500,), (64, 2), (128,), (192,), (11,)]
MATRICES = [(65, 5), (64, 64), (7, 130), (1, 1), (24, 40), (48, 16), (3, 5), (9, 70), (8, 8)]
# parameter: steps in which it has no gradient
ABSENT = {1: {0, 1}, 3: {2}, 2: set(range(STEPS)), 7: {1, 4}}


class Job:
    """An optimizer of two groups, a scheduler, and gradients that depend only on the step.

    It is sharded if there are several workers.
    """

    def __init__(self, world, kind, options, across="world"):
        generator = torch.Generator().manual_seed(1)
        has_matrices = kind.__name__ == "Muon"
        shapes = MATRICES if has_matrices else SHAPES
        dtypes = [torch.float32] * (len(shapes) - 1) + [torch.float64]
        if has_matrices:
            dtypes[-2] = torch.bfloat16
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        value = self.parameters[4].data  # in another storage order
        self.parameters[4].data = (
            value.T.contiguous().T
            if has_matrices
            else value.contiguous(memory_format=torch.channels_last)
        )
        groups = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.02}]
        self.optimizer = kind(groups, lr=0.01, **options)
        self.world = world
        check_shardable(self.optimizer)
        assignment = Assignment(world.size, LANES)
        self.shard = None
        if world.size > 1:
            self.shard = Shard(self.optimizer, assignment, world, None, across)
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)

    def lacks(self, index, number):
        """Return whether a parameter has no gradient in a step.

        Torch's fused SGD fails if a parameter gets its first gradient later than others.
        """
        fused_sgd = isinstance(self.optimizer, optim.SGD) and self.optimizer.defaults["fused"]
        return number in ABSENT.get(index, ()) and not (fused_sgd and index == 1)

    def step(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        gradients = []
        for index, parameter in enumerate(self.parameters):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter.dtype
            )
            gradients.append(
                None if self.lacks(index, number) else torch.empty_like(parameter).copy_(gradient)
            )
        if self.shard is None:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            of = dict(zip(self.parameters, gradients, strict=True))
            for flat_buffer in self.shard.flat_buffers:
                give(
                    flat_buffer,
                    [of[parameter] for parameter in flat_buffer.exchange.parameters],
                )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def state(self):
        part = (self.shard or self.optimizer).state_dict()
        return deepcopy(
            {
                "parameters": [parameter.data for parameter in self.parameters],
                "part": part,
                "scheduler": self.scheduler.state_dict(),
            }
        )

    def load(self, state):
        for parameter, value in zip(self.parameters, state["parameters"], strict=True):
            parameter.data.copy_(value)
        part = deepcopy(state["part"])
        load_optimizer(self.optimizer, part) if self.shard is None else self.shard.load_state_dict(
            part
        )
        self.scheduler.load_state_dict(state["scheduler"])


def give(flat_buffer, gradients):
    """Set a flat buffer's gradients as the exchange does, from complete ones."""
    flat = flat_buffer.own.new_zeros(flat_buffer.exchange.layout.flat_size)
    copy_gradients(flat_buffer.exchange.views(flat), gradients)
    held = flat_buffer.exchange.slices(flat, flat_buffer.exchange.held)
    flat_buffer.set_gradients(lambda: held, [gradient is not None for gradient in gradients])


def trained(world, kept=None, variants=VARIANTS, across="world"):
    """Return for each variant its results, its state in the middle, and results from that state."""
    results = []
    for number, (kind, options) in enumerate(variants):
        job = Job(world, kind, options, across)
        result = {"history": []}
        for step in range(STEPS):
            if step == SAVED_AT:
                result["middle"] = job.state()
            job.step(step)
            result["history"].append(digest(job.parameters))
        if kept is not None:
            job = Job(world, kind, options, across)
            job.load(kept[number])
            for step in range(SAVED_AT, STEPS):
                job.step(step)
            result["continued"] = digest(job.parameters)
        results.append(result)
    return results


def merged(parts):
    """Merge the workers' parts of an optimizer's state."""
    collected = {}
    for part in parts:
        for index, values in part["state"].items():
            for name, value in values.items():
                collected.setdefault(index, {}).setdefault(name, []).append(value)
    state = {
        index: {name: joined(values) for name, values in of_index.items()}
        for index, of_index in collected.items()
    }
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def joined(values):
    """Return the tensor that slices tile, or the value one worker has."""
    values = sorted(values, key=lambda value: getattr(value, "start", 0))
    first = values[0]
    if not isinstance(first, TensorSlice):
        assert len(values) == 1
        return first
    assert [value.start for value in values] == [
        0,
        *accumulate(len(value.values) for value in values),
    ][:-1]
    in_storage_order = torch.cat([value.values for value in values]).view(
        [first.shape[dim] for dim in first.order]
    )
    return in_storage_order.permute([first.order.index(dim) for dim in range(len(first.shape))])


def comparable(state):
    """Return a state with bits for tensors."""
    if isinstance(state, torch.Tensor):
        return (str(state.dtype), tuple(state.shape), bits(state))
    if isinstance(state, dict):
        return {name: comparable(value) for name, value in state.items()}
    return [comparable(value) for value in state] if isinstance(state, (list, tuple)) else state


def trained_alone(variants):
    """Return the results of one worker, its states in the middle, and results that use those."""
    (plain,) = in_processes(1, trained, None, variants)
    kept = [result["middle"] for result in plain]
    (alone,) = in_processes(1, trained, kept, variants)
    for variant, result in zip(variants, alone, strict=True):
        assert result["continued"] == result["history"][-1], variant
        assert len(set(result["history"])) == STEPS, variant
    return plain, kept, alone


def check_workers(by_worker, variants, plain, kept, alone):
    """Compare the results of several workers with those of one."""
    for number, variant in enumerate(variants):
        variant_results = [worker[number] for worker in by_worker]
        for worker in variant_results:
            assert worker["history"] == plain[number]["history"], variant
            assert worker["continued"] == alone[number]["continued"], variant
            assert digest(worker["middle"]["parameters"]) == digest(kept[number]["parameters"]), (
                variant
            )
        assert comparable(
            merged([worker["middle"]["part"] for worker in variant_results])
        ) == comparable(kept[number]["part"]), variant


def test_sharded_and_unsharded_optimizers_give_the_same_bits():
    plain, kept, alone = trained_alone(VARIANTS)
    for workers in (2, 3):
        sizes = tuple(torch.Size(shape).numel() for shape in SHAPES[:-1])
        assert {
            fragment.index
            for rank in range(workers)
            for fragment in Layout(sizes, workers).fragments(rank)
            if fragment.start
        } & {4, 5}
        check_workers(in_processes(workers, trained, kept), VARIANTS, plain, kept, alone)


def test_parameters_with_one_owner_give_the_same_bits():
    plain, kept, alone = trained_alone(WHOLE_VARIANTS)
    for workers in (2, 3, 7):
        by_worker = in_processes(workers, trained, kept, WHOLE_VARIANTS)
        check_workers(by_worker, WHOLE_VARIANTS, plain, kept, alone)


@pytest.mark.parametrize(
    ("hosts", "workers", "across"),
    [(2, 4, "world"), (2, 4, "host"), pytest.param(3, 3, "world", marks=pytest.mark.long)],
)
def test_hosts_have_one_owner_of_each_parameter(hosts, workers, across):
    plain, kept, alone = trained_alone(WHOLE_VARIANTS)
    by_worker = on_hosts(hosts, workers, trained, kept, WHOLE_VARIANTS, across)
    check_workers(by_worker, WHOLE_VARIANTS, plain, kept, alone)


def test_owners_have_equal_work():
    shapes = [(2, 2), (8, 8), (8, 8), (32, 4), (8, 8), (4, 8)]  # 8, 512, 512, 512, 512, 128
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    assert list(map(newton_schulz_cost, parameters)) == [8, 512, 512, 512, 512, 128]

    def numbers(workers):
        owners = owners_of(parameters, workers, newton_schulz_cost)
        return [owners[id(parameter)] for parameter in parameters]

    assert numbers(1) == [0] * 6
    assert numbers(2) == [1, 0, 1, 0, 1, 0]
    assert numbers(3) == [2, 0, 1, 2, 0, 1]
    assert numbers(8) == [5, 0, 1, 2, 3, 4]


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="Muon is in torch since 2.9")
def test_more_workers_than_matrices():
    def body(world):
        parameters = [torch.nn.Parameter(torch.eye(8)), torch.nn.Parameter(torch.zeros(0, 4))]
        optimizer = optim.Muon(parameters, lr=0.1)
        shard = Shard(optimizer, Assignment(world.size, LANES), world)
        give(shard.flat_buffers[0], [torch.ones(8, 8), torch.zeros(0, 4)])
        optimizer.step()
        sizes = [buffer.own.numel() for buffer in shard.flat_buffers]
        return digest(parameters), len(shard.state_dict()["state"]), sizes

    by_worker = in_processes(3, body)
    assert len({parameters for parameters, _, _ in by_worker}) == 1
    assert [rest for _, *rest in by_worker] == [[1, [64]], [0, [0]], [0, [0]]]


@pytest.mark.parametrize("across", [pytest.param("host", marks=pytest.mark.long), "world"])
def test_hosts_that_update_all_parameters_save_each_part_once(across):
    variants = [VARIANTS[1], (optim.AdamW, {"amsgrad": True, "fused": True})]
    (plain,) = in_processes(1, trained, None, variants)
    kept = [result["middle"] for result in plain]
    by_worker = on_hosts(2, 4, trained, kept, variants, across)
    for number, variant in enumerate(variants):
        variant_results = [worker[number] for worker in by_worker]
        for worker in variant_results:
            assert worker["history"] == plain[number]["history"], variant
            assert worker["continued"] == plain[number]["history"][-1], variant
        assert comparable(
            merged([worker["middle"]["part"] for worker in variant_results])
        ) == comparable(kept[number]["part"]), variant


@pytest.mark.parametrize(
    ("hosts", "partners", "free", "expected"),
    [
        (2, None, 2000, "host"),
        (2, None, 1999, "world"),
        (2, None, None, "host"),
        (3, None, 10**9, "world"),
        (3, "partners", 10**9, "host"),
        (3, "partners", 2000, "world"),
        (1, None, 10**9, "world"),
    ],
)
def test_hosts_update_all_parameters_where_that_pays_and_fits(hosts, partners, free, expected):
    class World:
        def all_gather_json(self, value, what):
            return [10**9, free]

    world = World()
    world.partners = partners
    world.hosts = [range(2 * host, 2 * host + 2) for host in range(hosts)]
    parameters = [torch.nn.Parameter(torch.zeros(250))]  # 1000 bytes, with 2000 of Adam's state
    assert choose_across(parameters, world) == expected
    world.hosts = [*world.hosts, range(2 * hosts, 2 * hosts + 1)]  # a host with one worker
    assert choose_across(parameters, world) == "world"


def test_a_choice_that_does_not_exist_is_rejected():
    with ss.init() as run:
        model = run.replicate(torch.nn.Linear(2, 1))
        with pytest.raises(OptimizerError, match='across must be "host", "world" or None'):
            run.shard(optim.SGD(model.parameters(), lr=0.1), across="hosts")


def test_adjacent_fragments_share_a_segment():
    def body(world):
        job = Job(world, optim.AdamW, {"fused": True})

        def shared():
            segments = [
                segment
                for flat_buffer in job.shard.flat_buffers
                for segment in flat_buffer.segments
            ]
            assert [segment.parameter for segment in segments] == [
                parameter for group in job.shard.contents.updated for parameter in group
            ]
            return [[fragment.index for fragment in segment.fragments] for segment in segments]

        history = [shared()]
        for step in range(3):
            job.step(step)
            history.append(shared())
        return history

    first, second = in_processes(2, body)
    together, apart = [[0], [1, 2], [3], [4], [5], [0]], [[0], [1], [2], [3], [4], [5], [0]]
    assert first == [together, together, together, apart]
    assert [segments[1:] for segments in second] == [[[6, 7, 8]]] * 2 + [[[6], [7], [8]]] * 2


def test_every_listed_optimizer_is_tested():
    assert {kind for kind, _ in VARIANTS} == set(ELEMENTWISE)
    assert {kind for kind, _ in WHOLE_VARIANTS} == set(WHOLE)


def test_scalar_state_is_torch_state_with_one_value_per_parameter():
    for kind, options in VARIANTS:
        parameter = torch.nn.Parameter(torch.ones(5))
        optimizer = kind([parameter], **options)
        for _ in range(3):
            parameter.grad = torch.ones(5)
            optimizer.step()
        for name, value in optimizer.state[parameter].items():
            once = not isinstance(value, torch.Tensor) or value.ndim == 0
            assert once == (name in SCALAR_STATE), (kind, name)


def test_a_worker_without_fragments_participates():
    def body(world):
        parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(0))]
        optimizer = optim.AdamW(parameters, lr=0.1, fused=True)
        shard = Shard(optimizer, Assignment(world.size, LANES), world)
        give(shard.flat_buffers[0], [torch.ones(3), torch.zeros(0)])
        optimizer.step()
        return parameters[0].tolist(), len(shard.state_dict()["state"])

    first, second, third = in_processes(3, body)
    assert first[0] == second[0] == third[0]
    assert first[0] != [1, 1, 1]
    assert (first[1], second[1], third[1]) == (1, 0, 0)


def used_adam():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


class OwnAdam(optim.Adam):
    """A subclass may do anything in its step."""


def test_optimizers_that_cannot_be_sharded_are_rejected():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    for optimizer in (
        optim.LBFGS(parameters),
        OwnAdam(parameters),
        optim.SparseAdam(parameters),
    ):
        name = type(optimizer).__name__
        with pytest.raises(
            OptimizerError, match=rf"{name} cannot be sharded: .*AdamW.*; use it without run.shard"
        ):
            check_shardable(optimizer)
    with pytest.raises(
        OptimizerError, match="this Adam has state already; shard it before its first step"
    ):
        check_shardable(used_adam())
    elsewhere = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, device="meta")),
    ]
    with pytest.raises(
        OptimizerError, match="SGD must have parameters on one device, got cpu, meta"
    ):
        check_shardable(optim.SGD(elsewhere, lr=0.1))
