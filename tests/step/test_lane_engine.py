from __future__ import annotations

import math
import time
import weakref
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
import torchmetrics
from torch import nn, optim

from samestep.comm.base import Alone, Arrival
from samestep.comm.channel import Channel
from samestep.config import Config
from samestep.data.batch import Batch
from samestep.errors import DataError, LossError, ModelError, NonFiniteLossError
from samestep.guards import plugins_of
from samestep.step import across_hosts, exchange, overlap
from samestep.step.flat_buffer import FlatBuffer
from samestep.step.guards import Contents
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import LossSpec
from samestep.step.lane_results import split_loss
from samestep.step.layout import Layout
from samestep.step.optimizer_state import SCALAR_STATE
from samestep.step.replicas import replicate
from samestep.step.shard import Shard
from tests.bits import bits
from tests.step.test_shard import VARIANTS
from tests.worlds import in_processes, on_hosts

LANES = 5
CPU = torch.device("cpu")
COUNTS = [3, 0, 2, 4, 1]


def lane_batch(lane, step=0):
    return torch.randn(COUNTS[lane], 6, generator=torch.Generator().manual_seed(10 * step + lane))


def batch_of(lanes, step=0, *, planned=True):
    counts = COUNTS if planned else None
    return Batch(
        0,
        lanes.own,
        counts,
        (lane_batch(lane, step) for lane in lanes.own if COUNTS[lane] or not planned),
    )


def model_of(lanes):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"body": nn.Linear(6, 70), "head": nn.Linear(70, 1), "spare": nn.Linear(2, 2)}
    )
    replicate(model, CPU, lanes.world)
    lanes.add(model)
    return model


def loss_fn(model, batch):
    noise = torch.rand(())  # the same on every worker
    return model["head"](model["body"](batch).relu()).square().mean() * (1 + noise), {
        "noise": noise
    }


def backward(
    lanes, model, *, step=0, update=None, count=None, loss_fn=loss_fn, note=dict, planned=True
):
    return lanes.backward(
        LossSpec(loss_fn, model, count),
        batch_of(lanes, step, planned=planned),
        update or model,
        (step, 0),
        note,
    )


