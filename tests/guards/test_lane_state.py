from __future__ import annotations

import copy
import pickle
import time
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import LossError
from samestep.guards.reach import Reach
from samestep.snapshot.state import copy_plain
from tests.workers import run_workers

total = torch.zeros(())
hidden = {}
levels = {"loss": 0.5}


class Net(nn.Module):
    """A student, its teacher, and tensors that are no buffers."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(2, 2)
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)
        self.state = self.cache = self.scratch = None

    def forward(self, rows):
        return self.student(rows).mean()


def trained(loss_fn, steps=4, net=None, buffers=None, **options):
    """Train with one lane per worker, or four in one worker."""
    torch.manual_seed(0)
    with ss.init(lanes=4, **options) as run:
        model = run.replicate(net or Net(), buffers=buffers)
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        for batch in run.batches(torch.randn(8 * steps, 2), 8, epochs=1):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return run.step


def update_data(model):
    for teacher, student in zip(
        model.teacher.parameters(), model.student.parameters(), strict=True
    ):
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


def update_in_place(model):
    with torch.no_grad():
        model.teacher.bias.lerp_(model.student.bias, 0.5)


def update_address(model):
    model.teacher.bias.data = 0.5 * model.teacher.bias.data


def update_by_loading(model):
    model.teacher.load_state_dict(model.student.state_dict())


@pytest.mark.parametrize(
    "update", [update_data, update_in_place, update_address, update_by_loading]
)
def test_a_lane_that_changes_a_parameter_is_refused(update):
    def loss_fn(model, rows):
        update(model)
        return model(rows)

    message = (
        r"a lane changed the parameter model.teacher.(weight|bias), .* after optimizer.step\(\)"
    )
    with pytest.raises(LossError, match=message):
        trained(loss_fn)


def test_a_write_without_a_version_is_found_when_bits_are_compared():
    calls = []

    def loss_fn(model, rows):
        calls.append(0)
        if len(calls) > 4 * 3:
            model.teacher.bias.data.add_(1)
        return model(rows)

    with pytest.raises(LossError, match=r"changed the parameter model.teacher.bias"):
        trained(loss_fn, steps=9, check_every=7)
    assert len(calls) == 4 * 8


def test_tensors_of_the_loss_function_must_not_be_changed_in_place():
    count = torch.zeros(())

    def add_to_closure(model, rows):
        nonlocal count
        count += len(rows)
        return model(rows)

    def add_to_global(model, rows):
        total.add_(len(rows))
        return model(rows)

    with pytest.raises(LossError, match=r"changed the tensor loss_fn: count in place"):
        trained(add_to_closure)
    with pytest.raises(LossError, match=r"changed the tensor .*test_lane_state.total in place"):
        trained(add_to_global)


def keep_in_attribute(model, rows):
    state = torch.zeros(2) if model.state is None else model.state
    model.state = (0.9 * state + model.student(rows).mean(0)).detach()
    return (model.student(rows) * model.state).mean()


def keep_in_dict(model, rows):
    state = hidden.get("state", torch.zeros(2))
    hidden["state"] = torch.cat([(0.9 * state + rows.mean(0)).detach()])
    return (model.student(rows) * state).mean()


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [(keep_in_attribute, r"model\.state"), (keep_in_dict, r".*test_lane_state\.hidden\['state'\]")],
)
def test_a_hidden_state_is_refused_at_any_number_of_workers(loss_fn, name):
    def body():
        hidden.clear()
        with pytest.raises(LossError, match=rf"lane \d read {name}, which an earlier lane"):
            trained(loss_fn)

    for workers in (1, 4):
        run_workers(body, workers)


def average_in_attribute(model, rows):
    loss = model(rows)
    model.level = 0.9 * model.level + 0.1 * loss.item()
    return loss * model.level


def average_in_closure():
    level = 1.0

    def loss_fn(model, rows):
        nonlocal level
        loss = model(rows)
        level = max(level, loss.item()) * 1.01
        return loss

    return loss_fn


def average_in_global(model, rows):
    loss = model(rows)
    levels["loss"] += loss.item()
    return loss


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (average_in_attribute, r"model\.level"),
        (average_in_closure(), "loss_fn: level"),
        (average_in_global, r".*test_lane_state\.levels\['loss'\]"),
    ],
)
def test_a_float_that_lanes_update_is_refused(loss_fn, name):
    net = Net()
    net.level = 1.0
    with pytest.raises(LossError, match=rf"lane 2 read {name}, which an earlier lane"):
        trained(loss_fn, net=net)
    assert type(net.level) is type(levels["loss"]) is float


def test_floats_that_lanes_only_set_are_allowed():
    net, texts = Net(), []
    net.last, net.scale = 1.0, None

    def loss_fn(model, rows):
        if model.scale is None:  # a cache
            model.scale = len(rows) ** -0.5
        texts.append(f"{model.last:.17g}")  # as text only
        loss = model(rows) * model.scale
        model.last = loss.item()
        return loss + 0.5 * model.last

    assert trained(loss_fn, net=net) == 4
    assert type(net.last) is float
    assert len(set(texts)) == 16  # also the values of earlier lanes


def test_a_hidden_float_that_a_lane_keeps_is_a_number_again():
    net, by_lane = Net(), {}
    net.last = net.former = 1.0

    def loss_fn(model, rows):
        model.former, loss = model.last, model(rows)
        by_lane[len(by_lane)] = model.last
        model.last = loss.item()
        return loss

    trained(loss_fn, net=net, steps=2)  # all of their lanes are watched
    assert type(net.former) is float  # as snapshots need it
    kept = [*by_lane.values()]
    assert any(type(value) is not float for value in kept)
    assert kept[-1] + 1 > kept[-1]
    copied = pickle.loads(pickle.dumps(kept))
    assert copied == kept
    saved = copy_plain(kept, "a snapshot")
    assert saved == kept
    assert {type(value) for value in copied + saved} == {float}


def late(calls, state):
    """Return a loss function whose lanes keep a tensor from some call on, and the lane's number."""
    number = [0]

    def loss_fn(model, rows):
        number[0] += 1
        if number[0] > 4 * calls:  # of four lanes
            former = torch.zeros(2) if state.get("h") is None else state["h"]
            state["h"] = 0.5 * former + rows.mean(0)
        return model(rows)

    return loss_fn, number


