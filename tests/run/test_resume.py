"""A run that is killed, stopped or resized ends with the bits of an undisturbed run."""

from __future__ import annotations

import logging.handlers
import random
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import samestep as ss
from samestep.config import Config
from samestep.record import read_history
from samestep.run import session
from samestep.run.environment import differences, environment_of_results
from tests.faults import cut, flip_byte, kill_at
from tests.jobs import (
    STEPS,
    Net,
    classify,
    events,
    image_job,
    images,
    left_by,
    left_in,
    snapshots,
    steps_of,
    train,
)
from tests.python import run_python
from tests.run.kinds import streams_job
from tests.workers import run_workers, try_workers


@pytest.mark.parametrize(
    ("before", "after", "seed"),
    [
        (2, 1, 0),
        pytest.param(2, 3, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 2, marks=pytest.mark.long),
        (3, 4, 3),
    ],
)
def test_killed_run_resumes_on_a_different_number_of_workers(
    before, after, seed, undisturbed, tmp_path
):
    draw = random.Random(seed)
    step, rank, every = draw.randint(1, STEPS - 1), draw.randrange(before), draw.randint(1, 2)
    job = partial(image_job, hook=kill_at(step, rank))
    outcomes = try_workers(train, before, job, tmp_path, {"snapshot_every": every})
    assert outcomes[rank].exitcode == -signal.SIGKILL
    assert all(
        isinstance(outcome.error, ss.WorldError) for outcome in outcomes if outcome.rank != rank
    )
    newest = max(
        (int(path.parent.name.removeprefix("step-")) for path in tmp_path.glob("*/manifest.json")),
        default=0,
    )
    assert step - 2 * every <= newest <= step
    assert left_by(image_job, tmp_path, after, lanes=8) == undisturbed
    assert [
        event["step"] for event in events(tmp_path) if event["event"] in {"started", "resumed"}
    ] == [0, newest, STEPS]


def snapshot_now_and_fail(run, *, job, at):
    def hook(step):
        if step == at:
            run.snapshot(now=True)
            raise RuntimeError("after the updates of a step")

    return job(run, hook=hook)


@pytest.mark.parametrize(
    ("job", "at"),
    [
        pytest.param(image_job, 1, marks=pytest.mark.long),
        (image_job, 3),
        pytest.param(streams_job, 3, marks=pytest.mark.long),
    ],  # in an epoch, at its end, of streams
)
def test_a_failure_after_the_updates_of_a_step_loses_nothing_that_was_saved(job, at, tmp_path):
    undisturbed = left_by(job, tmp_path / "undisturbed", 1, lanes=8)
    failing, directory = partial(snapshot_now_and_fail, job=job, at=at), tmp_path / "failing"
    outcomes = try_workers(train, 2, failing, directory, {"snapshot_every": 100})
    assert any(isinstance(outcome.error, RuntimeError) for outcome in outcomes)
    assert snapshots(directory) == steps_of(at + 1)
    left = left_by(job, directory, 1, lanes=8)
    states = {name for name in undisturbed if name.startswith("/")}
    assert {name: left[name] for name in states} == {name: undisturbed[name] for name in states}
    assert len(states) > 10


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((1, 4, 6), id="at a start, the end and the middle of an epoch"),
        pytest.param(range(1, STEPS), id="every one", marks=pytest.mark.long),
    ],
)
def test_run_resumes_from_every_step(steps, undisturbed, tmp_path):
    run_workers(train, 2, image_job, tmp_path / "whole", {"keep_last": STEPS})
    assert snapshots(tmp_path / "whole") == steps_of(*range(1, STEPS + 1))

    def resume(steps):
        for step in steps:
            train(
                image_job,
                tmp_path / f"from-{step}",
                {"resume": tmp_path / "whole" / f"step-{step:08d}"},
            )

    run_workers(resume, 3, steps[::2])
    run_workers(resume, 1, steps[1::2])
    for step in steps:
        left = left_in(image_job, tmp_path / f"from-{step}")
        assert left.items() <= undisturbed.items()
        assert (
            len(left) == len(undisturbed) - 2 * step
        )  # without the loss and accuracy of earlier steps
    assert left_in(image_job, tmp_path / "whole") == undisturbed