def gradients(model):
    return {
        name: None if parameter.grad is None else bits(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def alone(**options):
    return LaneEngine(Alone(), Config(**options), LANES, [CPU])


def everything(world, bucket_bytes=None):
    """Return the gradients of a model and of a part of it, with and without clearing before."""
    if bucket_bytes is not None:
        exchange.BUCKET_BYTES = bucket_bytes
    lanes = LaneEngine(world, Config(), LANES, [CPU])
    model = model_of(lanes)
    history = []
    result = backward(lanes, model, note=lambda: {"from": world.rank})
    assert result.notes == [{"from": rank} for rank in range(world.size)]
    history.append(
        [
            gradients(model),
            [(lane.lane, lane.count, lane.metrics) for lane in result.results],
        ]
    )
    backward(lanes, model, step=1)
    history.append(gradients(model))
    model.zero_grad()
    backward(lanes, model, step=1, update=model["head"])
    history.append(gradients(model))
    model.zero_grad()
    backward(lanes, model, step=1, count=lambda batch: 7 * len(batch))
    history.append(gradients(model))
    return history


def test_gradients_are_the_same_at_any_number_of_workers():
    (expected,) = in_processes(1, everything)
    (first, results), twice, head, counted = expected
    assert [(lane, count) for lane, count, _ in results] == [(0, 3), (2, 2), (3, 4), (4, 1)]
    assert len({metrics["noise"] for _, _, metrics in results}) == 4
    assert first["spare.weight"] is None
    assert {name for name, gradient in head.items() if gradient is not None} == {
        "head.weight",
        "head.bias",
    }
    assert (
        len(
            {
                first["head.weight"],
                twice["head.weight"],
                head["head.weight"],
                counted["head.weight"],
            }
        )
        == 4
    )
    for workers in (2, 3):
        assert in_processes(workers, everything) == [expected] * workers
        assert on_hosts(workers, workers, everything, 300) == [expected] * workers


def rounded(world, bucket_bytes=None, lanes=LANES, exchange_dtype="bfloat16", across="host"):
    """Return the gradients of each step, and the parameters after steps of a sharded optimizer."""
    if bucket_bytes is not None:
        exchange.BUCKET_BYTES = bucket_bytes
    overlap.EARLY_BYTES = 6 * 70 * 2  # the largest parameter is copied during backward
    engine = LaneEngine(world, Config(exchange_dtype=exchange_dtype), lanes, [CPU])
    model = model_of(engine)
    history = []
    for step in range(2):  # the second adds to the gradients of the first
        backward(engine, model, step=step, count=(lambda batch: 7 * len(batch)) if step else None)
        history.append(gradients(model))
    model.zero_grad()
    backward(engine, model, step=1, update=model["head"])
    history.append(gradients(model))
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if world.size > 1:
        engine.shards.append(Shard(optimizer, engine.assignment, world, engine.round_to, across))
    for step in range(2):
        optimizer.zero_grad()
        backward(engine, model, step=step)
        optimizer.step()
        history.append([bits(parameter) for parameter in model.parameters()])
    return history


@pytest.mark.parametrize("lanes", [3, pytest.param(LANES, marks=pytest.mark.long)])
def test_rounded_gradients_are_the_same_at_any_number_of_workers(lanes):
    (expected,) = in_processes(1, rounded, None, lanes)
    assert in_processes(1, rounded, None, lanes, None) != [expected]
    for workers in (2, 3):
        assert in_processes(workers, rounded, None, lanes) == [expected] * workers
    assert on_hosts(3, 3, rounded, 300, lanes) == [expected] * 3
    if lanes > 3:
        assert on_hosts(2, 4, rounded, 300, lanes) == [expected] * 4
        assert on_hosts(2, 2, rounded, 300, lanes, "bfloat16", "world") == [expected] * 2


def test_each_leaf_and_each_sum_is_rounded_once():
    def loss_fn(model, batch):
        return model(batch).square().sum()

    def leaf(lane):
        (gradient,) = torch.autograd.grad(loss_fn(model, lane_batch(lane)), model.weight)
        return rounded_once(gradient)

    def rounded_once(tensor):
        return tensor.bfloat16().float()

    lanes, model = alone(exchange_dtype="bfloat16"), nn.Linear(6, 40)
    lanes.add(model)
    spec = LossSpec(loss_fn, model, len, "sum")
    lanes.backward(spec, batch_of(lanes), model, (0, 0), dict)
    left = rounded_once(leaf(0) + rounded_once(leaf(2) + leaf(3)))
    assert torch.equal(model.weight.grad, rounded_once(left + leaf(4)) * (1 / sum(COUNTS)))


def test_rounded_gradients_are_sent_and_stored_in_half_the_bytes():
    def body(world, exchange_dtype):
        nbytes = []
        send, share = Channel.send, world.shared
        Channel.send = lambda self, key, tensor: (
            nbytes.append(tensor.nbytes),
            send(self, key, tensor),
        )[1]
        # 8 bytes count what was put
        world.shared = lambda size: (nbytes.append(size) if size > 8 else None, share(size))[1]
        lanes = LaneEngine(world, Config(exchange_dtype=exchange_dtype), LANES, [CPU])
        model = model_of(lanes)
        world.all_gather_json(None, "starting")  # allocates memory of its own
        nbytes.clear()
        backward(lanes, model)
        return nbytes

    for sent, half in zip(
        on_hosts(2, 2, body, None), on_hosts(2, 2, body, "bfloat16"), strict=True
    ):
        assert len(sent) >= 2
        assert [size // 2 for size in sent] == half


def backward_of_squares(lanes, model, step, update=None):
    """Set the gradients of the mean square of a sequence's output, for three samples per lane."""
    width = model[0].in_features
    samples = [
        torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + lane))
        for lane in lanes.own
    ]
    lanes.backward(
        LossSpec(lambda model, batch: model(batch).square().mean(), model),
        Batch(0, lanes.own, [3] * lanes.lanes, iter(samples)),
        update or model,
        (step, 0),
        dict,
    )


def log_sends(world, order):
    """Append "exchange" to `order` whenever gradients are sent to other hosts."""

    def logged(begin):
        def begin_logged(*arguments):
            send = begin(*arguments)
            return lambda sent: (order.append("exchange"), send(sent))[1]

        return begin_logged

    begin = world.begin_all_to_all
    world.begin_all_to_all = lambda *arguments: (order.append("exchange"), begin(*arguments))[1]
    world.begin_swap = logged(world.begin_swap)
    if world.partners is not None:
        world.partners.begin_sums = logged(world.partners.begin_sums)


@pytest.mark.parametrize("exchange_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("each", [1, 2, 3])  # lanes per worker
def test_gradients_are_sent_to_other_hosts_during_backward_of_the_last_lane(each, exchange_dtype):
    def body(world, bucket_bytes):
        exchange.BUCKET_BYTES = bucket_bytes
        config = Config(exchange_dtype=exchange_dtype)
        lanes = LaneEngine(world, config, each * world.size, [CPU])
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8))
        replicate(model, CPU, world)
        lanes.add(model)
        order = []
        for number, layer in enumerate(model):
            layer.weight.register_hook(lambda gradient, number=number: order.append(number))
        log_sends(world, order)

        def loss_fn(model, batch):
            # worker 1 never reaches the last bucket, which starts first
            used = model[:-1] if world.rank == 1 else model
            return used(batch).square().mean()

        for _ in range(2):
            samples = [
                torch.randn(3, 8, generator=torch.Generator().manual_seed(lane))
                for lane in lanes.own
            ]
            lanes.backward(
                LossSpec(loss_fn, model),
                Batch(0, lanes.own, [3] * lanes.lanes, iter(samples)),
                model,
                (0, 0),
                dict,
            )
        return order, gradients(model)

    limit = 2 * 9 * 8 * (2 if exchange_dtype else 4) + 1  # two layers
    (first, first_gradients), (second, second_gradients) = on_hosts(2, 2, body, limit)
    assert first_gradients == second_gradients
    earlier = [4, 3, 2, 1, 0] * (each - 1)
    # the first bucket has half as many
    assert first == [*earlier, 4, "exchange", 3, 2, "exchange", 1, 0, "exchange"] * 2
    earlier = [3, 2, 1, 0] * (each - 1)
    assert second == [*earlier, 3, 2, 1, 0, "exchange", "exchange", "exchange"] * 2
    (_, expected), _ = in_processes(2, body, limit)
    assert first_gradients == expected


