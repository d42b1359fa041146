from __future__ import annotations

import copy
import pickle

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
    net, kept = Net(), []
    net.last = net.former = 1.0

    def loss_fn(model, rows):
        model.former, loss = model.last, model(rows)
        kept.append(model.last)
        model.last = loss.item()
        return loss

    trained(loss_fn, net=net, steps=2)  # all of their lanes are watched
    assert type(net.former) is float  # as snapshots need it
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