@pytest.mark.parametrize("steps", [3, pytest.param(6, marks=pytest.mark.long)])
def test_streams_resume_at_their_position(steps, tmp_path):
    expected = left_by(streams_job, tmp_path / "whole", 1, lanes=8)
    run_workers(train, 2, streams_job, tmp_path / "parts", {"stop_after": steps})
    assert left_by(streams_job, tmp_path / "parts", 3) == expected


WEIGHTS = [1 + index % 5 for index in range(101)]
# two epochs of four batches; a third one does not exist
ORDERS = [list(range(first, 101)) + list(range(first)) for first in (0, 50)]


@pytest.mark.parametrize(
    "order",
    [ss.Weighted(WEIGHTS), pytest.param(ORDERS.__getitem__, marks=pytest.mark.long)],
    ids=["weights", "order"],
)
def test_own_samples_resume_in_mid_epoch_on_another_number_of_workers(order, tmp_path):
    expected = left_by(partial(image_job, order=order), tmp_path / "whole", 1, lanes=8)
    killed = partial(image_job, order=order, hook=kill_at(6, 1), loader_workers=1)
    try_workers(train, 2, killed, tmp_path / "parts")
    assert left_by(partial(image_job, order=order), tmp_path / "parts", 1) == expected
    assert 4 < events(tmp_path / "parts", "resumed")[0]["step"] < STEPS


# two epochs of five steps with 33 lane batches: the last step leaves seven of eight lanes empty
TOKENS = {"batch_size": None, "order": ss.ByLength(WEIGHTS, max_tokens=10)}


def test_token_batches_resume_in_mid_epoch_on_another_number_of_workers(tmp_path):
    expected = left_by(partial(image_job, **TOKENS), tmp_path / "whole", 1, lanes=8)
    assert "loss at step 9" in expected
    assert "loss at step 10" not in expected
    killed = partial(image_job, **TOKENS, hook=kill_at(8, 1), loader_workers=1)
    try_workers(train, 2, killed, tmp_path / "parts")
    assert left_by(partial(image_job, **TOKENS), tmp_path / "parts", 1) == expected
    assert 5 < events(tmp_path / "parts", "resumed")[0]["step"] < 10
    assert left_by(partial(image_job, **TOKENS), tmp_path / "two", 2, lanes=8) == expected


def epochs_of_other_lengths_job(run):
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for epoch in range(run.epoch, 3):
        for batch in run.batches(images(50), 16, order=range(16 * (epoch + 1))):
            run.log(run.backward(classify, model, batch), epoch=epoch)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.long
def test_each_epoch_of_an_own_loop_may_have_its_own_order(tmp_path):
    expected = left_by(epochs_of_other_lengths_job, tmp_path / "whole", 1, lanes=8)
    assert [event["values"]["epoch"] for event in events(tmp_path / "whole", "scalars")] == [
        *(0, 1, 1, 2, 2, 2)
    ]
    for step in (2, 4):
        run_workers(train, 1, epochs_of_other_lengths_job, tmp_path / "parts", {"stop_after": step})
    assert left_by(epochs_of_other_lengths_job, tmp_path / "parts", 2) == expected


