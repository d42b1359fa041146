from __future__ import annotations

from multiprocessing import get_context

import pytest

from benchmarks import many_workers

SECONDS = 1.0  # of heartbeats


def measured(size, per_host, *, real):
    """Return the figures of each phase, measured in a process of its own."""
    parent, child = get_context("fork").Pipe()

    def body():
        many_workers.prepare()
        figures = many_workers.measure(size, per_host, real=real, heartbeats_seconds=SECONDS)
        child.send(figures)

    process = get_context("fork").Process(target=body)
    process.start()
    child.close()
    try:
        return parent.recv()
    finally:
        process.join()


@pytest.mark.parametrize(
    ("size", "real"),
    [
        (4, True),
        pytest.param(16, False, marks=pytest.mark.long),
        pytest.param(64, False, marks=pytest.mark.long),
    ],
)
def test_requests_are_linear_in_workers_or_hosts(size, real):
    phases = measured(size, 4, real=real)

    def heartbeats(seconds):  # each with the question whether there is an alarm
        return 2 * (size // 4) * (seconds + 2)

    forming, running, report = (phases[name] for name in ("forming", "heartbeats", "hang report"))
    # its entry, the entries of all, what gloo publishes and reads; worker 0 waits for all entries
    assert forming["requests"] <= 8 * size + 40 + heartbeats(forming["wall"])
    assert running["requests"] <= heartbeats(SECONDS * running["wall"]) / SECONDS
    # who reports, and what each host publishes and asks meanwhile
    assert report["requests"] <= 12 * size + 40 + heartbeats(report["wall"])


def test_a_timing_event_stays_short():
    assert many_workers.event_bytes(64) > 9_000
    assert many_workers.event_bytes(65) < 1_000
    assert many_workers.event_bytes(1024) < 1_000
