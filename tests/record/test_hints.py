from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep as ss
from samestep.record import hints
from samestep.record.events import read_events
from samestep.record.hints import Hint, Updates, find_hints, hints_of
from samestep.record.source import open_source
from samestep.watch.report import make_report
from samestep.watch.view import View
from tests.jobs import classify, images

NOTHING = Updates()
SIZES = st.sampled_from([3, 20, 299, 300, 1000, 30_000])


def series(values, every=1):
    """Return values at every few steps."""
    return np.arange(len(values), dtype=np.float64) * every + every - 1, np.array(values, float)


def kinds(updates=NOTHING, **scalars):
    named = {name.replace("_in_", "/"): values for name, values in scalars.items()}
    return [hint.kind for hint in find_hints(named, updates)]


def falling(shape, size):
    x = np.arange(size) / size
    return {
        "exponential": 0.2 + 2.3 * np.exp(-3 * x),
        "power": 2.3 / np.sqrt(1 + 20 * x),
        "linear": 2.3 - 1.5 * x,
        "language": 3.2 + 7 / np.sqrt(1 + 100 * x),
        "steps": 2.3 - 0.25 * np.floor(8 * x) - 0.1 * x,  # a learning rate that is divided
    }[shape]


SHAPES = st.sampled_from(["exponential", "power", "linear", "language", "steps"])


@given(shape=SHAPES, size=SIZES, scale=st.floats(1e-6, 1e6), every=st.integers(1, 50))
def test_a_curve_that_keeps_falling_gets_no_hint(shape, size, scale, every):
    losses = scale * falling(shape, size)
    evaluated = series(losses[::every] * 1.1, every)
    assert kinds(loss=series(losses), val_in_loss=evaluated) == []


@given(drops=st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=400))
def test_nor_does_any_other_falling_curve(drops):
    losses = 10 + np.cumsum(drops[::-1])[::-1]
    if (np.diff(losses) < 0).all():  # no drop is rounded off
        assert kinds(loss=series(losses), val_in_loss=series(losses)) == []


@settings(deadline=None, derandomize=True)  # noise may look like anything, very rarely
@given(
    shape=SHAPES,
    size=st.sampled_from([300, 1000, 10_000]),
    noise=st.floats(0, 0.15),
    seed=st.integers(0, 200),
    spikes=st.integers(0, 5),
)
def test_noise_and_spikes_on_a_falling_curve_give_no_hint(shape, size, noise, seed, spikes):
    random = np.random.default_rng(seed)
    losses = falling(shape, size) + noise * random.standard_normal(size)
    losses[random.integers(0, size, spikes)] += 1000
    losses[random.integers(0, size)] = math.nan
    every = size // 30
    evaluated = falling(shape, size)[::every] + 0.3 * noise * random.standard_normal(size)[::every]
    assert kinds(loss=series(losses), val_in_loss=series(evaluated, every)) == []


@settings(deadline=None, derandomize=True)  # noise may look like anything, very rarely
@given(
    size=st.integers(2, 60), noise=st.floats(0, 0.3), seed=st.integers(0, 200), spike=st.booleans()
)
def test_a_noisy_validation_loss_is_no_overfitting(size, noise, seed, spike):
    evaluated = 1 + noise * np.random.default_rng(seed).standard_normal(size)
    evaluated[-1] += 100 * spike
    loss = series(falling("exponential", 50 * size))
    assert "overfitting" not in kinds(loss=loss, val_in_loss=series(evaluated, 50))


@pytest.mark.parametrize("size", [10, 30, 200])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_validation_loss_that_rises_while_the_training_loss_falls_is_overfitting(size, noise):
    x, random = np.arange(size) / size, np.random.default_rng(0)
    evaluated = 1 - 1.2 * x + 1.5 * x**2 + noise * random.standard_normal(size)
    trained = falling("exponential", 50 * size) + noise * random.standard_normal(50 * size)
    (hint,) = find_hints({"loss": series(trained), "val/loss": series(evaluated, 50)}, NOTHING)
    assert hint.kind == "overfitting"
    step = int(hint.text.partition("since step ")[2].split()[0].replace(",", ""))
    assert 0.25 < step / (50 * size) < 0.6  # the lowest value is at 0.4
    # not if both rise, or if it is the score that rises
    assert kinds(loss=series(trained[::-1]), val_in_loss=series(evaluated, 50)) != ["overfitting"]
    assert kinds(loss=series(trained), val_in_accuracy=series(evaluated, 50)) == []
    # a training loss per epoch will do
    assert kinds(train_in_loss=series(trained[::50], 50), val_in_loss=series(evaluated, 50)) == [
        "overfitting"
    ]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_a_loss_that_stopped_to_fall_is_named_with_the_step(noise, slope):
    x, random = np.arange(2000) / 2000, np.random.default_rng(1)
    losses = 1 + np.maximum(0, 1 - 10 * x) + slope * np.maximum(0, x - 0.5)
    (hint,) = find_hints({"loss": series(losses + noise * random.standard_normal(2000))}, NOTHING)
    assert hint.kind == "flat"
    assert "since step 1,000:" in hint.text


@pytest.mark.parametrize(
    "losses",
    [
        np.full(299, 2.3),  # too short
        np.concatenate([np.full(50, 2.3), np.full(950, 0.1)]),  # learned
        np.full(1000, -3.0),  # a loss that has no floor
        np.full(1000, math.nan),
        np.zeros(0),
    ],
)
def test_a_loss_that_need_not_fall_gets_no_hint(losses):
    assert kinds(loss=series(losses)) == []
    assert kinds(generator_in_loss=series(np.full(1000, 2.3))) == []


