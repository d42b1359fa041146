"""Several runs in one process: folds, trials and cells of a notebook."""

from __future__ import annotations

import pytest

import samestep as ss
from tests.workers import run_workers


def fold(directory, epochs=1, **options):
    with ss.init(lanes=2, dir=directory, **options) as run:
        run.track(state={})
        for _ in run.batches([0, 1], 2, epochs=epochs):
            run.log(loss=float(run.step))
        return run.step


def test_second_run_in_a_finished_directory_is_refused(tmp_path):
    def body():
        assert [fold(tmp_path / str(number)) for number in range(2)] == [1, 1]
        with pytest.raises(ss.ConfigError, match=r"give each fold(.|\n)*for fold in range\(5\)"):
            fold(tmp_path / "1", epochs=2)
        assert fold(tmp_path / "1", read_only=True, epochs=1) == 1
        assert fold(tmp_path / "1", resume=str(tmp_path / "1" / "step-00000001"), epochs=2) == 2
        assert fold(tmp_path / "1", resume="never") == 1
        return fold(tmp_path / "2")

    assert run_workers(body, 2) == [1, 1]


def test_stopped_run_may_continue_in_the_same_process(tmp_path):
    with pytest.raises(SystemExit):
        fold(tmp_path, epochs=3, stop_after=2)
    assert fold(tmp_path, epochs=3) == 3


def test_second_launch_in_a_finished_directory_is_refused(tmp_path):
    ss.launch(fold, tmp_path, 3, workers=2, stop_after=2)
    assert ss.launch(fold, tmp_path, 3, workers=2) == 3
    with pytest.raises(ss.ConfigError, match="already finished a run"):
        ss.launch(fold, tmp_path, 3, workers=2)


class PrunedError(Exception):
    """As of a library for trials."""

    def __init__(self, text, trial=7):
        super().__init__(text)
        self.trial = trial


def raise_it(error):
    raise error


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PrunedError("bad"), PrunedError), (KeyError("bad"), KeyError), (ss.DataError("bad"),) * 2],
)
def test_launch_keeps_the_type_of_an_exception(error, kind):
    kind = kind if isinstance(kind, type) else type(kind)
    with pytest.raises(kind, match=r"^worker 0 failed first: .*bad") as caught:
        ss.launch(raise_it, error, workers=1)
    assert isinstance(caught.value, ss.WorkerError)
    assert caught.value.rank == 0
    assert getattr(caught.value, "trial", 7) == 7
    assert type(caught.value.__cause__) is kind


def test_launch_keeps_the_attributes_of_an_exception():
    with pytest.raises(FileNotFoundError, match="worker 0 failed first: ") as caught:
        ss.launch(raise_it, FileNotFoundError(2, "gone", "a.pt"), workers=1)
    assert (caught.value.errno, caught.value.filename) == (2, "a.pt")


@pytest.mark.parametrize("directory", [None, "run"])
def test_logged_values_reach_the_parent(directory, tmp_path):
    logged = []
    options = {"on_log": lambda step, values: logged.append((step, values))}
    ss.launch(fold, directory and tmp_path / directory, 3, workers=2, **options)
    assert logged == [(step, {"loss": float(step)}) for step in range(3)]


def test_parent_that_raises_ends_the_workers(tmp_path):
    def prune(step, values):
        if values["loss"] > 1:
            raise PrunedError(f"at step {step}")

    with pytest.raises(PrunedError, match=r"^at step 2$") as caught:
        ss.launch(fold, tmp_path, 10**6, workers=2, on_log=prune)
    assert not isinstance(caught.value, ss.WorkerError)