@pytest.mark.parametrize("lanes_per_worker", [1, 2])
def test_exchanges_of_parameters_that_no_longer_train_together_are_freed(lanes_per_worker):
    def body(world):
        if world.size > 1:
            overlap.KEPT_CALLS, overlap.EARLY_BYTES = 2, 0
        torch.manual_seed(0)
        lanes = LaneEngine(world, Config(), 2 * lanes_per_worker, [CPU])
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        replicate(model, CPU, world)
        lanes.add(model)
        history, exchanges, freed = [], {}, []
        for step, trained in enumerate("abbbbcabc"):
            for layer, trains in zip(
                model, {"a": "10", "b": "01", "c": "11"}[trained], strict=True
            ):
                layer.requires_grad_(trains == "1")
            batch = Batch(
                0, lanes.own, [3] * lanes.lanes, (lane_batch(0, step + lane) for lane in lanes.own)
            )
            loss = LossSpec(lambda model, batch: model(batch).square().mean(), model)
            lanes.backward(loss, batch, model, (step, 0), dict)
            history.append(gradients(model))
            model.zero_grad()
            if world.size > 1:
                exchanges.setdefault(
                    trained, weakref.ref(lanes._overlaps._last[-1].buckets[0].exchange)
                )
                freed.append(
                    "".join(name for name, reference in exchanges.items() if reference() is None)
                )
        hooks = [
            len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()
        ]
        return freed, hooks, history

    ((_, _, expected),) = in_processes(1, body)
    freed = ["", "", "", "", "", "a", "a", "a", "a"]  # only a new exchange frees others
    hooks = [2, 2, 2, 2] if lanes_per_worker == 1 else [0, 0, 0, 0]  # of the new "a", "b" and "c"
    assert in_processes(2, body) == 2 * [(freed, hooks, expected)]
    hooks = [2, 0, 1, 0]  # the last ones of each bucket, and both of the new "a"
    assert on_hosts(2, 2, body) == 2 * [(freed, hooks, expected)]