def explicit_epochs_job(run, leave_at=None):
    """Train with an explicit loop over epochs; break after `leave_at` steps."""

    def batches():
        for epoch in range(run.epoch, 3):
            assert run.epoch == epoch
            yield from run.batches(images(50), 16)

    model = run.replicate(Net())
    optimizer = run.shard(torch.optim.Adam(model.parameters()))
    run.track(model=model, optimizer=optimizer)
    for batch in batches():
        run.log(run.backward(classify, model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if run.step + 1 == leave_at:
            break
    return {"model": model, "optimizer": optimizer}


@pytest.mark.long
def test_explicit_loop_over_epochs_resumes(tmp_path):
    expected = left_by(explicit_epochs_job, tmp_path / "whole", 2, lanes=8)
    assert "loss at step 11" in expected
    assert "loss at step 12" not in expected
    for leave_at in (3, 4, 5, 8):
        directory = tmp_path / str(leave_at)
        train(partial(explicit_epochs_job, leave_at=leave_at), directory, {"snapshot_every": None})
        assert snapshots(directory) == steps_of(leave_at)
        assert left_by(explicit_epochs_job, directory, 2) == expected


@pytest.mark.long
def test_snapshot_requested_in_the_body_is_taken_at_the_end_of_the_step(undisturbed, tmp_path):
    def job(run):
        return image_job(run, hook=lambda step: run.snapshot() if step == 4 else None)

    run_workers(train, 2, job, tmp_path, {"snapshot_every": None, "stop_after": 6})
    assert snapshots(tmp_path) == steps_of(5, 6)
    (tmp_path / "step-00000006" / "manifest.json").unlink()
    assert left_by(image_job, tmp_path, 3, snapshot_every=None) == undisturbed
    assert events(tmp_path, "resumed")[0]["step"] == 5


@pytest.fixture
def stopped_at(tmp_path):
    """Return a function that returns the directory of a run that stopped after some steps."""

    def run_to(step):
        with pytest.raises(SystemExit):
            train(image_job, tmp_path / "stopped", {"stop_after": step})
        return tmp_path / "stopped"

    return run_to


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lanes": 4}, ss.ConfigError, "lanes must be 8, .*, got 4"),
        ({"seed": 1}, ss.ConfigError, "seed must be 0, .*, got 1"),
    ],
)
def test_lanes_and_seed_cannot_change(options, error, words, stopped_at):
    with pytest.raises(error, match=words):
        train(image_job, stopped_at(2), options)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"size": 100}, "step 2 of epoch 0.*samples=101.*samples=100.*Restore the old data"),
        ({"batch_size": 16}, "step 2 of epoch 0.*batch_size=32.*batch_size=16"),
        ({"shuffle": False}, "shuffle=True.*shuffle=False"),
        ({"drop_last": True}, "drop_last=False.*drop_last=True"),
        ({"order": ss.Weighted(WEIGHTS)}, "weights=None, got weights=[0-9a-f]{16}"),
        ({"order": range(101)}, "order=None.*order=[0-9a-f]{16}"),
        (TOKENS, "lengths=None, max_tokens=None, got .*lengths=[0-9a-f]{16}, max_tokens=10"),
    ],
)
def test_data_cannot_change_within_an_epoch(changed, words, stopped_at):
    with pytest.raises(ss.DataError, match=words):
        train(partial(image_job, **changed), stopped_at(2))


def test_batch_size_can_change_between_epochs(stopped_at, tmp_path):
    directory = stopped_at(4)
    train(partial(image_job, batch_size=16), directory)
    assert events(directory, "finished")[-1]["step"] == 4 + 7


def test_lanes_of_the_snapshot_limit_the_workers(stopped_at):
    directory = stopped_at(2)
    with ss.init(dir=directory) as run:
        assert (run.lanes, run.step) == (8, 2)
    outcomes = try_workers(
        train,
        3,
        image_job,
        directory,
        {"lanes": None, "resume": stopped_with_two_lanes(directory.parent)},
    )
    assert {type(outcome.error) for outcome in outcomes} == {ss.ConfigError}
    assert "number of devices (3), got 2 in the snapshot" in str(outcomes[0].error)


def stopped_with_two_lanes(folder):
    with pytest.raises(SystemExit):
        train(image_job, folder / "two", {"lanes": 2, "stop_after": 1})
    return folder / "two" / "step-00000001"


def test_object_missing_in_the_snapshot_is_named(stopped_at):
    with (
        ss.init(dir=stopped_at(2)) as run,
        pytest.raises(
            ss.SnapshotError, match="holds model, optimizer, schedule, but no 'averaged'"
        ),
    ):
        run.track(averaged=nn.Linear(2, 2))


def test_object_that_is_not_tracked_again_is_named(stopped_at):
    def job(run):
        model = run.replicate(Net())
        run.track(model=model)
        for batch in run.batches(images(101), 32, epochs=2):
            run.backward(classify, model, batch)

    with pytest.raises(ss.SnapshotError, match="also holds optimizer, schedule"):
        train(job, stopped_at(2))


