"""docs/architecture.md lists the files that a step really enters."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import torch
import torch._dynamo  # imported by the first step of an optimizer: before the traced one
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from tests.docs.blocks import ROOT

SOURCE = Path(ss.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILE = re.compile(r"^\d+\. \[[\w/.]+\]\(\.\./src/samestep/([\w/.]+)\)", re.MULTILINE)


def listed_files():
    """Return the files of the numbered list under the heading of this walkthrough, in order."""
    (section,) = re.findall(
        r"^### A training step\b.*?\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL
    )
    return FILE.findall(section)


def mean_loss(model, batch):
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def entered_files(directory):
    """Return the files whose functions the main thread calls in one step, by their first call.

    The step lasts from `run.backward` until the loop has the next batch. No snapshot and no search
    is due, and no garbage is collected, which could call finalizers.
    """
    entered = {}

    def note_call(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            entered.setdefault(path.relative_to(SOURCE).as_posix())

    pictures = torch.randn(144, 8, generator=torch.Generator().manual_seed(0))
    train_set = TensorDataset(pictures, torch.arange(144) % 2)
    options = {"device": "cpu", "snapshot_every": None, "hot_every": None, "system_every": None}
    with ss.init(dir=directory, lanes=4, **options) as run:
        model = run.replicate(nn.Linear(8, 2))
        optimizer = run.shard(torch.optim.Adam(model.parameters()))
        run.track(model=model, optimizer=optimizer)
        former = sys.getprofile()
        try:
            for step, batch in enumerate(run.batches(train_set, 16, steps=9)):
                if step == 6:  # those before have warmed up, and found what the lanes reach
                    gc.disable()
                    sys.setprofile(note_call)
                elif step == 7:
                    sys.setprofile(former)
                means = run.backward(mean_loss, model, batch)
                optimizer.step()
                optimizer.zero_grad()
                run.log(means)
        finally:
            sys.setprofile(former)
            gc.enable()
    return list(entered)


def test_a_step_enters_the_files_that_the_page_lists(tmp_path):
    entered, listed = entered_files(tmp_path), listed_files()
    missing, unused = sorted({*entered} - {*listed}), sorted({*listed} - {*entered})
    assert (missing, unused) == ([], []), (
        f"docs/architecture.md should also list {missing}, and not {unused}; the step entered, in"
        f" this order, {entered}"
    )
    assert listed == entered  # in the order of their first call


def test_the_page_counts_the_files():
    (count,) = re.findall(r"^### A training step\b.*\((\d+) files\)$", PAGE, re.MULTILINE)
    assert int(count) == len(listed_files())