def test_gradients_may_arrive_in_another_order_in_later_steps():
    """As soon as the order is known, not every gradient is watched.

    In the second step, the loss function sets gradients, to which backward adds.
    """
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3], [2, 0, 2, 1], [0, 1, 2, 3]]

    def body(world):
        exchange.BUCKET_BYTES = 2 * 9 * 8 * 4 + 1  # two layers
        lanes = LaneEngine(world, Config(), 2, [CPU])
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        replicate(model, CPU, world)
        lanes.add(model)
        sent, history = [], []
        model[0].weight.register_hook(lambda _: sent.append(0))
        log_sends(world, sent)
        for step, layers in enumerate(orders):
            samples = [torch.full((3, 8), lane + 1.0) for lane in lanes.own]

            def loss_fn(model, batch, step=step, layers=layers):
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter) if step == 1 else None
                return nn.Sequential(*(model[n] for n in layers))(batch).square().mean()

            batch = Batch(0, lanes.own, [3] * lanes.lanes, iter(samples))
            lanes.backward(LossSpec(loss_fn, model), batch, model, (0, 0), dict)
            history.append(
                [
                    None if parameter.grad is None else bits(parameter.grad)
                    for parameter in model.parameters()
                ]
            )
            model.zero_grad()
        return sent, history

    ((_, expected),) = in_processes(1, body)
    for sent, history in on_hosts(2, 2, body):
        assert history == expected
        assert sent[:4] == sent[-4:] == ["exchange", "exchange", 0, "exchange"]
        assert sent.count("exchange") == 3 * len(orders)


def test_gradients_of_optimizers_with_several_groups_are_sent_during_backward():
    """With weight decay for matrices only, the group of biases is complete at the end."""

    def body(world, bucket_bytes):
        exchange.BUCKET_BYTES = bucket_bytes
        lanes = LaneEngine(world, Config(), 2, [CPU])
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        replicate(model, CPU, world)
        lanes.add(model)
        groups = [
            {"params": [layer.weight for layer in model]},
            {"params": [layer.bias for layer in model], "weight_decay": 0.0},
        ]
        optimizer = optim.AdamW(groups, lr=0.1, fused=True)
        if world.size > 1:
            shard = Shard(optimizer, lanes.assignment, world, None, "host", lanes.models.places())
            lanes.shards.append(shard)
            assert [len(buffer.exchange.parameters) for buffer in shard.flat_buffers] == [2, 4, 2]
        order = []
        for number, layer in enumerate(model):
            layer.weight.register_hook(lambda gradient, number=number: order.append(number))
        log_sends(world, order)
        for _ in range(2):
            backward_of_squares(lanes, model, 0)
            optimizer.step()
            optimizer.zero_grad()
        return order, [bits(parameter) for parameter in model.parameters()]

    (order, sharded), (_, same) = on_hosts(2, 2, body, 2 * 72 * 4 + 1)
    assert order == [3, "exchange", 2, 1, "exchange", 0, "exchange"] * 2
    ((_, expected),) = in_processes(1, body, 2 * 72 * 4 + 1)
    assert sharded == same == expected


def count_parts(counts):
    """Append to `counts` the number of parts in which each parameter is updated from now on."""
    update_in_parts = FlatBuffer.update_in_parts

    def counted(flat_buffer, update):
        counts.append(0)

        def count():
            counts[-1] += 1
            update()

        is_updated = update_in_parts(flat_buffer, count)
        if not is_updated:
            counts.pop()
        return is_updated

    FlatBuffer.update_in_parts = counted


