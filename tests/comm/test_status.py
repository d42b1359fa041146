from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm import status as hang
from samestep.comm.status import Heartbeat, report, workers

HERE = hang.machine_name()
WAITING = Heartbeat(
    0,
    "a",
    os.getpid(),
    HERE,
    0.0,
    7,
    "computing lane 0",
    "exchanging losses",
    2.0,
    left=False,
    knows=False,
    stack=["here\n"],
)
BUSY = replace(WAITING, rank=1, step=6, part="loading data", waits="")


def told_of(*beats, size=2):
    return report(WAITING, [replace(beat, at=time.time()) for beat in beats], size, 60.0)


@pytest.mark.parametrize(
    ("beat", "cause"),
    [
        (BUSY, "the data set does not return"),
        (
            replace(BUSY, stack=['File "torch/utils/data/dataloader.py"']),
            "its loader processes give no batch",
        ),
        (replace(BUSY, part="computing lane 3"), "a lane that computes for very long"),
        (replace(BUSY, part="taking a snapshot"), "a disk or a remote storage that is slow"),
        (replace(BUSY, part="in the body of a loop"), "something that one worker does alone"),
        (replace(BUSY, waits="ending a loop"), "a worker has fewer batches"),
        (replace(BUSY, waits="gathering an object"), "a condition that depends on the rank"),
    ],
)
def test_a_worker_that_answers_is_told_with_its_stack(beat, cause):
    found = told_of(beat)
    headline, where, stack, waited, usual = found.text.splitlines()
    assert (
        headline
        == found.headline
        == "worker 1 did not come within 60 s while worker 0 was exchanging losses at step 7"
    )
    assert where.startswith(f"worker 1 (host a, process {os.getpid()}): at step 6 for 2.")
    assert stack.strip() in {"here", 'File "torch/utils/data/dataloader.py"'}
    assert waited == f"worker 0 (host a, process {os.getpid()}): waited"
    assert usual.startswith(f"usual cause: {cause}")
    assert not found.is_retryable


def test_a_worker_that_does_not_answer_is_told_by_what_is_seen_of_it():
    silent = replace(BUSY, stack=None)
    with subprocess.Popen(["sleep", "100"]) as sleeper:
        sleeper.send_signal(19)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        stopped = told_of(replace(silent, pid=sleeper.pid))
        elsewhere = told_of(replace(silent, pid=sleeper.pid, machine="another"))
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        ended = told_of(replace(silent, pid=sleeper.pid))
    left = told_of(replace(silent, left=True))
    assert (
        "its process is stopped (state T); it was last heard of 0.0 s ago, at step 6: loading data"
        in stopped.text
    )
    assert "its process has ended;" in ended.text
    assert "it does not answer any more;" in elsewhere.text
    assert "it does not answer any more;" in told_of(silent).text  # it is there, but says nothing
    assert "it has left the run;" in left.text
    assert [found.is_retryable for found in (stopped, ended, elsewhere, left)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_worker_that_never_said_anything_is_told():
    found = told_of(replace(WAITING, rank=2), size=4)
    assert (
        found.headline
        == "workers 1 and 3 did not come within 60 s while workers 0 and 2 were exchanging losses at step 7"
    )
    assert "worker 3: was never heard of" in found.text
    assert found.is_retryable


def test_where_all_make_the_same_call_the_network_is_to_blame():
    found = told_of(replace(WAITING, rank=1))
    assert (
        found.headline
        == "workers 0 and 1 were exchanging losses at step 7, and waited for each other in vain for 60 s"
    )
    assert "usual cause: all made the same call, and the network between them" in found.text


@given(st.lists(st.sampled_from([WAITING, BUSY, replace(BUSY, left=True), None]), min_size=1))
def test_every_worker_is_told_once(others):
    beats = [
        replace(beat, rank=rank) for rank, beat in enumerate(others, start=1) if beat is not None
    ]
    found = report(WAITING, beats, 1 + len(others), 60.0)
    first = found.text.splitlines()[0]
    assert sorted(int(word) for word in first.replace(",", "").split() if word.isdigit()) == sorted(
        [*range(1 + len(others)), 60, 7]
    )


def test_workers_are_listed_as_one_would_say_it():
    assert [workers(ranks) for ranks in ([3], [0, 2], [0, 1, 5])] == [
        "worker 3",
        "workers 0 and 2",
        "workers 0, 1 and 5",
    ]
