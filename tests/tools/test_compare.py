"""`samestep compare` names the first step at which two runs part, and what differs there first."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.cli import main
from samestep.record.chain import FILE, ROW_BYTES, ChainFile, origin
from samestep.record.events import FILE_NAME
from samestep.tools.replay import means_of
from samestep.tools.trace import differing_state
from tests.faults import flip_byte
from tests.python import run_python

STEPS = 12
BATCH = 8
STATE = {
    "ulp": lambda model, _: model.weight,
    "momentum buffer ulp": lambda model, optimizer: optimizer.state[model.weight][
        "momentum_buffer"
    ],
}
LOUDER = {"output ulp": "factor", "loss ulp": "weight"}


def loss_fn(model, batch, factor=1.0, weight=1.0):
    return (factor * model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean() * weight


def up(tensor):
    """Increase all numbers by one unit in the last place."""
    with torch.no_grad():
        tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, 9.0)))


def data_of(kind, at):
    """Return the samples and their order, with a change of a kind in step `at`."""
    points = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(0))
    order = list(range(STEPS * BATCH))  # no shuffled one, so that it can be changed
    first = at * BATCH  # sample of the step
    if kind == "order":
        order[first], order[first + 1] = order[first + 1], order[first]
    if kind == "sample":
        points[first + 5] += 1
    if kind == "sample ulp":
        up(points[first + 5])
    if kind == "length":
        points = torch.cat([points, points[:1]])
    return points, order


def change_before(kind, model, optimizer):
    """Change state or options before a step."""
    group, option = optimizer.param_groups[0], kind.removesuffix(" ulp")
    if kind in STATE:
        up(STATE[kind](model, optimizer))
    elif kind in group:
        group[kind] += 1e-3
    elif option in group:
        number = torch.tensor(group[option])  # in float32, as kernels use it
        up(number)
        group[option] = number.item()


def train(directory, kind="nothing", at=0, steps=STEPS, **options):
    """Train in this process, with a change of a kind in step `at`."""
    points, order = data_of(kind, at)
    options = {"lanes": 4, "snapshot_every": None, **options}
    with ss.init(dir=directory, **options) as run:
        model = run.replicate(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.01)
        if kind == "optimizer":
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        size = 2 * BATCH if kind == "batch size" else BATCH
        for batch in run.batches(TensorDataset(points), size, steps=steps, order=order):
            now = kind if run.step == at else "nothing"
            change_before(now, model, optimizer)
            scale = {LOUDER[now]: 1 + 2**-23} if now in LOUDER else {}
            run.log(run.backward(partial(loss_fn, **scale), model, batch))
            if now == "backward":
                run.backward(loss_fn, model, batch)
            if now == "gradient ulp":
                up(model.weight.grad)
            optimizer.step()
            if now == "update":
                optimizer.step()
            if now == "update ulp":
                up(model.weight)
            optimizer.zero_grad()
            if now == "state":
                with torch.no_grad():
                    model.bias += 1


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    train(directory)
    return directory


@pytest.fixture
def compare(capsys):
    """Return a function that compares two runs, and returns the exit status and the output."""

    def run(first, second):
        status = main(["compare", str(first), str(second)])
        return status, "".join(capsys.readouterr())

    return run


OPTIONS = [
    ({"seed": 1}, "in their seeds: 0 in A, 1 in B", ""),
    ({"lanes": 2}, "from step 0 on, first in its program", "option lanes: 4 in A, 2 in B"),
    (
        {"exchange_dtype": "bfloat16"},
        "from step 0 on, first in its program",
        "option exchange_dtype: [a-z0-9]+ in A, bfloat16 in B",
    ),
    (
        {"skip_batches": "7:8"},
        "from step 7 on, first in its losses",
        "option skip_batches: nothing in A, 7:8 in B",
    ),
    (
        {"exclude": "left_out.txt"},
        "from step 3 on, first in its samples",
        "samples:\n  exclude: nothing in A, [0-9a-f]+ in B",
    ),
    ({"settings": {"rate": 1}}, "", ""),  # which changes nothing
]
KINDS = [
    ("ulp", "losses", "loss: [0-9.e-]+ in A, [0-9.e-]+ in B"),
    ("lr", "rates", "optimizer: 0.1 in A, 0.101 in B"),
    ("weight_decay", "rates", "perhaps an option of an optimizer"),
    ("momentum", "rates", "perhaps an option of an optimizer"),
    ("order", "samples", "perhaps the order"),
    ("sample", "losses", "loss: "),
    ("backward", "losses", "perhaps what has no digest"),
    ("update", "rates", "or its updates"),
]
FROM_THE_START = [
    ("length", "program", "the length of the data set"),
    ("batch size", "samples", "batch_size: 8 in A, 16 in B"),
    ("optimizer", "rates", "perhaps an option of an optimizer"),
]
IN_BRIEF = {"ulp": 6, "lr": 6, "order": 6, "length": 0}  # other cases are long


def case(kind, at, part, named):
    marks = [] if IN_BRIEF.get(kind) == at else [pytest.mark.long]
    return pytest.param(kind, at, part, named, marks=marks)


@pytest.mark.parametrize(
    ("kind", "at", "part", "named"),
    [
        *(case(kind, at, *expected) for kind, *expected in KINDS for at in (0, 6, STEPS - 1)),
        *(case(kind, 0, *expected) for kind, *expected in FROM_THE_START),
    ],
)
def test_a_planted_change_is_found_and_named(base, tmp_path, compare, kind, at, part, named):
    train(tmp_path, kind, at)
    status, printed = compare(base, tmp_path)
    assert status == 1
    assert f"DIFFERENT from step {at} on, first in its {part}\n" in printed
    assert re.search(named, printed)


ONE_ULP = [  # and the steps from the change to the first row that shows it
    *((kind, "losses", 0) for kind in ("ulp", "sample ulp", "output ulp", "loss ulp")),
    *((kind, "rates", 0) for kind in ("lr ulp", "momentum ulp", "weight_decay ulp")),
    *((kind, "losses", 1) for kind in ("gradient ulp", "update ulp", "momentum buffer ulp")),
]
LARGER = [(kind, part, 0) for kind, part, _ in [*KINDS[1:], *FROM_THE_START]]


@pytest.mark.long
def test_changes_are_found_of_which_a_threshold_on_the_loss_finds_few(base, tmp_path, compare):
    """A loss is out of bounds if it differs in any step by a thousandth of itself."""
    expected, found, out_of_bounds = means_of(base), [], []
    for kind, part, later in [*ONE_ULP, *LARGER]:
        at = 0 if kind in {case[0] for case in FROM_THE_START} else 1 if later else 6
        train(tmp_path / kind, kind, at)
        _, printed = compare(base, tmp_path / kind)
        if f"DIFFERENT from step {at + later} on, first in its {part}\n" in printed:
            found.append(kind)
        losses = means_of(tmp_path / kind)
        if any(
            abs(losses[step]["loss"] - was["loss"]) > 1e-3 * was["loss"]
            for step, was in expected.items()
            if step in losses
        ):
            out_of_bounds.append(kind)
        states = [path / f"step-{STEPS:08d}" for path in (base, tmp_path / kind)]
        assert "ulp" not in kind or differing_state(states), f"{kind} has changed no bit"
    assert (len(found), len(ONE_ULP)) == (20, 10)
    # as docs/history.md says: none of one ulp, and 8 of the others
    missed = {"order", "length"}
    assert out_of_bounds == [kind for kind, *_ in LARGER if kind not in missed]


@pytest.mark.parametrize(("options", "text", "named"), OPTIONS)
def test_an_option_is_named(base, tmp_path, compare, monkeypatch, options, text, named):
    monkeypatch.chdir(tmp_path)
    Path("left_out.txt").write_text("25\n")  # a sample of step 3
    train(tmp_path, **options)
    status, printed = compare(base, tmp_path)
    assert status == bool(text)
    assert f"DIFFERENT {text}" in printed if text else "the same at every step" in printed
    assert re.search(named, printed)


def test_a_state_that_differs_after_equal_steps_is_named(base, tmp_path, compare):
    train(tmp_path, "state", STEPS - 1)
    status, printed = compare(base, tmp_path)
    assert status == 1
    assert f"DIFFERENT in the state after {STEPS} steps, which have the same rows" in printed
    assert "state: 'model/bias'\n" in printed
    shutil.rmtree(tmp_path / f"step-{STEPS:08d}")
    assert compare(base, tmp_path)[0] == 1  # its digest is in the record


def test_a_part_of_a_run_is_the_same(base, tmp_path, compare):
    """A is a prefix of B, or B began with a snapshot of A."""
    train(tmp_path / "part", steps=5)
    for pair in ((base, tmp_path / "part"), (tmp_path / "part", base)):
        status, printed = compare(*pair)
        assert (status, f"{tmp_path}/part, 5 steps, 0 to 4" in printed) == (0, True)
    train(tmp_path / "rest", resume=tmp_path / "part" / "step-00000005")
    status, printed = compare(base, tmp_path / "rest")
    assert (status, "7 steps, 5 to 11" in printed) == (0, True)
    assert compare(tmp_path / "part", tmp_path / "rest")[0] == 0
    train(tmp_path / "other", "lr", 2, steps=5)
    train(tmp_path / "continued", resume=tmp_path / "other" / "step-00000005")
    status, printed = compare(base, tmp_path / "continued")
    assert (status, "before step 5, the first one that both have" in printed) == (1, True)
    train(tmp_path / "begun", steps=2)
    status, printed = compare(tmp_path / "begun", tmp_path / "rest")
    assert (status, "no step in common" in printed) == (2, True)


def begin_without_a_head(run):
    """Give a run the chain of one that an earlier version began, which resumed at step 5."""
    (run / FILE).unlink()
    ChainFile(run, 5, 0, origin(0)).close()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda run: shutil.rmtree(run / "record"), "cannot read a chain"),
        (lambda run: (run / FILE).write_bytes(b""), "must begin with"),
        (lambda run: flip_byte(run / FILE, 8), "must have format"),
        (shutil.rmtree, "cannot read a chain"),
        (lambda run: os.truncate(run / FILE, ROW_BYTES), "no step in common"),  # only its header
        (begin_without_a_head, "begins at step 5, with a snapshot of an earlier version"),
    ],
)
def test_what_cannot_be_compared_is_an_error(base, tmp_path, compare, damage, expected):
    shutil.copytree(base, tmp_path / "run")
    damage(tmp_path / "run")
    for pair in ((base, tmp_path / "run"), (tmp_path / "run", base)):
        status, printed = compare(*pair)
        assert (status, expected in printed) == (2, True)


def test_a_record_is_not_needed_and_a_changed_head_is_said(base, tmp_path, compare):
    shutil.copytree(base, tmp_path / "run")
    (tmp_path / "run" / FILE_NAME).unlink()
    assert compare(base, tmp_path / "run")[0] == 0
    with (tmp_path / "run" / FILE).open("r+b") as file:
        file.seek(-ROW_BYTES, os.SEEK_END)
        file.write(bytes(4))
    status, printed = compare(base, tmp_path / "run")
    assert status == 1
    assert f"DIFFERENT in the heads of step {STEPS - 1} only: one of the files" in printed


def test_few_rows_are_read(base, tmp_path, compare, monkeypatch):
    train(tmp_path, "lr", 9)
    reads, pread = [], os.pread

    def note(file, size, place):
        reads.append(size)
        return pread(file, size, place)

    monkeypatch.setattr(os, "pread", note)
    assert compare(base, tmp_path)[0] == 1
    rows = [size for size in reads if size == ROW_BYTES]
    assert 0 < len(rows) <= 2 * (4 + 2)  # of two runs with 12 steps, and their headers


SCRIPT = """
import torch
from torch import nn
import samestep as ss
from rate import RATE

points = torch.arange(16.0).view(16, 1)
with ss.init(lanes=2, snapshot_every=None) as run:
    model = run.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(points, 4, epochs=1):
        run.log(run.backward(lambda model, points: model(points).mean(), model, batch))
        if run.step == 2:
            import later
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("file", "step"),
    [
        ("rate.py", 0),
        pytest.param("train.py", 0, marks=pytest.mark.long),
        pytest.param("later.py", 2, marks=pytest.mark.long),
    ],
)
def test_a_line_of_code_is_named(tmp_path, compare, file, step):
    files = {"train.py": SCRIPT, "rate.py": "RATE = 0.01\n", "later.py": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for number in (1, 2):
        command = ["-m", "samestep", "run", "--dir", str(tmp_path / f"run{number}")]
        run_python(*command, str(tmp_path / "train.py"))
        (tmp_path / file).write_text(f"{files[file]}# a comment\n")
    status, printed = compare(tmp_path / "run1", tmp_path / "run2")
    assert status == 1
    assert f"DIFFERENT from step {step} on, first in its program" in printed
    named = f"file {file}: " if step == 0 else "perhaps a module that was imported after the start"
    assert named in printed
