from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.status import Heartbeat, list_workers, report_hang
from samestep.host import kernel_id

HERE = kernel_id("pid")
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
    failed=False,
    stack=["here\n"],
)
BUSY = replace(WAITING, rank=1, step=6, activity="loading data", collective="")


def report_on(*beats, size=2):
    return report_hang(WAITING, [replace(beat, at=time.time()) for beat in beats], size, 60.0)


@pytest.mark.parametrize(
    ("beat", "cause"),
    [
        (BUSY, "the dataset does not return"),
        (
            replace(BUSY, stack=['File "torch/utils/data/dataloader.py"']),
            "its loader processes return no batch",
        ),
        (replace(BUSY, activity="computing lane 3"), "a lane computes for very long"),
        (replace(BUSY, activity="taking a snapshot"), "a slow disk or remote storage"),
        (replace(BUSY, activity="in the body of a loop"), "something that only one worker does"),
        (replace(BUSY, collective="ending a loop"), "a worker has fewer batches"),
        (replace(BUSY, collective="gathering an object"), "a condition that depends on the rank"),
    ],
)
def test_a_responsive_worker_is_reported_with_its_stack(beat, cause):
    report = report_on(beat)
    headline, where, stack, waiting, likely = report.text.splitlines()
    assert (
        headline
        == report.headline
        == "timed out after 60 s waiting for worker 1: worker 0 was exchanging losses at step 7"
    )
    assert where.startswith(f"worker 1 (host a, process {os.getpid()}): at step 6 for 2.")
    assert stack.strip() in {"here", 'File "torch/utils/data/dataloader.py"'}
    assert waiting == f"worker 0 (host a, process {os.getpid()}): waiting"
    assert likely.startswith(f"likely cause: {cause}")
    assert not report.is_retryable


def test_an_unresponsive_worker_is_reported_with_the_state_of_its_process():
    silent = replace(BUSY, stack=None)
    with subprocess.Popen(["sleep", "100"]) as sleeper:
        sleeper.send_signal(19)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        stopped = report_on(replace(silent, pid=sleeper.pid))
        elsewhere = report_on(replace(silent, pid=sleeper.pid, machine="another"))
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        ended = report_on(replace(silent, pid=sleeper.pid))
    left = report_on(replace(silent, left=True))
    assert (
        "its process is stopped (state T); last seen 0.0 s ago, at step 6: loading data"
        in stopped.text
    )
    assert "its process has exited;" in ended.text
    assert "it does not respond;" in elsewhere.text
    assert "it does not respond;" in report_on(silent).text  # it runs, but publishes nothing
    assert "it has left the run;" in left.text
    assert [report.is_retryable for report in (stopped, ended, elsewhere, left)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_worker_that_never_published_its_status_is_reported():
    report = report_on(replace(WAITING, rank=2), size=4)
    assert (
        report.headline == "timed out after 60 s waiting for workers 1 and 3: "
        "workers 0 and 2 were exchanging losses at step 7"
    )
    assert "worker 3: never reported its status" in report.text
    assert report.is_retryable


def test_the_network_is_the_likely_cause_if_all_make_the_same_call():
    report = report_on(replace(WAITING, rank=1))
    assert (
        report.headline == "timed out after 60 s: "
        "workers 0 and 1 were exchanging losses at step 7 and waited for each other"
    )
    assert (
        "likely cause: all workers made the same call, and the network between them" in report.text
    )


@given(
    st.lists(
        st.sampled_from([WAITING, BUSY, replace(BUSY, left=True), None]), min_size=1, max_size=15
    )
)
def test_every_worker_is_in_the_headline_once(others):
    beats = [
        replace(beat, rank=rank) for rank, beat in enumerate(others, start=1) if beat is not None
    ]
    report = report_hang(WAITING, beats, 1 + len(others), 60.0)
    first = report.text.splitlines()[0]
    assert sorted(int(word) for word in re.split(r"[ ,:]+", first) if word.isdigit()) == sorted(
        [*range(1 + len(others)), 60, 7]
    )


def test_workers_are_listed_in_words():
    assert [list_workers(ranks) for ranks in ([3], [0, 2], [0, 1, 5])] == [
        "worker 3",
        "workers 0 and 2",
        "workers 0, 1 and 5",
    ]
    assert list_workers(range(17)) == "workers 0 to 16"
    assert list_workers([*range(20), 30, 40, 41]) == "workers 0 to 19, 30 and 40 to 41"


@given(st.sets(st.integers(0, 60), min_size=17))
def test_many_workers_are_listed_as_ranges(ranks):
    ends = re.findall(r"(\d+)(?: to (\d+))?", list_workers(sorted(ranks)))
    runs = [range(int(first), int(last or first) + 1) for first, last in ends]
    assert [rank for run in runs for rank in run] == sorted(ranks)