def updated(world, kind, options, exchange_dtype):
    """Return the parameters, and scalar state of the first one, after five steps, two unused."""
    lanes = LaneEngine(world, Config(exchange_dtype=exchange_dtype), 4, [CPU])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(41, 40, bias=False), nn.Linear(40, 2, bias=False))
    replicate(model, CPU, world)
    lanes.add(model)
    groups = [{"params": [layer.weight]} for layer in model]
    optimizer = kind(groups, **options)
    if world.size > 1:
        places = lanes.models.places()
        lanes.shards.append(
            Shard(optimizer, lanes.assignment, world, lanes.round_to, "host", places)
        )
    contents = lanes.shards[0].contents if world.size > 1 else Contents(optimizer)
    first, *_ = (parameter for group in contents.updated for parameter in group)
    if kind is optim.SGD and "momentum" in options:  # as some versions of torch save it
        contents.state[first]["momentum_buffer"] = None
    for step in range(5):
        backward_of_squares(lanes, model, step)
        if step in (2, 3):
            (model if step == 2 else optimizer).zero_grad()
        used = first.grad
        optimizer.step()
        if used is not None:
            used.zero_()  # has no effect after the step
        optimizer.zero_grad()
    state = contents.state[first]
    scalars = {name: float(state[name]) for name in SCALAR_STATE & state.keys()}
    return [bits(parameter) for parameter in model.parameters()], scalars


