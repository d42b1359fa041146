"""`samestep replay` repeats a step of a run on fewer workers, and names the bad sample."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import samestep as ss
from samestep.cli import main
from samestep.data.orders import make_plan
from samestep.data.random_state import key
from samestep.plugins.replay import Request
from samestep.record import read_events, read_history
from samestep.tools.replay import RecordedRun, Report
from tests.bits import bits
from tests.python import run_python
from tests.tools import spike
from tests.workers import run_workers

SCRIPT = str(Path(spike.__file__))
STEP, LANE = 26, 2  # of the bad sample


def sample_at(size, step, lane, number):
    """Return the index of a sample of an epoch of the script."""
    plan = make_plan(
        *(size, 16, 4, key(0, "order train")),
        shuffle=True,
        drop_last=False,
        group_by=None,
        order=None,
    )
    return int(plan.indices(0, step, lane)[number])


BAD = sample_at(512, STEP, LANE, 1)


@pytest.fixture
def replay(capfd):
    """Return a function that replays a step and returns the exit status and the output."""

    def run(directory, *flags, arguments=(512, BAD, "1e4"), step=STEP):
        words = ["replay", str(directory), "--step", str(step), *flags, SCRIPT]
        status = main([*words, *map(str, arguments)])
        return status, "".join(capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of a run of 4 workers, two of which were killed before the bad sample."""
    directory = tmp_path_factory.mktemp("run")
    flags = ["--dir", directory, "--snapshot-every", 10, "--keep-last", 1, "--hot-every", 1]
    variables = {**os.environ, "KILLS": "8 1,17 2"}
    run_python(
        *("-m", "samestep", "run", "-n", 4, *flags, SCRIPT, 512, BAD, "1e4"),
        check=True,
        env=variables,
    )
    kinds = [event["event"] for event in read_events(directory)]
    assert kinds.count("restarting") == 2
    return directory


def content(directory):
    """Return the names, sizes and times of all files of a directory."""
    paths = sorted(directory.rglob("*"))
    return [(path, path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths]


def test_a_step_of_four_workers_is_repeated_on_one(recorded, replay):
    before = content(recorded)
    status, printed = replay(recorded)
    assert status == 0, printed
    assert "from step-00000020 (written by 4 workers) on 1 worker" in printed
    assert "program and environment: as in the record" in printed
    assert f"means: the same bits at 7 steps, 20 to {STEP}" in printed
    assert "losses of the alert: the same bits in 4 lanes" in printed
    lanes = [line.split() for line in printed.splitlines() if line[:4].strip().isdigit()]
    assert [row[0] for row in lanes] == ["0", "1", "2", "3"]
    assert str(BAD) in lanes[LANE]
    first_sample = printed.partition("the most unusual one first:\n")[2].splitlines()[0]
    assert first_sample.startswith(f"  sample {BAD}, points/{BAD}.txt, loss ")
    assert content(recorded) == before


def test_checks_of_the_run_are_turned_off():
    start = {"config": {"check_every": 5, "recheck_every": 5}, "lanes": 4}
    flags = RecordedRun(Path("run"), 3, start, None, 0, 0).flags()
    assert {"--check-every=none", "--recheck-every=none"} <= set(flags)


def test_the_state_is_that_of_the_next_snapshot(recorded, replay):
    status, printed = replay(recorded, "--compare-state", "--worker-count", "3", "--lane", "0")
    assert status == 0, printed
    assert "state: the same bits as step-00000032" in printed
    assert "lane 0, 4 samples" in printed


def test_a_changed_program_is_named_and_a_difference_found(recorded, replay):
    status, printed = replay(recorded, arguments=(512, BAD, "1e5"))
    assert status == 1
    assert f"  arguments: 512 {BAD} 1e4 -> 512 {BAD} 1e5" in printed
    assert f"means: DIFFERENT, first at step {STEP}: 'loss' was" in printed
    assert f"losses of the alert: DIFFERENT, first in lane {LANE}" in printed


@pytest.mark.long
def test_a_debugger_starts_before_the_lane(recorded):
    line = spike.loss_fn.__code__.co_firstlineno + 2  # after the docstring
    looks = "n", "p float(points.abs().max()) > 1000", "clear 1", "c"
    commands = "\n".join(["p lane", f"b {SCRIPT}:{line}", "c", *looks, ""])
    flags = ["--step", str(STEP), "--debug", "--lane", str(LANE)]
    # a new Python, because pytest replaces the debugger of processes that are forked from it
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "samestep",
            "replay",
            recorded,
            *flags,
            SCRIPT,
            "512",
            str(BAD),
            "1e4",
        ],
        input=commands,
        capture_output=True,
        text=True,
        check=True,
    )
    printed = done.stdout
    assert f"(Pdb) {LANE}\n" in printed
    assert "-> points, norms = batch" in printed
    assert "(Pdb) True" in printed


