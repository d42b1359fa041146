"""What forward passes keep in attributes of modules is in no snapshot."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import LossError


class Norm(nn.Module):
    """Takes its shift from the first samples it sees."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def initialize(self, rows):
        self.shift.data.copy_(rows.detach().mean(0))


class FlagNorm(Norm):
    ready = False

    def forward(self, rows):
        if not self.ready:
            self.initialize(rows)
            self.ready = True
        return rows - self.shift


class LateFlag(Norm):
    def forward(self, rows):
        if not hasattr(self, "ready"):
            self.initialize(rows)
            self.ready = 1
        return rows - self.shift


class FlagInMethod(Norm):
    def __init__(self):
        super().__init__()
        self.first = None

    def initialize(self, rows):
        super().initialize(rows)
        self.first = False

    def forward(self, rows):
        if self.first is None:
            self.initialize(rows)
        return rows - self.shift


class FlagInDict(Norm):
    def __init__(self):
        super().__init__()
        self.flags = {"ready": False}

    def forward(self, rows):
        if not self.flags["ready"]:
            self.initialize(rows)
            self.flags["ready"] = True
        return rows - self.shift


class FlagInObject(Norm):
    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(ready=0)

    def forward(self, rows):
        if not self.state.ready:
            self.initialize(rows)
            self.state.ready = 1
        return rows - self.shift


class TensorFlag(Norm):
    def __init__(self):
        super().__init__()
        self.ready = torch.tensor(False)

    def forward(self, rows):
        if not self.ready:
            self.initialize(rows)
            self.ready.fill_(True)
        return rows - self.shift


class BufferFlag(Norm):
    """The right way, beside attributes that are caches or results."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.table, self.last, self.rows, self.is_shown = None, None, 0, False

    def forward(self, rows):
        if not self.ready:
            self.initialize(rows)
            self.ready.fill_(True)
        if self.table is None or self.rows < len(rows):
            self.table, self.rows = torch.ones(len(rows), 1), len(rows)
        self.last = (rows - self.shift) * self.table[: len(rows)]
        self.rest = float(self.last.detach().mean())
        return self.last


class ExtraState(FlagNorm):
    """Another right way."""

    def get_extra_state(self):
        return {"ready": self.ready}

    def set_extra_state(self, state):
        self.ready = state["ready"]


class Clipped(Norm):
    """Changes its parameter in each pass, and has a flag for something else."""

    def __init__(self):
        super().__init__()
        self.is_shown = False

    def forward(self, rows):
        self.shift.data.clamp_(-1, 1).add_(1e-3)
        if not self.is_shown:
            self.is_shown = True
        return rows - self.shift


class Counting(Norm):
    def __init__(self):
        super().__init__()
        self.calls, self.level, self.mean, self.kept = 0, 0.0, torch.zeros(2), np.zeros(2)

    def forward(self, rows):
        self.calls += 1
        self.level = 0.9 * self.level + 0.1 * float(rows.detach().mean())
        self.mean.lerp_(rows.detach().mean(0), 0.1)
        self.update(rows.detach().numpy())
        return (rows - self.shift) / self.calls + self.mean + self.level

    def update(self, rows):
        self.kept = 0.9 * self.kept + rows.mean(0)


def trained(module, lanes=1, steps=5):
    with ss.init(lanes=lanes) as run:
        model = run.replicate(nn.Sequential(nn.Linear(2, 2), module))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.batches(torch.randn(4 * steps, 2), 4, epochs=1):
            run.backward(
                lambda net, rows: net(rows.requires_grad_()[:]).square().mean(), model, batch
            )
            optimizer.step()
            optimizer.zero_grad()
        return run.step


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (FlagNorm, r"1\.ready"),
        (LateFlag, r"1\.ready"),
        (FlagInMethod, r"1\.first"),
        (FlagInDict, r"1\.flags\['ready'\]"),
        (FlagInObject, r"1\.state\.ready"),
        (TensorFlag, r"1\.ready"),
    ],
)
def test_an_initialization_under_a_flag_that_is_no_buffer_is_refused(kind, flag):
    message = rf"initialized 1\.shift and noted it in {flag}, .* before run.replicate, or make"
    with pytest.raises(LossError, match=message):
        trained(kind())


@pytest.mark.parametrize("kind", [BufferFlag, ExtraState, Clipped])
def test_what_a_resumed_run_does_not_repeat_is_allowed(kind, caplog):
    assert trained(kind()) == 5
    assert not caplog.text


def test_a_model_that_was_initialized_before_is_allowed(caplog):
    module = FlagNorm()
    module(torch.ones(4, 2))
    assert trained(module) == 5
    assert not caplog.text


def test_a_line_names_what_begins_anew_on_resume(caplog):
    assert trained(Counting()) == 5
    assert "changes 1.calls, 1.level, 1.mean, 1.kept and reads it" in caplog.text
    assert caplog.text.count("no snapshot has it") == 1


class FlagOfBuffer(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.zeros(2))
        self.ready = False

    def forward(self, rows):
        if not self.ready:
            self.scale.add_(rows.detach().abs().mean(0))
            self.ready = True
        return rows / self.scale - self.shift


def test_a_buffer_that_only_the_first_lane_initializes_is_refused():
    with pytest.raises(LossError, match=r"initialized 1\.scale and noted it in 1\.ready"):
        trained(FlagOfBuffer(), lanes=2)