@pytest.mark.parametrize(
    ("exchange_dtype", "hosts", "workers", "have_arrived"),
    [
        (None, 2, 2, True),
        pytest.param(None, 2, 4, False, marks=pytest.mark.long),
        ("bfloat16", 2, 2, False),
        pytest.param("bfloat16", 3, 3, True, marks=pytest.mark.long),
        pytest.param(None, 2, 2, False, marks=pytest.mark.long),
        pytest.param(None, 2, 4, True, marks=pytest.mark.long),
        pytest.param(None, 3, 3, False, marks=pytest.mark.long),
        pytest.param(None, 3, 3, True, marks=pytest.mark.long),
        pytest.param("bfloat16", 2, 2, True, marks=pytest.mark.long),
        pytest.param("bfloat16", 2, 4, False, marks=pytest.mark.long),
        pytest.param("bfloat16", 2, 4, True, marks=pytest.mark.long),
        pytest.param("bfloat16", 3, 3, False, marks=pytest.mark.long),
    ],
)
def test_parts_of_a_large_parameter_are_updated_as_their_gradients_arrive(
    exchange_dtype, hosts, workers, have_arrived, monkeypatch
):
    """Those that have arrived meanwhile are updated together."""
    monkeypatch.setattr(across_hosts, "CHUNK_BYTES", 1024)

    def body(world):
        counts = []

        def begun(begin):
            def begin_known(*arguments):
                send = begin(*arguments)
                return lambda sent: [
                    Arrival(arrival.wait, lambda: have_arrived) for arrival in send(sent)
                ]

            return begin_known

        world.begin_swap = begun(world.begin_swap)
        if world.partners is not None:
            world.partners.begin_sums = begun(world.partners.begin_sums)
        if world.size > 1:  # in a process of its own
            exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1  # one parameter per bucket
            count_parts(counts)
        return counts, [updated(world, *variant, exchange_dtype) for variant in VARIANTS]

    ((_, expected),) = in_processes(1, body)
    with_state = sum(kind is not optim.SGD or "momentum" in options for kind, options in VARIANTS)
    adagrads = sum(kind is optim.Adagrad for kind, _ in VARIANTS)  # have state before any step
    held = Layout((41 * 40,), workers).bounds[hosts]
    for rank, (counts, results) in enumerate(on_hosts(hosts, workers, body)):
        elements = min(held, 41 * 40 - rank % (workers // hosts) * held)
        itemsize = 2 if exchange_dtype else 4
        sizes = across_hosts.chunks(held, itemsize, hosts)
        if workers == 2:  # a gradient is sent without a copy, except for its last 40 elements
            sizes = [*across_hosts.chunks(1600, itemsize), held - 1600]
        parts = sum(start < elements for start in accumulate(sizes[:-1], initial=0))
        assert parts > 1
        assert counts == [1 if have_arrived else parts] * (2 * with_state + adagrads)
        assert results == expected


def with_sharded_layer(world, widths=(1,)):
    """Return lanes, a model of linear layers and its optimizer, sharded if there are workers."""
    lanes = LaneEngine(world, Config(), 4, [CPU])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise([10, *widths])))
    replicate(model, CPU, world)
    lanes.add(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if world.size > 1:
        lanes.shards.append(
            Shard(optimizer, lanes.assignment, world, None, "host", lanes.models.places())
        )
    return lanes, model, optimizer


def test_workers_that_hold_no_part_of_a_small_layer_wait_as_the_others_do():
    def body(world):
        lanes, model, optimizer = with_sharded_layer(world)
        for step in range(3):
            backward_of_squares(lanes, model, step)
            backward_of_squares(lanes, model, step + 10)
            world.all_gather_json(None, "comparing workers")
            if step:
                optimizer.step()
                optimizer.zero_grad()
        return [bits(parameter) for parameter in model.parameters()]

    (expected,) = in_processes(1, body)
    assert on_hosts(2, 4, body) == [expected] * 4


def test_a_worker_waits_until_a_slower_one_of_its_host_has_read_its_gradients():
    def body(world):
        lanes, model, optimizer = with_sharded_layer(world)
        delays = []
        if world.size > 1:
            add_up = across_hosts.add_up

            def slow(span, sum_of):
                delays.append(time.sleep(0.5 if world.rank == 0 else 0))
                return add_up(span, sum_of)

            across_hosts.add_up = slow  # in a process of its own
        for step in range(2):
            backward_of_squares(lanes, model, step)
        optimizer.step()
        return bool(delays), [bits(parameter) for parameter in model.parameters()]

    ((_, expected),) = in_processes(1, body)
    assert on_hosts(2, 4, body) == [(True, expected)] * 4


def test_a_worker_waits_until_a_slower_one_of_its_host_has_sent_their_sum():
    """All of them have met in the meantime, but sending goes on."""

    def body(world):
        lanes, model, optimizer = with_sharded_layer(world, (64, 3))
        delays = []
        if world.rank == 1:
            send = Channel._send

            def slow(self, transfer):
                delays.append(time.sleep(0.5))
                send(self, transfer)

            Channel._send = slow  # in a process of its own
        for step in range(2):
            backward_of_squares(lanes, model, step)
            world.all_gather_json(None, "doing something else")
        optimizer.step()
        return len(delays), [bits(parameter) for parameter in model.parameters()]

    ((_, expected),) = in_processes(1, body)
    results = on_hosts(2, 4, body)
    assert [delays > 0 for delays, _ in results] == [False, True, False, False]
    assert [parameters for _, parameters in results] == [expected] * 4


def test_workers_of_a_host_wait_alike_though_they_start_exchanges_at_different_times():
    """A second call may share some of the first one's exchanges, but not the last one."""

    def body(world):
        if world.size > 1:  # in a process of its own
            exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1  # one parameter per bucket
        if world.rank == 1:  # starts all of them at the end of backward

            def later(self):
                time.sleep(0.1)

            overlap.EarlyExchange._start_ready = later
        lanes, model, optimizer = with_sharded_layer(world, (64, 3))
        backward_of_squares(lanes, model, 0)
        backward_of_squares(lanes, model, 1, update=model[1])
        optimizer.step()
        return [bits(parameter) for parameter in model.parameters()]

    (expected,) = in_processes(1, body)
    assert on_hosts(2, 4, body) == [expected] * 4


def test_hosts_with_several_workers_send_gradients_during_backward():
    def body(world, bucket_bytes):
        exchange.BUCKET_BYTES = bucket_bytes
        lanes = LaneEngine(world, Config(), 8, [CPU])
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        replicate(model, CPU, world)
        lanes.add(model)
        order = []

        def arrives(number):
            order.append(number)
            world.barrier_on_host("letting all workers of this host compute this layer")

        for number, layer in enumerate(model):
            layer.bias.register_hook(lambda _, number=number: arrives(number))
        log_sends(world, order)
        for step in range(2):
            backward_of_squares(lanes, model, step)
        return order, gradients(model)

    results = on_hosts(2, 4, body, 9 * 8 * 4)
    orders = [order for order, _ in results]
    assert all(order.index("exchange") < order.index(0, 5) for order in orders), orders
    assert [order.count("exchange") for order in orders] == [10] * 4
    ((_, expected),) = in_processes(1, body, 9 * 8 * 4)
    assert [gradients for _, gradients in results] == [expected] * 4


def test_large_gradients_are_copied_into_the_exchange_during_backward():
    def body(world, early_bytes):
        overlap.EARLY_BYTES = early_bytes
        lanes = LaneEngine(world, Config(), 2, [CPU])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 40), nn.Linear(40, 2))
        replicate(model, CPU, world)
        lanes.add(model)
        cleared = []

        def arrives(_):
            """Note which later layers have no gradient of their own any more."""
            cleared.append([layer.weight.grad is None for layer in model[1:]])

        model[0].weight.register_hook(arrives)
        history = []
        for step in range(3):  # the third adds to the gradients of the second
            backward_of_squares(lanes, model, step)
            history.append(gradients(model))
            if step == 0:
                model.zero_grad()
        return cleared, history

    limit = 40 * 40 * 4
    ((_, expected),) = in_processes(1, body, limit)
    assert in_processes(2, body, limit) == [([[True, False]] * 3, expected)] * 2
    assert in_processes(2, body, limit + 1) == [([[False, False]] * 3, expected)] * 2
    assert [history for _, history in on_hosts(2, 2, body, limit)] == [expected] * 2


