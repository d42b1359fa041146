"""A lane must hand nothing to the next one that a loss depends on; all else may stay as it is."""

from __future__ import annotations

import logging
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import samestep as ss
from samestep.errors import LossError
from tests.jobs import Net, images
from tests.workers import run_workers

is_first = True  # of the lanes of a step


def loss_of(model, lane_batch, scale=1):
    inputs, labels = lane_batch
    return F.cross_entropy(model(inputs), labels) * scale


# The number of a lane on this worker, and what goes beside the lanes


def index(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        batch.backward(loss_of(model, lane) * (2 if number == 0 else 1))


def index_of_a_pair(run, model, batch):
    for pair in enumerate(batch.lanes(model)):
        number, lane = pair
        batch.backward(loss_of(model, lane, 1 + number))


def index_of_a_stored_loop(run, model, batch):
    lanes = batch.lanes(model)
    for number, lane in enumerate(lanes, 1):
        batch.backward(loss_of(model, lane, number))


def index_through_a_branch(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        if number == 0:
            scale = 2
        else:
            scale = 1
        batch.backward(loss_of(model, lane, scale))


def index_chooses_a_loss(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        if number == 0:
            batch.backward(loss_of(model, lane))
        else:
            batch.backward(loss_of(model, lane, 2))


def index_as_a_metric(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        batch.backward(loss_of(model, lane), number=float(number))


def index_in_a_list(run, model, batch):
    scales = []
    for number, lane in enumerate(batch.lanes(model)):
        scales.append(number)
        batch.backward(loss_of(model, lane, 1 + scales[-1]))


def index_in_an_inner_loop(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        scale = 1
        for _ in range(number):
            scale = 2
        batch.backward(loss_of(model, lane, scale))


def zipped_weights(run, model, batch):
    for (number, lane), weight in zip(enumerate(batch.lanes(model)), [1, 2]):
        run.print(number)
        batch.backward(loss_of(model, lane, weight))


def next_of_an_iterator(run, model, batch):
    weights = iter([1, 2])
    for lane in batch.lanes(model):
        weight = next(weights)
        batch.backward(loss_of(model, lane, weight))


def index_in_a_generator(run, model, batch):
    def numbered():
        yield from ()
        for number, lane in enumerate(batch.lanes(model)):
            yield number, lane

    for number, lane in numbered():
        batch.backward(loss_of(model, lane, 1 + number))


# What a lane leaves behind


def flag(run, model, batch):
    first = True
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, 2 if first else 1))
        first = False


def flag_in_a_branch(run, model, batch):
    first = True
    for lane in batch.lanes(model):
        loss = loss_of(model, lane)
        if first:
            loss = loss * 2
        first = False
        batch.backward(loss)


def global_flag(run, model, batch):
    global is_first

    def scaled(loss):
        return loss * (2 if is_first else 1)

    is_first = True
    for lane in batch.lanes(model):
        batch.backward(scaled(loss_of(model, lane)))
        is_first = False


def flag_of_an_object(run, model, batch):
    state = SimpleNamespace(first=True)
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, 2 if state.first else 1))
        state.first = False


class State:
    def __init__(self):
        self.first = True

    def scale(self):
        return 2 if self.first else 1

    def end(self):
        self.first = False


def flag_in_methods(run, model, batch):
    state = State()
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, state.scale()))
        state.end()


def flag_in_a_dict(run, model, batch):
    flags = {"first": True, "name": "x"}
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, 2 if flags["first"] else 1))
        flags["first"] = False


def flag_by_a_helper(run, model, batch):
    global is_first
    is_first = True
    for lane in batch.lanes(model):
        train(batch, model, lane)


def train(batch, model, lane):
    global is_first
    batch.backward(loss_of(model, lane, 2 if is_first else 1))
    is_first = False


def text(run, model, batch):
    name = ""
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, 1 + len(name)))
        name = name + "x"


def nothing_yet(run, model, batch):
    before = None
    for lane in batch.lanes(model):
        logits = model(lane[0])
        loss = F.cross_entropy(logits, lane[1])
        batch.backward(loss if before is None else loss + before[0].mean())
        before = (logits.detach(), 1)


def array(run, model, batch):
    weight = np.ones(1)
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, float(weight[0])))
        weight *= 2


