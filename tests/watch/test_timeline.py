from __future__ import annotations

import pytest

from samestep.watch.run_state import RunState
from samestep.watch.timeline import LONGEST_TEXT
from tests.watch.writing import started


def lines(*events):
    run = RunState()
    for event in events:
        run.take({"time": 1.0, **event})
    return [(line.text, line.tone) for line in run.lines]


def test_starts():
    assert lines(
        started(),
        started(7, kind="resumed"),
        started(9, kind="resumed", workers=4),
        started(9, kind="resumed", workers=1),
        started(),
    ) == [
        ("started with 2 workers, 8 lanes", "info"),
        ("resumed at step 7 with 2 workers", "info"),
        ("resumed at step 9 with 4 workers: resized from 2 to 4 workers", "info"),
        ("resumed at step 9 with 1 worker: resized from 4 to 1 worker", "info"),
        ("started with 2 workers, 8 lanes", "info"),
    ]


@pytest.mark.parametrize(
    ("event", "text", "tone"),
    [
        ({"event": "finished", "step": 9}, "finished after 9 steps", "good"),
        ({"event": "stopped", "step": 9, "signal": 15}, "stopped at step 9 by SIGTERM", "info"),
        ({"event": "stopped", "step": 9, "signal": 999}, "stopped at step 9 by signal 999", "info"),
        ({"event": "stopped", "step": 9, "signal": 0}, "stopped at step 9, as asked for", "info"),
        (
            {"event": "failed", "rank": 1, "host": "b", "step": 9, "error": "ValueError('x')"},
            "worker 1 on b failed at step 9: ValueError('x')",
            "bad",
        ),
        (
            {
                "event": "restarting",
                "rank": 1,
                "host": "",
                "step": 8,
                "reason": "killed by SIGKILL",
            },
            "worker 1: killed by SIGKILL; all workers start again from step 8",
            "bad",
        ),
        (
            {"event": "snapshot", "step": 9, "score": 0.25, "path": "/x"},
            "snapshot of step 9, score 0.25",
            "good",
        ),
        ({"event": "snapshot", "step": 9, "score": None}, "snapshot of step 9", "good"),
        (
            {"event": "snapshot_rejected", "path": "p", "reason": "cut"},
            "passed over snapshot p: cut",
            "bad",
        ),
        (
            {"event": "snapshot_copied", "step": 9},
            "snapshot of step 9 copied to remote storage",
            "good",
        ),
        (
            {"event": "images_dropped", "count": 3},
            "3 images were dropped, since writing them could not keep up",
            "bad",
        ),
        (
            {"event": "loop", "name": "train", "done": 0, "steps": 9},
            "loop train begins: 9 steps",
            "info",
        ),
        (
            {"event": "loop", "name": "train", "done": 4, "steps": 9},
            "loop train goes on after 4 of 9 steps",
            "info",
        ),
        (
            {"event": "loop", "name": "train", "done": 4, "steps": None},
            "loop train goes on after 4 steps",
            "info",
        ),
        (
            {"event": "sink", "name": "wandb", "error": "no disk"},
            "sink wandb failed: no disk",
            "bad",
        ),
        (
            {"event": "sink", "name": "wandb", "behind_bytes": 5, "dropped": 2},
            "sink wandb is 5 bytes behind, 2 dropped",
            "info",
        ),
        (
            {"event": "transfer_failed", "path": "p", "reason": "r"},
            "transfer failed: path p, reason r",
            "bad",
        ),
        ({"event": "something_new", "step": 4}, "something new", "info"),
    ],
)
def test_events_in_plain_words(event, text, tone):
    assert lines(event) == [(text, tone)]


def test_what_repeats_is_told_once():
    loop = {"event": "loop", "name": "train", "done": 0}
    sink = {"event": "sink", "name": "wandb", "behind_bytes": 9, "dropped": 1}
    told = lines(
        started(),
        loop,
        {**loop, "done": 4},
        sink,
        {**sink, "behind_bytes": 0},
        started(2, kind="resumed"),
        loop,
    )
    assert [text.split()[0] for text, _ in told] == ["started", "loop", "sink", "resumed", "loop"]


def test_a_failure_brings_its_traceback_and_no_text_is_endless():
    run = RunState()
    run.take({"time": 1.0, "event": "failed", "error": "x" * 99999, "traceback": "Traceback ..."})
    assert run.lines[0].detail == "Traceback ..."
    assert len(run.lines[0].text) == LONGEST_TEXT
