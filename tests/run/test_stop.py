"""Runs that stop by option, signal or break save the last step, and the next start continues."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

import samestep as ss
from samestep.run.process import StopRequest
from tests.jobs import (
    STEPS,
    Net,
    classify,
    events,
    image_job,
    images,
    left_by,
    snapshots,
    steps_of,
    train,
)
from tests.workers import run_workers, try_workers

# by loader processes, since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def signal_at(step, number):
    """Return a hook that sends rank 1, or the only worker, a signal at a step."""

    def hook(now):
        if now == step and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), number)

    return hook


def signal_all_at(step, number, times=1):
    """Return a hook that sends the process group, with loader processes, a signal at a step."""

    def hook(now):
        for _ in range(times if now == step else 0):
            os.killpg(0, number)

    return hook


def test_run_with_stop_after_continues_later(undisturbed, tmp_path):
    for workers, stop_after in ((1, 1), (2, 4), (3, 7)):
        run_workers(
            train, workers, image_job, tmp_path, {"stop_after": stop_after, "snapshot_every": None}
        )
        assert events(tmp_path, "stopped")[-1]["step"] == stop_after
    assert left_by(image_job, tmp_path, 2) == undisturbed


@pytest.mark.parametrize(
    "step",
    [pytest.param(0, marks=pytest.mark.long), 3, pytest.param(STEPS - 1, marks=pytest.mark.long)],
)
def test_sigterm_to_one_worker_stops_all_after_a_snapshot(step, undisturbed, tmp_path):
    job = partial(image_job, hook=signal_at(step, signal.SIGTERM))
    outcomes = try_workers(train, 2, job, tmp_path, {"snapshot_every": None})
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGTERM] * 2
    stopped = events(tmp_path, "stopped")[-1]
    assert stopped["signal"] == signal.SIGTERM
    assert step < stopped["step"] <= step + 2
    assert snapshots(tmp_path) == steps_of(stopped["step"])
    assert left_by(image_job, tmp_path, 3) == undisturbed


@pytest.mark.long
def test_a_lost_terminal_stops_the_run_after_a_snapshot_unless_it_is_ignored(undisturbed, tmp_path):
    job = partial(image_job, hook=signal_at(3, signal.SIGHUP))
    outcomes = try_workers(train, 2, job, tmp_path / "lost", {"snapshot_every": None})
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGHUP] * 2
    assert events(tmp_path / "lost", "stopped")[-1]["signal"] == signal.SIGHUP
    assert left_by(image_job, tmp_path / "lost", 1) == undisturbed

    def train_under_nohup(*args):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train(*args)

    run_workers(train_under_nohup, 2, job, tmp_path / "nohup")
    assert events(tmp_path / "nohup", "finished")


@forks
@pytest.mark.parametrize(
    "times", [1, pytest.param(2, marks=pytest.mark.long)], ids=["once", "twice"]
)
def test_sigterm_to_all_processes_stops_after_a_snapshot(times, undisturbed, tmp_path):
    job = partial(image_job, hook=signal_all_at(1, signal.SIGTERM, times), loader_workers=2)
    outcomes = try_workers(train, 2, job, tmp_path, {"snapshot_every": None})
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGTERM] * 2
    assert events(tmp_path, "stopped")[-1]["signal"] == signal.SIGTERM
    assert snapshots(tmp_path) == steps_of(3)
    assert left_by(partial(image_job, loader_workers=1), tmp_path, 2) == undisturbed


def test_ctrl_c_stops_after_a_snapshot_and_a_second_one_immediately(undisturbed, tmp_path):
    once = partial(image_job, hook=signal_at(3, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(once, tmp_path / "once", {"snapshot_every": None})
    assert snapshots(tmp_path / "once") == steps_of(5)
    assert left_by(image_job, tmp_path / "once", 2) == undisturbed

    def twice(run):
        return image_job(
            run, hook=lambda step: [signal_at(3, signal.SIGINT)(step) for _ in range(2)]
        )

    with pytest.raises(KeyboardInterrupt):
        train(twice, tmp_path / "twice", {"snapshot_every": None})
    assert snapshots(tmp_path / "twice") == []


@forks
def test_second_ctrl_c_in_a_terminal_acts_immediately_with_loader_processes(tmp_path):
    job = partial(image_job, hook=signal_all_at(1, signal.SIGINT, 2), loader_workers=2)
    outcomes = try_workers(train, 2, job, tmp_path, {"snapshot_every": None})
    assert [type(outcome.error) for outcome in outcomes] == [KeyboardInterrupt] * 2
    assert snapshots(tmp_path) == []


def test_second_sigterm_has_no_effect_and_a_later_ctrl_c_acts_immediately():
    request = StopRequest()
    try:
        request.deferring = True
        signal.raise_signal(signal.SIGTERM)
        request.deferring = False
        signal.raise_signal(signal.SIGTERM)
        assert request.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGTERM
    finally:
        request.close()


def test_signal_acts_immediately_without_a_directory():
    job = partial(image_job, hook=signal_at(3, signal.SIGTERM))
    with pytest.raises(SystemExit) as caught, ss.init(lanes=8) as run:
        job(run)
    assert caught.value.code == 143
    assert run.step == 3


def test_signal_handlers_are_restored_after_a_run():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with ss.init() as run:
        assert run.world_size == 1
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_each_iteration_of_a_loop_is_one_epoch(tmp_path):
    with ss.init(lanes=2) as run:
        loop = run.batches(images(10), 4)
        assert [(len(loop), [sum(batch.counts) for batch in loop]) for _ in range(3)] == [
            (3, [4, 4, 2])
        ] * 3
        assert run.step == 9


def test_break_counts_only_a_step_with_an_update(tmp_path):
    with ss.init(lanes=2, dir=tmp_path) as run:
        model = run.replicate(Net())
        run.track(model=model)
        for batch in run.batches(images(10), 4, name="updated"):
            run.backward(classify, model, batch)
            break
        run.snapshot()
        for _ in run.batches(images(10), 4, name="without update"):
            break
        run.snapshot()
        assert len(run.batches(images(10), 4, name="updated")) == 2
        assert len(run.batches(images(10), 4, name="without update")) == 3
        assert run.step == 1
    assert snapshots(tmp_path) == steps_of(1)


class Signalled:
    """Tracked state that sends its worker SIGTERM while it is copied for the third time."""

    def __init__(self):
        self.copies = 0

    def state_dict(self):
        self.copies += 1
        if self.copies == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    def load_state_dict(self, state):
        pass


def test_signal_during_a_snapshot_loses_nothing(tmp_path):
    def body():
        with ss.init(dir=tmp_path, lanes=4, snapshot_every=1) as run:
            run.track(signalled=Signalled())
            image_job(run)

    outcomes = try_workers(body, 2)
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGTERM] * 2
    (stopped,) = events(tmp_path, "stopped")
    assert snapshots(tmp_path)[-1] == f"step-{stopped['step']:08d}"