def test_the_alert_of_a_spike_names_lane_samples_and_command(recorded):
    (alert,) = [event for event in read_history(recorded) if event["event"] == "loss_alert"]
    assert (alert["step"], alert["lane"], alert["worker"], alert["loop"]) == (STEP, 2, 2, "train")
    assert alert["samples"][1] == f"{BAD} (points/{BAD}.txt)"
    assert alert["replay"].startswith(
        f"samestep replay {shlex.quote(str(recorded))} --step {STEP} "
    )
    assert alert["replay"].endswith(f"spike.py 512 {BAD} 1e4")
    assert "the loss is " in alert["reason"]
    # `keep_last` is 1, but the snapshot before the alert is still there
    names = [path.name for path in sorted(recorded.glob("step-*"))]
    assert names == ["step-00000020", "step-00000032"]
    assert (recorded / names[0] / "keep.txt").read_text() == f"{alert['reason']}\n"


def test_a_run_that_stopped_at_a_nan_is_repeated_from_its_start(replay, tmp_path):
    bad = sample_at(512, 3, 1, 0)
    done = run_python(
        *("-m", "samestep", "run", "-n", 2, "--dir", tmp_path, SCRIPT, 512, bad, "nan")
    )
    assert done.returncode == 1
    assert f"its samples are {bad} (points/{bad}.txt), " in done.stderr
    assert f"to look at it: samestep replay {shlex.quote(str(tmp_path))} --step 3 " in done.stderr
    status, printed = replay(tmp_path, arguments=(512, bad, "nan"), step=3)
    assert status == 0, printed
    assert "from the start" in printed
    assert "means: the same bits at 3 steps, 0 to 2" in printed
    where = f"lane 1: first value that is not finite: '0' of the lane batch, sample {bad}"
    assert where in printed


@pytest.mark.parametrize(
    ("flags", "step", "error"),
    [
        ([], 32, "--step must be a step from 0 to 31, as in the record, got 32"),
        ([], -1, "--step must be a step from 0 to 31, as in the record, got -1"),
        (["--lane", "4"], STEP, "--lane must be a lane from 0 to 3, got 4"),
        (["--worker-count", "5"], STEP, "--worker-count must be from 1 to the 4 lanes, got 5"),
        (["--debug"], STEP, "--debug needs --lane, and a single worker"),
    ],
)
def test_wrong_arguments_are_errors(flags, step, error, recorded, replay):
    status, printed = replay(recorded, *flags, step=step)
    assert status == 2
    assert error in printed


def test_a_damaged_record_is_an_error(replay, tmp_path):
    start = {"time": 1.0, "event": "started", "step": 0, "config": {}, "lanes": "many"}
    timing = {"time": 1.0, "event": "timing", "step": STEP}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(timing)}\n")
    status, printed = replay(tmp_path)
    assert status == 1
    assert f"the record in {tmp_path} is damaged (ValueError: " in printed


@pytest.mark.parametrize(("call", "word"), [(0, "the same bits"), (1, "DIFFERENT")])
def test_an_alert_is_compared_with_the_losses_of_its_call(call, word, tmp_path):
    losses = [(0, 0, 4.0), (0, 1, 5.0), (1, 0, 6.0), (1, 1, 7.0)]  # of a GAN, with calls 0 and 1
    reports = [
        {"call": number, "lane": lane, "metrics": {"loss": loss}} for number, lane, loss in losses
    ]
    seen = {"reports": reports, "worst": [], "skipped": ""}
    (tmp_path / "replay-0.json").write_text(json.dumps(seen))
    alert = {"call": call, "losses": [[0, 4.0], [1, 5.0]]}
    run = RecordedRun(tmp_path, 0, {}, None, 0, 0, alert=alert)
    report = Report(run, tmp_path, Request(0, str(tmp_path)))
    (line,) = report._compare_alert()
    assert line.startswith(f"losses of the alert: {word}")
    assert report.differs == (call == 1)