def entries(run, model, batch):
    cache = deque(maxlen=2)
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, 1 + len(cache)))
        cache.append(lane[0].mean())


def entry_in_place(run, model, batch):
    weights = [1, 1]
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane, sum(weights)))
        weights[0] = 3


def state_by_a_method(run, model, batch):
    memory = Memory()
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane) + memory.mean)
        memory.keep(lane[0])


class Memory:
    def __init__(self):
        self.mean, self.name = torch.zeros(()), "mean"

    def keep(self, inputs):
        self.mean = inputs.mean()


def state_anew(run, model, batch):
    state = SimpleNamespace(mean=torch.zeros(()), name="mean")
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane) + state.mean)
        state = SimpleNamespace(mean=lane[0].mean(), name="mean")


def set_only_for_some_lanes(run, model, batch):
    scale = 1
    for lane in batch.lanes(model):
        if float(lane[0].sum()) > -1e9:
            scale = scale if scale == 2 else 2
        batch.backward(loss_of(model, lane, scale))


def counter(run, model, batch):
    steps = 0
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane))
        steps += 1
    return steps


def counter_of_an_object(run, model, batch):
    state = SimpleNamespace(steps=0, model=model)
    for lane in batch.lanes(state.model):
        batch.backward(loss_of(state.model, lane))
        state.steps += 1


def wrapped(run, model, batch):
    def shown(lanes):
        for lane in lanes:
            yield lane

    first = True
    for lane in shown(batch.lanes(model)):
        batch.backward(loss_of(model, lane, 2 if first else 1))
        first = False


HANDED_ON = {
    index: "depends on number",
    index_of_a_pair: r"depends on pair\[0\]",
    index_of_a_stored_loop: "depends on number",
    index_through_a_branch: "depends on number",
    index_chooses_a_loss: "depends on number",
    index_as_a_metric: "depends on number",
    index_in_a_list: "depends on number",
    index_in_an_inner_loop: "depends on number",
    zipped_weights: "depends on weight",
    next_of_an_iterator: r"depends on next\(weights\)",
    index_in_a_generator: "depends on number",
    flag: "changed first",
    flag_in_a_branch: "changed first",
    global_flag: "changed is_first",
    flag_of_an_object: r"changed state\.first",
    flag_in_methods: r"changed state\.first",
    flag_in_a_dict: r"changed flags\['first'\]",
    flag_by_a_helper: "changed is_first",
    text: "changed name",
    nothing_yet: "changed before",
    array: "changed weight",
    entries: "changed cache",
    entry_in_place: "changed weights",
    state_by_a_method: r"changed memory\.mean",
    state_anew: r"changed state\.mean",
    set_only_for_some_lanes: "changed scale",
    counter: "changed steps",
    counter_of_an_object: r"changed state\.steps",
    wrapped: "changed first",
}


# What is right stays allowed


def prints_by_index(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        loss = loss_of(model, lane)
        batch.backward(loss)
        name = f"lane {number}"
        if number == 0:
            shown = loss.item()
            run.print(name, shown)
            logging.getLogger("job").info("lane %d: %s", number, shown)


def index_of_another_loop(run, model, batch):
    for number, lane in enumerate(batch.lanes(model)):
        run.print(number)
        loss = sum(loss_of(model, lane, number) for number in (1, 2))
        for number in range(2):
            loss = loss * (1 + number)
        batch.backward(loss)


def prints_once(run, model, batch):
    first, previous_shape, title, is_large = True, None, "", False
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane))
        title += "*"
        is_large = is_large or len(lane[0]) > 1
        if first or previous_shape != lane[0].shape:
            run.print(title, lane[0].shape)
        first, previous_shape = False, lane[0].shape


def previews(run, model, batch):
    kept = []
    for lane in batch.lanes(model):
        batch.backward(loss_of(model, lane))
        if len(kept) < 1:
            kept.append(lane[0][:2])


def clock(run, model, batch):
    end = time.perf_counter()
    for lane in batch.lanes(model):
        run.print(time.perf_counter() - end)
        batch.backward(loss_of(model, lane))
        end = time.perf_counter()