@pytest.mark.parametrize("size", [10, 400])
def test_values_of_any_size_are_no_error(size):
    largest = np.resize([1e308, -1e308, 1e308, 1e-308, 0.0, 1.7e308], size)
    for values in (largest, abs(largest), largest * 0, np.sort(abs(largest))):
        kinds(loss=series(values), val_in_loss=series(values))
        kinds(loss=series(falling("linear", size)), val_in_loss=series(values))


def updates_of(*events):
    updates = Updates()
    for step, event in enumerate(events):
        updates.add(step, event)
    return updates


def test_a_learning_rate_of_0_is_a_hint_once_it_lasts():
    rates = [{"rates": {"adam": 0.0, "sgd": 0.1}}]
    assert kinds(updates_of(*rates, *[{}] * 19)) == []
    assert find_hints({}, updates_of(*rates, *[{}] * 20)) == [
        Hint("rate", "the learning rate of adam has been 0 since step 0: nothing is learned")
    ]
    assert kinds(updates_of(*rates, *[{}] * 30, {"rates": {"adam": 1e-9}})) == []


def test_gradients_that_are_clipped_in_every_step_are_a_hint():
    every = [{"norms": [[30.0, 1.0]]}] * hints.CLIPPED_STEPS
    (hint,) = find_hints({}, updates_of(*every))
    assert hint.kind == "clipped"
    assert "last 100 steps, from a norm of about 30 to 1:" in hint.text
    assert kinds(updates_of(*every, {"norms": [[0.5, 1.0]]})) == []
    assert kinds(updates_of({}, *every[1:])) == []  # one too few
    # of two models, one is not clipped; a limit that is infinite only measures
    assert kinds(updates_of(*[{"norms": [[30.0, 1.0], [0.5, 1.0]]}] * 200)) == []
    assert kinds(updates_of(*[{"norms": [[30.0, math.inf]]}] * 200)) == []


def test_gradients_that_vanish_are_a_hint_unless_the_loss_is_learned():
    fading = [{"norms": [[10.0 ** (-step / 20), 100.0]]} for step in range(400)]
    assert kinds(updates_of(*fading)) == ["gradients"]
    assert kinds(updates_of(*fading[:200])) == []
    zero = updates_of(*[{"norms": [[0.0, 1.0]]}] * hints.ZERO_STEPS)
    assert kinds(zero) == ["gradients"]
    assert kinds(zero, loss=series(falling("exponential", 100))) == ["gradients"]
    assert kinds(zero, loss=series([2.0, *[0.0] * 50])) == []


@pytest.mark.parametrize(
    "event",
    [
        {"rates": 3, "norms": {}},
        {"rates": {"a": "0", "b": None}, "norms": [3, [], [1], [1, 2, 3], ["1", 1], [None, 1]]},
        {"norms": [[math.nan, 1.0], [math.inf, 1.0], [-1.0, 1.0], [10**400, 1], [1, 10**400]]},
    ],
)
def test_updates_that_no_run_writes_are_ignored(event):
    updates = updates_of(*[event] * 200)
    assert find_hints({}, updates) == []
    assert not updates.norms


def test_batches_that_are_left_out_have_no_norm(tmp_path, capfd, caplog):
    options = {"system_every": None, "snapshot_every": None}
    skipped = range(2, 3 + hints.ZERO_STEPS)
    with ss.init(lanes=2, dir=tmp_path, skip_batches=f"2:{skipped.stop}", **options) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        for batch in run.batches(images(16), 4, steps=skipped.stop):
            run.backward(classify, model, batch)
            run.clip_grad_norm(model, 1.0)
            model.zero_grad()
        assert run._progress.skipped.steps == [*skipped]
    events = [event for event in read_events(tmp_path) if event["event"] == "timing"]
    assert ["norms" in event for event in events] == [True, True, *[False] * len(skipped)]
    assert "hint:" not in capfd.readouterr().err
    assert caplog.text.count("skipped a batch") == 1  # one line for the range


def test_a_run_records_rates_and_norms_and_ends_with_hints(tmp_path, capfd):
    job = tmp_path / "job"
    with ss.init(lanes=2, dir=job, system_every=None, snapshot_every=None) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factors = [0.5, 0.25, 0.25, 0.125]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: dict(enumerate(factors)).get(step, 0)
        )
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(16), 4, steps=120):
            run.backward(classify, model, batch)
            run.clip_grad_norm(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    events = [event for event in read_events(job) if event["event"] == "timing"]
    rates = [event.get("rates", {}).get("optimizer") for event in events]
    assert rates == [0.05, 0.025, None, 0.0125, 0.0, *[None] * 115]
    ((norm, limit),) = events[50]["norms"]
    assert norm > limit == 1e-3

    _, zero, clipped = capfd.readouterr().err.splitlines()[1:]
    assert zero == (
        "samestep: hint: the learning rate of optimizer has been 0 since step 4: nothing is learned"
    )
    assert clipped.startswith(
        "samestep: hint: gradients were clipped in each of the last 120 steps"
    )
    view = View(open_source(job))
    view.refresh()
    assert [hint["kind"] for hint in view.summary()["hints"]] == ["rate", "clipped"]
    text = make_report([str(job)], image_bytes=0).text.splitlines()
    assert text[1] == f"job: {zero.removeprefix('samestep: hint: ')}"

    large = tmp_path / "events.jsonl"
    large.write_text(json.dumps({"event": "x", "text": "y" * hints.MOST_BYTES}) + "\n")
    assert hints_of(tmp_path) == []  # it would take too long