def test_an_alert_of_an_earlier_history_is_not_compared(tmp_path):
    alert = {"event": "loss_alert", "step": 1, "call": 0, "losses": [[0, 4.0]]}
    history = [{"event": "started", "step": 0}, alert, {"event": "timing", "step": 2}]
    lines = [json.dumps({"time": 1.0, **event}) for event in (*history, history[0], history[2])]
    (tmp_path / "events.jsonl").write_text("\n".join(lines[:3]) + "\n")
    assert RecordedRun.read(tmp_path, 1).alert == {"time": 1.0, **alert}
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert RecordedRun.read(tmp_path, 1).alert == {}


def test_a_loss_of_the_whole_batch_blames_no_lane(tmp_path, monkeypatch, capfd):
    request = Request(0, str(tmp_path))
    monkeypatch.setenv(*next(iter(request.environment.items())))
    with ss.init(lanes=2) as run:
        model = run.replicate(torch.nn.Linear(3, 2))
        for batch in run.batches(torch.randn(8, 3), 8, steps=1):
            embed = lambda model, points: model(points)  # noqa: E731
            run.backward(lambda _, rows: rows.std(), model, batch, embed=embed)
    monkeypatch.undo()
    assert json.loads((tmp_path / "replay-0.json").read_text())["worst"] == [[0, None]]
    report = Report(RecordedRun(tmp_path, 0, {}, None, 0, 0), tmp_path, request)
    monkeypatch.setattr(report, "_compare", list)
    capfd.readouterr()
    report.print(1)
    printed = capfd.readouterr().out
    assert printed.count("does not tell which samples are to blame; --lane shows those") == 1
    assert "most unusual" not in printed


def test_a_step_that_the_run_skipped_is_shown_and_skipped_again(replay, tmp_path):
    directory, arguments = tmp_path / "run", (160, sample_at(160, 6, LANE, 1), "1e4")
    flags = ["--dir", directory, "--snapshot-every", 8, "--skip-batches", "6:7"]
    run_python("-m", "samestep", "run", "-n", 1, *flags, SCRIPT, *arguments, check=True)
    status, printed = replay(directory, "--compare-state", arguments=arguments, step=6)
    assert "state: the same bits as step-00000008" in printed
    assert "the batch was skipped: step 6 is in skip_batches=6:7" in printed
    assert status == 0


def trained(directory, size=160, factor=1e4, **options):
    """Train the script's model; return its bits, and the loop's steps that were skipped."""
    with ss.init(lanes=4, dir=directory, **options) as run:
        model = spike.train(run, spike.Points(size, sample_at(160, 6, LANE, 1), factor))
    return [bits(tensor) for tensor in model.state_dict().values()]


def test_a_skipped_batch_gives_the_same_bits_at_any_number_of_workers(tmp_path):
    skip = {"skip_batches": "6:7"}
    expected = trained(None, **skip)
    for workers in (2, 3, 4):
        directory = tmp_path / str(workers)
        assert run_workers(partial(trained, directory, **skip), workers) == [expected] * workers
        events = list(read_events(directory))
        (skipped,) = [event for event in events if event["event"] == "batch_skipped"]
        assert (skipped["step"], skipped["reason"]) == (6, "step 6 is in skip_batches=6:7")
        assert not [event for event in events if event["event"] == "loss_alert"]
    assert trained(None) != expected
    # the bad sample has no effect, and no other one has another
    assert trained(None, factor=1e3, **skip) == expected


def test_a_resumed_run_still_skips_what_its_first_start_was_told_to(tmp_path, capfd):
    expected = trained(None, skip_batches="6:7,8:9")
    with pytest.raises(SystemExit):
        trained(tmp_path, skip_batches="6:7", stop_after=4)
    with pytest.raises(ss.ConfigError, match=r"cannot leave out step 3, .* from step 4"):
        trained(tmp_path, skip_batches="6:7,3:5")
    with pytest.raises(SystemExit):
        trained(tmp_path, skip_batches="8:9", stop_after=7)
    assert "without the batches of steps 6:7,8:9" in capfd.readouterr().err
    assert trained(tmp_path) == expected
    assert "6:7,8:9, 1 batch skipped so far" in capfd.readouterr().err
    assert ss.read_snapshot(tmp_path).state["run"]["skipped_steps"] == [6, 8]


@pytest.mark.parametrize("text", ["5", "5:5", "a:b", "1:2,"])
def test_steps_to_skip_must_be_ranges(text):
    with pytest.raises(ss.ConfigError, match="skip_batches must be steps FIRST:END"):
        ss.init(skip_batches=text)