def test_model_that_does_not_fit_the_snapshot_is_named(stopped_at):
    with (
        ss.init(dir=stopped_at(2)) as run,
        pytest.raises(ss.SnapshotError, match=r"(?s)does not fit 'model' \(Linear\).*Missing key"),
    ):
        run.track(model=nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["run", "streams", "model"])
def test_name_can_be_tracked_once(name):
    with ss.init() as run:
        run.track(model=nn.Linear(2, 2))
        with pytest.raises(ss.SnapshotError, match=f"'{name}', which is taken"):
            run.track(**{name: nn.Linear(2, 2)})


def test_object_without_state_cannot_be_tracked():
    with (
        ss.init() as run,
        pytest.raises(ss.SnapshotError, match=r"'history' must be a dict, .* got set"),
    ):
        run.track(history=set())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip_byte(path, -1),
        pytest.param(lambda path: cut(path, 100), marks=pytest.mark.long),
        pytest.param(lambda path: path.unlink(), marks=pytest.mark.long),
    ],
)
def test_damaged_snapshot_is_named_and_the_previous_one_is_used(damage, undisturbed, stopped_at):
    directory = stopped_at(6)
    damage(next((directory / "step-00000006").glob("*.safetensors")))
    assert left_by(image_job, directory, 2) == undisturbed
    assert [event["path"] for event in events(directory, "snapshot_rejected")] == [
        str(directory / "step-00000006")
    ]
    assert events(directory, "resumed")[0]["step"] == 5


def test_skipped_snapshot_is_logged(stopped_at, caplog):
    directory = stopped_at(3)
    cut(directory / "step-00000003" / "manifest.json", 100)
    with ss.init(dir=directory) as run:
        assert run.step == 2
    assert (
        f"skipped: snapshot {directory / 'step-00000003'}: manifest.json is damaged" in caplog.text
    )


@pytest.mark.parametrize("resume", ["step-00000009", "nowhere"])
def test_missing_snapshot_is_an_error_on_every_worker(resume, stopped_at):
    directory = stopped_at(2)
    outcomes = try_workers(train, 2, image_job, directory, {"resume": directory / resume})
    assert [type(outcome.error) for outcome in outcomes] == [ss.SnapshotError] * 2
    assert f"there is no snapshot {directory / resume}" in str(outcomes[1].error)


@pytest.mark.parametrize(
    ("start", "aside"), [pytest.param(0, (4, 5, 6), marks=pytest.mark.long), (4, (5, 6))]
)
def test_later_snapshots_are_set_aside_if_resume_names_an_earlier_start(
    start, aside, undisturbed, stopped_at
):
    directory = stopped_at(6)
    resume = directory / steps_of(start)[0] if start else "never"
    run_workers(train, 2, image_job, directory, {"resume": resume, "stop_after": start + 1})
    assert snapshots(next(directory.glob("superseded-*"))) == steps_of(*aside)
    assert left_by(image_job, directory, 1, lanes=8) == undisturbed
    starts = [
        event["step"] for event in events(directory) if event["event"] in {"started", "resumed"}
    ]
    assert starts == [0, start, start + 1, STEPS]


@pytest.mark.parametrize(
    ("scheme", "kept"), [("", (3, 4)), pytest.param("file://", (2, 3, 4), marks=pytest.mark.long)]
)
def test_all_snapshots_are_set_aside_if_resume_names_one_of_another_run(
    scheme, kept, undisturbed, stopped_at, tmp_path
):
    other, directory = stopped_at(3), tmp_path / "own"
    with pytest.raises(SystemExit):
        train(image_job, directory, {"stop_after": 5, "seed": 1})
    resume = f"{scheme}{other / steps_of(2)[0]}"
    run_workers(train, 2, image_job, directory, {"resume": resume, "stop_after": 4})
    assert snapshots(next(directory.glob("superseded-*"))) == steps_of(3, 4, 5)
    assert snapshots(directory) == steps_of(*kept)
    left = left_by(image_job, directory, 1, lanes=8)
    state = {name: value for name, value in undisturbed.items() if name.startswith("/")}
    assert state.items() <= left.items()
    assert "/model" in "".join(state)
    # the record of the other run has the first steps
    steps = [event["step"] for event in read_history(directory) if event["event"] == "scalars"]
    assert min(steps) == 2
    assert {0, 1} <= {event["step"] for event in events(directory, "scalars")}


