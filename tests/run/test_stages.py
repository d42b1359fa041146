"""Objects of later stages, frozen parameters and plain values after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from tests.workers import run_workers

EXAMPLES = TensorDataset(
    torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
)


class Net(nn.Module):
    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, points):
        return self.head(self.backbone(points).relu())


def loss_fn(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def fit(run, model, optimizer, **loop):
    for batch in run.batches(EXAMPLES, 4, **loop):
        run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()


def start(directory, stop_after=None, **options):
    options = {"lanes": 2, "dir": directory, "snapshot_every": None, **options}
    return ss.init(stop_after=stop_after, **options)


def stopped_at(step, job, directory, workers=1):
    """Run a job up to a step, with a snapshot there."""

    def body():
        with start(directory, step) as run:
            job(run)

    run_workers(body, workers)


def two_stages(run):
    model = run.replicate(Net())
    model.head.requires_grad_(False)
    first = torch.optim.Adam(model.backbone.parameters(), 0.01)
    run.track(model=model, first=first)
    fit(run, model, first, epochs=1, name="first")
    model.requires_grad_(True)
    model.backbone.requires_grad_(False)
    second = torch.optim.SGD(model.head.parameters(), 0.1, momentum=0.9)
    run.track(second=second)
    fit(run, model, second, epochs=2, name="second")
    return {name: value.tolist() for name, value in model.state_dict().items()}


def unfreeze_after_one_epoch(run):
    model = run.replicate(Net())
    model.backbone.requires_grad_(False)
    optimizer = run.shard(torch.optim.SGD(model.parameters(), 0.1))
    run.track(model=model, optimizer=optimizer)
    for epoch in range(run.epoch, 3):
        if epoch == 1:
            model.backbone.requires_grad_(True)
        fit(run, model, optimizer)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("job", "stops"), [(two_stages, (2, 6)), (unfreeze_after_one_epoch, (3, 7))]
)
def test_run_resumes_in_each_stage(job, stops, tmp_path):
    def whole():
        with ss.init(lanes=2) as run:
            return job(run)

    for step, workers in zip(stops, (2, 1), strict=True):
        stopped_at(step, job, tmp_path, workers)
    with start(tmp_path) as run:
        assert run.step == stops[-1]
        assert job(run) == run_workers(whole, 1)[0]
        assert run.step == 12


def test_line_says_what_starts_anew(tmp_path, capfd):
    stopped_at(2, two_stages, tmp_path)
    with start(tmp_path) as run:
        two_stages(run)
    assert "second is not in the snapshot of step 2, so it starts anew" in capfd.readouterr().err


def by_index(run, optimizer, loop):
    for number, batch in enumerate(loop):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        yield batch


def by_another_iterator(run, optimizer, loop):
    for it, (batch, _) in enumerate(zip(loop, range(9), strict=False), start=len(loop)):
        position = it * 0.5
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + position)
        yield batch


def by_step(run, optimizer, loop):
    for number, batch in enumerate(loop, start=loop.step):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        yield batch


def for_output(run, optimizer, loop):
    for number, batch in enumerate(loop):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + loop.step)
        if number % 2 == 0:
            run.print(f"batch {number}")
        yield batch


@pytest.mark.parametrize("steps", [2, 4])  # in the middle of an epoch, and at its end
@pytest.mark.parametrize(
    ("schedule", "index"),
    [(by_index, "number"), (by_another_iterator, "it"), (by_step, ""), (for_output, "")],
)
def test_an_index_that_counts_anew_is_warned_of(schedule, index, steps, tmp_path, caplog):
    def job(run):
        model = run.replicate(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in range(run.epoch, 2):
            for batch in schedule(run, optimizer, run.batches(EXAMPLES, 4)):
                run.backward(loss_fn, model, batch)
                optimizer.step()
                optimizer.zero_grad()

    stopped_at(steps, job, tmp_path)
    with start(tmp_path) as run:
        job(run)
    words = f"step 2 of epoch 0, but the index {index} of enumerate"
    assert (words in caplog.text) == (index != "" and steps == 2)


def test_line_says_that_requires_grad_was_restored(tmp_path, capfd):
    stopped_at(7, unfreeze_after_one_epoch, tmp_path)
    with start(tmp_path) as run:
        unfreeze_after_one_epoch(run)
    line = "requires_grad in model is that of the snapshot: backbone.weight trains, backbone.bias"
    assert line in capfd.readouterr().err


def track_again(directory, names, **options):
    """Track a model and two optimizers, in this order, of a run that `two_stages` began."""
    model = Net()
    objects = model, *(torch.optim.Adam(model.backbone.parameters()) for _ in range(2))
    with start(directory, **options) as run:
        run.replicate(model)
        run.track(**dict(zip(names, objects, strict=True)))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("net", "first", "second"), {}, "holds model, but no 'net': track the same names"),
        (("model", "one", "second"), {}, "holds first, but no 'one': track the same names"),
        (("model", "first", "x"), {"read_only": True}, "holds first, model, but no 'x': track"),
    ],
)
def test_objects_that_may_be_renamed_are_refused(names, options, message, tmp_path):
    stopped_at(2, two_stages, tmp_path)
    with pytest.raises(ss.SnapshotError, match=message):
        track_again(tmp_path, names, **options)


def add_group(run):
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)
    fit(run, model, optimizer, epochs=1)
    optimizer.add_param_group({"params": model.backbone.parameters()})
    fit(run, model, optimizer, epochs=2)


def grow(run):
    model = run.replicate(Net())
    run.track(model=model)
    fit(run, model, torch.optim.SGD(model.parameters(), 0.1), epochs=1)
    model = run.replicate(Net(3))
    run.track(grown=model)
    fit(run, model, torch.optim.SGD(model.parameters(), 0.1), epochs=2)


def test_parameter_group_that_was_added_says_what_to_do(tmp_path):
    stopped_at(6, add_group, tmp_path)
    with (
        pytest.raises(ss.SnapshotError, match=r"give the optimizer all groups before run\.track"),
        start(tmp_path) as run,
    ):
        add_group(run)


def test_head_of_another_size_says_what_to_do(tmp_path):
    stopped_at(6, grow, tmp_path)
    with start(tmp_path) as run:  # as the advice says
        grow(run)
    with (
        pytest.raises(ss.SnapshotError, match="make a new module for each size"),
        start(tmp_path, resume=str(tmp_path / "step-00000008")) as run,
    ):
        run.track(model=run.replicate(Net(3)))


def test_plain_values_and_tensors_continue(tmp_path):
    def count(run):
        state, history, noise = {"steps": 0}, [], torch.zeros(2)
        run.track(state=state, history=history, noise=noise)
        for _ in run.batches(EXAMPLES, 4, epochs=1):
            state["steps"] += 1
            history.append(run.step)
            noise += 1
        return state, history, noise.tolist()

    stopped_at(3, count, tmp_path)
    with start(tmp_path) as run:
        assert count(run) == ({"steps": 4}, [0, 1, 2, 3], [4.0, 4.0])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, r"got float; keep it in a dict, such as state = \{'best': 0.5\}, and track that"),
        (None, "got NoneType; keep it in a dict"),
        (set(), "must be a dict, a list, a tensor or have state_dict and load_state_dict, got set"),
    ],
)
def test_values_that_cannot_change_in_place_are_refused(value, message):
    with ss.init() as run, pytest.raises(ss.SnapshotError, match=message):
        run.track(best=value)


def test_tensor_of_another_shape_is_refused(tmp_path):
    stopped_at(
        1,
        lambda run: (run.track(weights=torch.ones(3)), [*run.batches([0], 1, epochs=2)]),
        tmp_path,
    )
    with (
        pytest.raises(ss.SnapshotError, match=r"must be a Tensor \[3\], .* got a Tensor \[4\]"),
        start(tmp_path) as run,
    ):
        run.track(weights=torch.ones(4))


@pytest.mark.parametrize("kind", ["weights", "indices"])
def test_order_that_follows_losses_continues_within_an_epoch(kind, tmp_path):
    def follow(run):
        """Draw by weights, or go on in an order, that each step changes for the next epoch."""
        weights, seen = torch.ones(16, dtype=torch.float64), []
        run.track(weights=weights, seen=seen)
        dataset = [(torch.tensor(index),) for index in range(16)]
        for _ in range(run.epoch, 3):
            order = ss.Weighted(weights) if kind == "weights" else weights.argsort()
            for batch in run.batches(dataset, 4, order=order):
                samples = [sample for (lane,) in batch for sample in lane.tolist()]
                weights[samples] += torch.arange(1.0, len(samples) + 1) * 2
                seen.append(samples)
        return seen

    with ss.init(lanes=2) as run:
        undisturbed = follow(run)
    for step in (3, 6, 8):
        stopped_at(step, follow, tmp_path)
    with start(tmp_path) as run:
        assert follow(run) == undisturbed
    state = ss.read_snapshot(tmp_path).state["run"]
    assert state["orders"] == {}  # the last epoch has ended


def test_order_that_changes_within_an_epoch_of_one_start_is_refused():
    with ss.init(lanes=2) as run:
        for batch in run.batches([0] * 16, 4, order=ss.Weighted(torch.ones(16))):
            if run.step == 2:
                break
            batch.load()
        with pytest.raises(ss.DataError, match="until the epoch ends: step 2 of epoch 0 expected"):
            run.batches([0] * 16, 4, order=ss.Weighted(torch.arange(16)))