@pytest.mark.parametrize(
    ("state", "last_call"),
    [
        pytest.param({}, 13, id="a new key"),  # found in the call after the one that made it
        pytest.param({"h": None}, 16, id="no new key"),  # a power of two
    ],
)
def test_state_that_begins_later_is_noticed(state, last_call):
    loss_fn, number = late(11, state)
    with pytest.raises(LossError, match=r"\['h'\], which an earlier lane"):
        trained(loss_fn, steps=20, check_every=None)
    assert 4 * (last_call - 1) < number[0] <= 4 * last_call


def test_lists_that_grow_all_the_time_are_not_searched_again(monkeypatch):
    calls, losses = set(), []
    original = Reach.begin

    def begin(reach, lane_pass):
        original(reach, lane_pass)
        calls.update({reach._calls} if reach.looks_again else ())

    def loss_fn(model, rows):
        loss = model(rows)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(Reach, "begin", begin)
    trained(loss_fn, steps=40, check_every=None)
    assert len(losses) == 4 * 40
    # the first ones, two after the list has grown, and powers of two
    assert calls == {1, 2, 3, 7, 8, 12, 16, 32}


def test_scratch_memory_has_a_way_out():
    def loss_fn(model, rows):
        torch.mul(rows, 2, out=model.scratch)
        return model(model.scratch.clone())

    net = Net()
    net.scratch = torch.zeros(2, 2)
    with pytest.raises(
        LossError, match=r"overwrites before it reads .*buffers=\{'\*name': 'first'"
    ):
        trained(loss_fn, net=net)
    net = Net()
    del net.scratch
    net.register_buffer("scratch", torch.zeros(2, 2), persistent=False)
    assert trained(loss_fn, net=net, buffers={"*scratch": "first"}) == 4


def test_caches_and_results_of_layers_are_allowed():
    net, losses = Net(), []

    def loss_fn(model, rows):
        if model.cache is None or len(model.cache) < len(rows):
            model.cache = torch.arange(len(rows))
        model.scratch = model.student(rows) + model.cache[:, None]
        losses.append(model.scratch.detach())
        return model.scratch.mean()

    assert trained(loss_fn, net=net) == 4
    assert type(net.scratch) is torch.Tensor
    assert net.scratch.sum().isfinite()


def test_tensors_without_bytes_are_no_trouble():
    net = Net()
    net.graph = torch.eye(2).to_sparse()
    turned = torch.ones(2, dtype=torch.complex64).conj()
    vars(net).update(shape=torch.empty(2, device="meta"), turned=turned)
    with torch.inference_mode():
        net.fixed = torch.ones(2)
    assert trained(lambda model, rows: model(model.graph @ rows), net=net) == 4