class Bar:
    """As of tqdm: written in Python, with a counter of its own."""

    def __init__(self, lanes):
        self.lanes = lanes
        self.done = 0
        self.texts = ["a text"]

    def __iter__(self):
        for lane in self.lanes:
            yield lane
            self.texts.append("")

    def update(self, count):
        self.texts[0] = str(count)


def progress_bar(run, model, batch):
    bar = Bar(batch.lanes(model))
    for number, lane in enumerate(bar):
        batch.backward(loss_of(model, lane))
        bar.update(number)


def names_beside(run, model, batch):
    for lane, name in zip(batch.lanes(model), ["one", "two"]):
        batch.backward(loss_of(model, lane))
        run.print(name)


def options(run, model, batch):
    uses_norm, kind = True, "cross entropy"
    for lane in batch.lanes(model):
        logits = model(lane[0])
        if kind == "cross entropy":
            loss = F.cross_entropy(logits, lane[1])
        elif kind == "mean":
            loss = logits.mean()
        if uses_norm:
            size = logits.square().mean()
        if uses_norm:
            loss = loss + size
        batch.backward(loss)


def mixed(run, model, batch):
    for inputs, labels in batch.lanes(model):
        is_mixed = len(inputs) > 1
        if is_mixed:
            order = torch.randperm(len(inputs))
            inputs = 0.5 * inputs + 0.5 * inputs[order]
        loss = F.cross_entropy(model(inputs), labels)
        batch.backward(loss + F.cross_entropy(model(inputs), labels[order]) if is_mixed else loss)


def outputs_of_a_lane(run, model, batch):
    outputs, total = [], None
    for inputs, labels in batch.lanes(model):
        outputs = []
        total = 0.0
        for part in inputs.split(2):
            outputs.append(model(part))
            total = total + outputs[-1].mean()
        try:
            loss = F.cross_entropy(torch.cat(outputs), labels)
        except RuntimeError:
            loss = total
        batch.backward(loss + total)


class Trainer:
    """As in many scripts, with all that a step has as attributes."""

    def __init__(self, run, model, batch):
        self.run, self.model, self.batch, self.last = run, model, batch, None

    def loss(self, lane):
        loss = loss_of(self.model, lane)
        self.last = loss.detach()
        self.logs = {"loss": loss.item()}
        return loss

    def log(self, number):
        self.number = number

    def step(self):
        for number, lane in enumerate(self.batch.lanes(self.model)):
            self.inputs, self.labels = lane
            self.outputs = self.model(self.inputs)
            self.log(number)
            loss = self.loss(lane) + self.outputs.mean()
            self.batch.backward(loss)


def trainer(run, model, batch):
    Trainer(run, model, batch).step()


def set_to_the_same(run, model, batch):
    weight, kind = None, "a"
    for lane in batch.lanes(model):
        kind = kind.lower()
        weight = weight or None
        model.train()
        loss = loss_of(model, lane, 1 if weight is None and kind == "a" else 2)
        batch.backward(loss)


ALLOWED = (
    prints_by_index, index_of_another_loop, prints_once, previews, clock, progress_bar,
    names_beside, options, mixed, outputs_of_a_lane, trainer, set_to_the_same,
)  # fmt: skip


def train_with(*bodies, lanes=2):
    with ss.init(lanes=lanes) as run:
        model = run.replicate(Net())
        for batch in run.batches(images(8), 8, steps=2):
            for body in bodies:
                body(run, model, batch)


@pytest.mark.parametrize("body", HANDED_ON)
def test_what_a_lane_hands_to_the_next_one_is_refused(body):
    with pytest.raises(LossError, match=HANDED_ON[body]):
        train_with(body)


def test_what_no_loss_depends_on_is_allowed():
    train_with(*ALLOWED)
    train_with(index, flag, lanes=1)  # where there is no other lane


def test_each_of_several_workers_refuses():
    def refusals():
        for body in (index, flag):
            with pytest.raises(LossError, match=HANDED_ON[body]):
                train_with(body)

    run_workers(refusals, 2)


def test_a_body_without_source_goes_on_with_a_warning(caplog):
    names = dict(globals())
    exec(
        "def hidden(run, model, batch):\n"
        " for lane in batch.lanes(model):\n"
        "  batch.backward(loss_of(model, lane))",
        names,
    )
    train_with(names["hidden"])
    assert "the source of <string> cannot be read" in caplog.text