def test_an_optimizer_may_be_sharded_after_the_first_gradients():
    def body(world):
        lanes = LaneEngine(world, Config(), LANES, [CPU])
        model = model_of(lanes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(lanes, model)
        model.zero_grad()
        if world.size > 1:
            lanes.shards.append(Shard(optimizer, lanes.assignment, world))
        for step in range(2):
            backward(lanes, model, step=step)
            optimizer.step()
            optimizer.zero_grad()
        return [bits(parameter) for parameter in model.parameters()]

    (expected,) = in_processes(1, body)
    assert in_processes(2, body) == [expected] * 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            torch.ones(2, requires_grad=True),
            r"must return a scalar tensor, got a tensor of shape \(2,\) in lane 3",
        ),
        (None, "got NoneType in lane 3"),
        (1.5, "got float in lane 3"),
        (torch.tensor(1.0), "the loss of lane 3 has no gradient"),
        ((torch.ones((), requires_grad=True), 3), "dict of scalars by name.*got int"),
        (
            (torch.ones((), requires_grad=True), {"many": torch.ones(2)}),
            r"metric 'many' must be a scalar, got a tensor of shape \(2,\)",
        ),
    ],
)
def test_an_unusable_loss_is_rejected(returned, message):
    with pytest.raises(LossError, match=message):
        split_loss(returned, 3)


def test_losses_and_metrics_may_be_tensors_or_numbers():
    loss = torch.ones(1, requires_grad=True) * 2
    assert split_loss(loss, 0) == (loss, {})
    _, metrics = split_loss((loss, {"a": loss, "b": 0.1, "c": 3, "d": torch.tensor([1.0])}), 0)
    assert {name: float(value) for name, value in metrics.items()} == {
        "a": 2.0,
        "b": 0.1,
        "c": 3.0,
        "d": 1.0,
    }
    assert not metrics["a"].requires_grad