def test_a_single_lane_may_keep_a_state():
    with ss.init(lanes=1) as run:
        model = run.replicate(Net())
        for batch in run.batches(torch.ones(8, 2), 2, epochs=1):
            run.backward(keep_in_attribute, model, batch)


class Lazy(Net):
    """A module whose forward registers buffers, one of them under two names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shared", torch.zeros(1))
        self.student.register_buffer("alias", self.shared)
        self.register_buffer("average", None)

    def forward(self, rows):
        if not hasattr(self, "table"):  # a cache
            self.register_buffer("table", torch.ones(2), persistent=False)
        return self.student(rows * self.table).mean() + self.shared.sum()


def test_a_cache_that_forward_registers_passes():
    assert trained(lambda model, rows: model(rows), net=Lazy()) == 4


def test_a_buffer_that_lanes_register_and_then_change_is_refused():
    def loss_fn(model, rows):
        if model.average is None:
            model.average = torch.zeros(2)
        model.average.lerp_(rows.mean(0), 0.5)
        return model(rows)

    with pytest.raises(LossError, match=r"a lane changed the tensor .*average"):
        trained(loss_fn, net=Lazy())


# What lanes hand on in objects: each returns what updates a state, and returns what a loss reads.
# The loss function and the body of a loop over lanes call the same.


def blend(state, mean):
    return 0.9 * state + 0.1 * mean


@dataclass
class Stats:
    mean: object
    count: int = 0


class Pair(NamedTuple):
    mean: object
    count: int


class Space:
    """A namespace."""

    mean = torch.zeros(2)


class Slots:
    __slots__ = ("mean",)


class RunningMean:
    """In NumPy, as observations are normalized in reinforcement learning."""

    def __init__(self):
        self.mean, self.count = np.zeros(2), 1

    def update(self, rows):
        self.mean = rows.numpy().mean(0)

    def __call__(self):
        return torch.from_numpy(self.mean)


def in_attribute(run):
    state = SimpleNamespace(mean=torch.zeros(2))

    def update(mean):
        state.mean = blend(state.mean, mean)
        return state.mean

    return update


def in_class(run):
    Space.mean = torch.zeros(2)

    def update(mean):
        Space.mean = blend(Space.mean, mean)
        return Space.mean

    return update


def in_default_of_class(run):
    class Average:
        mean = torch.zeros(2)

    average = Average()

    def update(mean):
        average.mean = blend(average.mean, mean)
        return average.mean

    return update


def in_dict(run):
    state = {"a": {"mean": torch.zeros(2)}}

    def update(mean):
        state["a"] = {"mean": blend(state["a"]["mean"], mean)}
        return state["a"]["mean"]

    return update


def in_list(run):
    means = [torch.zeros(2)]

    def update(mean):
        means[0] = blend(means[0], mean)
        return means[0]

    return update


def in_dataclass(run):
    state = [Stats(torch.zeros(2))]

    def update(mean):
        state[0] = replace(state[0], mean=blend(state[0].mean, mean))
        return state[0].mean

    return update


def in_tuple(run):
    state = SimpleNamespace(pair=Pair(torch.zeros(2), 0))

    def update(mean):
        state.pair = Pair(blend(state.pair.mean, mean), state.pair.count + 1)
        return state.pair.mean

    return update


def in_slots(run):
    state = Slots()
    state.mean = torch.zeros(2)

    def update(mean):
        state.mean = blend(state.mean, mean)
        return state.mean

    return update


def in_array(run):
    state = RunningMean()

    def update(mean):
        before = state()
        state.update(mean[None])
        return before

    return update


def in_array_in_place(run):
    state = RunningMean()

    def update(mean):
        state.mean += mean.numpy()
        return state()

    return update


def in_scalar_of_numpy(run):
    state = Stats(np.float64(0))

    def update(mean):
        state.mean = blend(state.mean, mean.numpy().mean())
        return float(state.mean)

    return update


def in_count(run):
    state = Stats(None)

    def update(mean):
        state.count += 1
        return min(1.0, state.count / 10)

    return update


def in_factor(run):
    state = Stats(None)

    def update(mean):
        state.count += 1
        return mean * state.count

    return update


def in_queue(run):
    queue = deque(maxlen=100)

    def update(mean):
        state = torch.stack([*queue]).mean(0) if queue else mean
        queue.append(mean)
        return state

    return update


def in_list_of_tuples(run):
    rows = []

    def update(mean):
        state = sum(part for part, _ in rows) if rows else mean
        rows.append((mean, "a text"))
        return state

    return update


STATES = {
    in_attribute: r"lane \d read .*state\.mean",
    in_class: r"lane \d read .*Space\.mean",
    in_default_of_class: r"lane \d read .*average\.mean",
    in_dict: r"lane \d read .*state\['a'\]\['mean'\]",
    in_list: r"lane \d read .*means\[0\]",
    in_dataclass: r"lane \d read .*state\[0\]\.mean",
    in_tuple: r"lane \d read .*state\.pair\[0\]",
    in_slots: r"lane \d read .*state\.mean",
    in_array: r"lane \d read .*state\.mean",
    in_array_in_place: r"a lane changed the array .*state\.mean in place",
    in_scalar_of_numpy: r"lane \d read .*state\.mean",
    in_count: r"lane \d read .*state\.count",
    in_factor: r"lane \d read .*state\.count",
    in_queue: r"lane \d read .*queue\[\d\]",
    in_list_of_tuples: r"lane \d read .*rows\[\d\]\[0\]",
}


# What is right


def results(run):
    """Keep what no lane reads."""
    state, rows = SimpleNamespace(), []

    def update(mean):
        state.mean, state.pair, state.logs = mean, (mean, 1), {"loss": float(mean[0])}
        rows.append((mean, float(mean[0])))
        return mean

    return update


def anew(run):
    """Set before it is read."""
    state, stats = {"mean": None, "array": None}, RunningMean()

    def update(mean):
        state["mean"], state["array"] = mean * 2, mean.numpy() * 2
        stats.update(mean[None])
        return state["mean"] + torch.from_numpy(state["array"]) + stats()

    return update


def clock(run):
    """Say how long a lane waited."""
    state, waits = SimpleNamespace(end=time.time()), []

    def update(mean):
        waits.append(time.time() - state.end)
        state.end = time.time()
        return mean

    return update


def caches(run):
    """Keep what each lane would compute."""
    tables, state = {}, SimpleNamespace(table=None, size=0)

    def update(mean):
        if len(mean) not in tables:
            tables[len(mean)] = np.ones(2)
        if state.size < len(mean):
            state.size, state.table = len(mean), torch.arange(2.0)
        return mean * state.table * torch.from_numpy(tables[len(mean)]) * state.size

    return update


def printed_count(run):
    """Print every second time."""
    state, shown = Stats(None), []

    def update(mean):
        state.count += 1
        if state.count % 2 == 1:
            shown.append(f"{state.count:3d} {range(state.count)}")
        return mean

    return update


def of_the_step(run):
    """Read what the body of the loop over batches sets."""
    state = SimpleNamespace(mean=np.zeros(2), level=1.0, step=0, rows=[torch.zeros(2)])

    def update(mean):
        if state.step != run.step:
            state.step = run.step
        return mean + torch.from_numpy(state.mean) * state.level + state.rows[-1]

    def after():
        state.mean, state.level = state.mean + 1, state.level * 0.5
        state.rows.append(state.rows[-1] + 1)

    update.after = after
    return update


RIGHT = (results, anew, clock, caches, printed_count, of_the_step)


def trained_with(make, form, steps=4):
    with ss.init(lanes=4) as run:
        model, update = run.replicate(Net()), make(run)

        def loss_fn(module, rows):
            outputs = module.student(rows)
            return (outputs * update(outputs.detach().double().mean(0))).mean()

        for batch in run.batches(torch.randn(8 * steps, 2), 8, epochs=1):
            if form == "function":
                run.backward(loss_fn, model, batch)
            else:
                for rows in batch.lanes(model):
                    outputs = model.student(rows)
                    factor = update(outputs.detach().double().mean(0))
                    batch.backward((outputs * factor).mean())
            getattr(update, "after", int)()


FORMS = ("function", "body")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", STATES)
def test_a_state_in_any_object_is_refused(make, form):
    with pytest.raises(LossError, match=STATES[make]):
        trained_with(make, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", RIGHT)
def test_what_depends_on_no_other_lane_is_allowed(make, form):
    trained_with(make, form, steps=9)  # which are searched a second time


def test_several_workers_refuse_what_one_refuses():
    def body():
        for make in (in_attribute, in_array, in_tuple, in_queue):
            for form in FORMS:
                with pytest.raises(LossError, match=STATES[make]):
                    trained_with(make, form)

    for workers in (2, 4):
        run_workers(body, workers)