def test_newest_and_best_snapshots_are_kept(tmp_path):
    def job(run):
        scores = [1, 5, 2, 5, 3, 0, -1, float("nan")]
        return image_job(run, hook=lambda step: run.snapshot(score=scores[step]))

    run_workers(train, 2, job, tmp_path, {"keep_last": 2, "keep_best": 2})
    assert snapshots(tmp_path) == steps_of(2, 4, 7, 8)
    assert {event["path"] for event in events(tmp_path, "snapshot_removed")} == {
        str(tmp_path / name) for name in steps_of(1, 3, 5, 6)
    }


def test_snapshot_after_the_loop_has_a_score(tmp_path):
    def job(run):
        image_job(run)
        run.snapshot(score=0.5)

    train(job, tmp_path, {"snapshot_every": None})
    assert [(event["step"], event["score"]) for event in events(tmp_path, "snapshot")] == [
        (STEPS, 0.5)
    ]


def one_more_step(directory, steps, **options):
    with ss.init(dir=directory, **options) as run:
        model = run.replicate(nn.Linear(2, 1))
        run.track(model=model)
        for _ in run.batches([1, 2], 2, steps=steps):
            pass


def test_resuming_in_another_environment_warns(tmp_path, caplog, monkeypatch):
    one_more_step(tmp_path, 1)
    one_more_step(tmp_path, 2)
    assert not caplog.records
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    with pytest.raises(ss.ConfigError, match=r"resume_strict .*\n  matmul precision: .* -> medium"):
        one_more_step(tmp_path, 3, resume_strict=True)
    one_more_step(tmp_path, 3)
    difference = "  matmul precision: highest -> medium"
    assert difference in caplog.text
    (event,) = [event for event in events(tmp_path) if event["event"] == "environment_changed"]
    assert (event["step"], event["differences"]) == (2, difference)


def test_the_exchange_dtype_and_the_hash_seed_are_part_of_the_environment(monkeypatch):
    environments = [
        environment_of_results(Config(exchange_dtype=dtype), [torch.device("cpu")])
        for dtype in (None, "bfloat16")
    ]
    assert differences(*environments) == "  exchange dtype: None -> bfloat16"
    assert environments[0]["deterministic kernels"] == "None"  # CPUs have no others
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    again = environment_of_results(Config(), [torch.device("cpu")])
    assert again["hash seed"] in {"7", "0"}  # Python's own setting wins, if it disabled hashing


def test_a_hash_seed_that_changed_is_one_line_with_what_keeps_it(tmp_path, caplog, monkeypatch):
    def seed(value):
        monkeypatch.setattr(
            session,
            "environment_of_results",
            lambda *options: {**environment_of_results(*options), "hash seed": value},
        )

    seed("random")
    one_more_step(tmp_path, 1)
    seed("0")
    one_more_step(tmp_path, 2, resume_strict=True)  # nothing could have repeated a random one
    assert not caplog.records
    seed("random")
    with pytest.raises(ss.ConfigError, match="hash seed: 0 -> random\nto keep it, start with "):
        one_more_step(tmp_path, 3, resume_strict=True)
    one_more_step(tmp_path, 3)
    (record,) = caplog.records
    assert record.getMessage() == (
        "PYTHONHASHSEED was 0 and is random, so a set of strings may have another order; "
        "to keep it, start with PYTHONHASHSEED=0 (samestep run sets it to 0)"
    )


def drawn():
    """Return the sum of a draw from each global generator."""
    return random.random() + np.random.rand() + float(torch.rand(()))


def noisy(model, batch, share=1.0):
    loss, metrics = classify(model, batch)
    return share * loss + drawn(), metrics