def test_booleans_and_integers_with_an_entry_per_item_are_summed():
    loss = torch.ones((), requires_grad=True)
    right, words = torch.tensor([True, False, True]), torch.tensor([[250, 250]], dtype=torch.uint8)
    none = right[:0]  # such as that of a lane without masked words
    _, metrics = split_loss((loss, {"right": right, "words": words, "none": none}), 0)
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "right": [2.0, 3.0],
        "words": [500.0, 2.0],
    }


def test_a_pair_is_a_sum_and_a_count():
    loss = torch.ones((), requires_grad=True)
    pairs = {
        "code": (loss * 3, torch.tensor(2)),
        "prose": (0.1, torch.tensor([True])),
        "none": (0, 0),
    }
    _, metrics = split_loss((loss, pairs), 0)
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "code": [3.0, 2.0],
        "prose": [0.1, 1.0],
        "none": [0.0, 0.0],
    }
    assert not metrics["code"].requires_grad


@pytest.mark.parametrize("pair", [(1,), (1, 2, 3), (1, torch.ones(2)), (1, "two"), ()])
def test_other_tuples_are_refused(pair):
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(LossError, match=r"'code' must be a scalar or a pair \(sum, count\)"):
        split_loss((loss, {"code": pair}), 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_reports_step_and_lane_of_a_nonfinite_loss(workers):
    def diverging(model, batch):
        loss, _ = loss_fn(model, batch)
        return loss * math.nan if len(batch) == COUNTS[3] else loss

    def body(world):
        lanes = LaneEngine(world, Config(), LANES, [CPU])
        model = model_of(lanes)
        with pytest.raises(NonFiniteLossError) as caught:
            backward(lanes, model, step=8, loss_fn=diverging)
        continuing = LaneEngine(world, Config(nonfinite_loss="continue"), LANES, [CPU])
        result = backward(continuing, model_of(continuing), loss_fn=diverging)
        assert [math.isnan(lane.metrics["loss"]) for lane in result.results] == [
            False,
            False,
            True,
            False,
        ]
        return str(caught.value)

    expected = (
        f"the loss is nan at step 8 in lane 3 (worker {workers - 1}); lower the learning rate"
    )
    assert all(message.startswith(expected) for message in in_processes(workers, body))


def test_wrong_modules_and_counts_are_rejected():
    lanes = alone()
    model = model_of(lanes)
    with pytest.raises(
        ModelError,
        match=r"Linear has parameters that are not replicated; pass it to run.replicate first",
    ):
        backward(lanes, model, update=nn.Linear(2, 2))
    with pytest.raises(
        ModelError, match="ReLU has no parameter that requires a gradient; call requires_grad_"
    ):
        backward(lanes, model, update=nn.ReLU())
    for count in (-1, -0.5, math.inf, math.nan):
        with pytest.raises(
            DataError,
            match=f"count must return a finite number of at least 0, got {count!r} for lane 0",
        ):
            backward(lanes, model, count=lambda batch, count=count: count)


def test_without_a_plan_samples_are_counted_in_the_batches():
    lanes = alone()
    model = model_of(lanes)
    backward(lanes, model)
    planned = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    result = backward(lanes, model, planned=False)
    assert [(lane.lane, lane.count) for lane in result.results] == [
        (0, 3),
        (2, 2),
        (3, 4),
        (4, 1),
    ]
    for parameter, expected in zip(model.parameters(), planned, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_metric_updated_in_the_loss_would_have_the_lanes_of_one_worker(lanes):
    engine = LaneEngine(Alone(), Config(), lanes, [CPU])
    engine.use(plugins_of(engine))
    metric = torchmetrics.SumMetric()

    def counting(model, batch):
        metric.update(len(batch))
        return model(batch).mean()

    model = nn.Linear(3, 1)
    engine.add(model)
    batch = Batch(0, range(lanes), [2] * lanes, iter([torch.ones(2, 3)] * lanes))
    backward = partial(engine.backward, LossSpec(counting, model), batch, model, (0,), dict)
    if lanes == 1:
        backward()
        assert metric.compute() == 2
        return
    with pytest.raises(LossError, match="updated loss_fn: metric, a SumMetric"):
        backward()