def drawing_job(run):
    """Draw in the body, between epochs, in evaluations, and the data of a second loop."""
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)

    def train_on(dataset, **options):
        for batch in run.batches(dataset, 16, **options):
            share = drawn()
            means = run.backward(partial(noisy, share=share), model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means, share=share, drawn=drawn())

    for _ in range(run.epoch, 2) if run.step < 8 else ():
        train_on(images(50))
        run.log(between=drawn(), score=run.evaluate(noisy, model, images(20), 8)["loss"])
    train_on(images(50), epochs=2)
    split = torch.randperm(50)[:32].tolist()
    train_on(torch.utils.data.Subset(images(50), split), name="second", epochs=2)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.long
def test_draws_continue_after_a_resume(tmp_path):
    expected = left_by(drawing_job, tmp_path / "whole", 1, lanes=8)
    values = [expected[f"share at step {step}"] for step in range(12)]
    values += [expected[f"drawn at step {step}"] for step in range(12)]
    assert len(set(values)) == len(values)
    for workers, step in ((2, 3), (1, 6), (2, 9)):  # in both epochs, and in the second loop
        run_workers(train, workers, drawing_job, tmp_path / "parts", {"stop_after": step})
    assert left_by(drawing_job, tmp_path / "parts", 3) == expected


def test_body_draws_although_the_user_replaced_numpys_generator():
    original = np.random.get_bit_generator()

    def draws():
        with ss.init() as run:
            np.random.set_bit_generator(np.random.PCG64())
            return [drawn() for _ in run.batches(range(4), 2, epochs=1)]

    try:
        assert draws() == draws()
        assert isinstance(np.random.get_bit_generator(), np.random.PCG64)
    finally:
        np.random.set_bit_generator(original)


def counts_from_zero(run, epochs):
    for _ in range(epochs):
        yield run.batches(images(8), 4)


def counts_on(run, epochs):
    for _ in range(run.epoch, epochs):
        yield run.batches(images(8), 4)


def one_loop(run, epochs):
    yield run.batches(images(8), 4, epochs=epochs)


def up_to_a_step(run, epochs):
    while run.step < 2 * epochs:
        yield run.batches(images(8), 4)


def start_with(loops, directory, *, tracked=True, **options):
    """Run the loops of 3 epochs of 2 steps; return the number of steps, over all starts."""
    with ss.init(dir=directory, lanes=2, **options) as run:
        model = run.replicate(nn.Linear(2, 2))
        if tracked:
            run.track(model=model)
        if run.step == 0:
            run.print("a new run")
        for loop in loops(run, 3):
            for batch in loop:
                batch.load()
        return run.step


@pytest.mark.parametrize(
    ("loops", "steps"), [(counts_from_zero, 12), (counts_on, 6), (one_loop, 6), (up_to_a_step, 6)]
)
def test_a_loop_over_epochs_that_starts_over_is_reported_once(loops, steps, tmp_path, caplog):
    assert start_with(loops, tmp_path) == 6
    messages = [record.getMessage() for record in caplog.records]
    if steps == 6:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(
            "loop 'train' trains a second epoch, and samestep cannot know where"
        )
        assert "Write for epoch in range(run.epoch, 3), or one loop" in message
    assert start_with(loops, tmp_path) == steps


def test_a_loop_over_epochs_of_a_run_that_cannot_resume_is_not_reported(tmp_path, caplog):
    start_with(counts_from_zero, None)
    start_with(counts_from_zero, tmp_path, tracked=False, snapshot_every=None)
    assert caplog.records == []


def test_a_directory_without_tracked_objects_is_reported_once(tmp_path, caplog):
    start_with(one_loop, tmp_path, tracked=False)
    (record,) = caplog.records
    message = f"no snapshots are saved in {tmp_path}, because nothing is tracked: call run.track("
    assert record.getMessage().startswith(message)
    assert snapshots(tmp_path) == []


def test_warnings_are_logged_by_rank_0(tmp_path):
    def warnings(*arguments, **options):
        handler = logging.handlers.BufferingHandler(capacity=100)
        logging.getLogger("samestep").addHandler(handler)
        start_with(*arguments, **options)
        return len(handler.buffer)

    assert run_workers(partial(warnings, counts_from_zero, tmp_path / "a"), 2) == [1, 0]
    assert run_workers(partial(warnings, one_loop, tmp_path / "b", tracked=False), 2) == [1, 0]


SCRIPT = """
import sys
from pathlib import Path

import torch

import samestep as ss
from part import FACTOR

rate = float(sys.argv[1])
with ss.init(dir="run", settings={"optimizer": {"rate": rate, "password": sys.argv[2]}}) as run:
    model = run.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches([1.0] * 8, 1, steps=8):
        run.backward(lambda model, x: FACTOR * model(x.float()[:, None]).mean(), model, batch)
        optimizer.step()
        optimizer.zero_grad()
        if run.step == 3 and Path("edit").exists():
            Path("edit").unlink()
            Path("part.py").write_text("FACTOR = 3.0")
            KILL
"""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def script_in(folder, body="pass"):
    (folder / "part.py").write_text("FACTOR = 1.0")
    (folder / "train.py").write_text(SCRIPT.replace("KILL", body))
    words = ["-m", "samestep", "run", "--snapshot-every", "1", "--system-every", "none"]
    return partial(run_python, *words, cwd=folder, merges=True)


def test_what_changed_in_the_program_is_said_at_a_resume(tmp_path):
    run = script_in(tmp_path)
    stop = ("--stop-after", "3", "train.py", "0.1")
    assert "by another program" not in run(*stop, "secret", check=True).stdout
    stop = ("--stop-after", "3", "train.py", "0.10")  # the same settings in other words
    assert "by another program" not in run(*stop, "changed", check=True).stdout
    (tmp_path / "part.py").write_text("FACTOR = 2.0")
    strict = run("--resume-strict", "true", "train.py", "0.5", "other")
    assert "resume_strict refuses to resume" in strict.stdout
    assert strict.returncode == 2
    printed = run("train.py", "0.5", "other", check=True).stdout
    assert "the snapshot of step 3 was written by another program or in another" in printed
    assert re.search(r"  file part.py: \w{12} -> \w{12}\n", printed)
    assert "  setting optimizer.rate: 0.1 -> 0.5\n" in printed
    assert "arguments" not in printed
    assert "has the values of the snapshot until the script changes them" in printed
    assert "file train.py" not in printed
    assert "password" not in printed
    assert ss.read_snapshot(tmp_path / "run").state["optimizer"]["param_groups"][0]["lr"] == 0.1
    (event,) = events(tmp_path / "run", "environment_changed")
    assert "file part.py" in event["differences"]


LATE = """
import importlib
import torch
import samestep as ss

class Data:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import samples
        return samples.SAMPLE

def loss_of(model, x):
    import late
    plugin = importlib.import_module("plugins.one")
    return late.FACTOR * plugin.FACTOR * model(x.float()[:, None]).mean()

with ss.init(dir="run") as run:
    model = run.replicate(torch.nn.Linear(1, 1))
    run.track(model=model)
    for batch in run.batches(Data(), 1, steps=8):
        run.backward(loss_of, model, batch)
"""


def test_modules_that_are_imported_while_a_run_trains_are_compared(tmp_path):
    run = script_in(tmp_path)
    (tmp_path / "train.py").write_text(LATE)
    (tmp_path / "plugins").mkdir()
    files = ["late.py", "plugins/one.py", "samples.py"]
    for name in files:
        (tmp_path / name).write_text("FACTOR = SAMPLE = 1.0")
    run("--stop-after", "3", "train.py", check=True)
    stopped = run("--stop-after", "1", "--resume-strict", "true", "train.py", check=True).stdout
    assert "resumed" in stopped
    (tmp_path / "late.py").unlink()
    for name in files[1:]:
        (tmp_path / name).write_text("FACTOR = SAMPLE = 2.0")
    strict = run("--resume-strict", "true", "train.py")
    assert strict.returncode == 2
    found = re.findall(r"  file (\S+): \w{12} -> (no file|\w{12})", strict.stdout)
    assert [name for name, _ in found] == files
    assert found[0][1] == "no file"


def test_a_program_that_is_edited_before_workers_are_replaced_is_noticed(tmp_path):
    run = script_in(tmp_path, KILL)
    (tmp_path / "edit").touch()
    printed = run("train.py", "0.1", "-", check=True).stdout
    assert "killed by SIGKILL" in printed
    assert "file part.py" in printed
