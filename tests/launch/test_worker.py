from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from samestep.errors import LaunchError
from samestep.launch import launch, worker
from samestep.launch.worker import StopSignals
from tests.launch.processes import SOON_SECONDS, end_soon, for_ever, rank

FORK = get_context("fork")


@contextmanager
def launched(body, **options):
    """Yield a launcher process and its workers' process ids while both workers are in `body`."""
    pids, ready = FORK.Array("i", 2), FORK.Barrier(3)

    def work():
        pids[rank()] = os.getpid()
        body(ready)

    launcher = FORK.Process(target=launch, args=(work,), kwargs=options)
    launcher.start()
    try:
        ready.wait(SOON_SECONDS)
        yield launcher, list(pids)
    finally:
        launcher.kill()
        launcher.join()


def wait_for_signals(ready):
    ready.wait()
    for_ever()


def ignore_sigterm(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.wait()
    for_ever()


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_to_the_launcher_stops_the_workers_first(number, exit_code):
    with launched(wait_for_signals) as (launcher, pids):
        os.kill(launcher.pid, number)
        launcher.join(SOON_SECONDS)
        assert launcher.exitcode == exit_code
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_workers_exit_with_a_killed_launcher():
    with launched(ignore_sigterm) as (launcher, pids):
        launcher.kill()
        launcher.join(SOON_SECONDS)
        assert end_soon(pids)


def test_workers_get_a_signal_once_and_time_to_act_on_it(tmp_path):
    def body(ready):
        received, arrived = [], threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: (received.append(1), arrived.set()))
        ready.wait()
        arrived.wait()
        (tmp_path / f"snapshot-{rank()}").write_text(f"after {len(received)} signal")

    with launched(body) as (launcher, _):
        os.kill(launcher.pid, signal.SIGTERM)
        launcher.join(SOON_SECONDS)
        assert launcher.exitcode == -signal.SIGTERM
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "snapshot-0": "after 1 signal",
        "snapshot-1": "after 1 signal",
    }


def test_workers_are_killed_after_the_grace_period():
    with launched(ignore_sigterm, grace_period=0.2) as (launcher, _):
        os.kill(launcher.pid, signal.SIGTERM)
        launcher.join(SOON_SECONDS)
        assert launcher.exitcode == -signal.SIGTERM


def test_a_second_signal_does_not_wait(monkeypatch):
    monkeypatch.setattr(worker, "ECHO_SECONDS", 0.0)
    arrived = FORK.Semaphore(0)

    def body(ready):
        signal.signal(signal.SIGINT, lambda *_: arrived.release())
        ready.wait()
        for_ever()

    with launched(body) as (launcher, _):
        os.kill(launcher.pid, signal.SIGINT)
        assert arrived.acquire(timeout=SOON_SECONDS)
        os.kill(launcher.pid, signal.SIGINT)
        launcher.join(SOON_SECONDS)
        assert launcher.exitcode == 1


def test_an_echo_of_a_signal_is_ignored(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    signals = StopSignals()
    with signals.recorded():
        signal.raise_signal(signal.SIGTERM)
        now[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == [signal.SIGTERM]
        now[0] += 0.2
        signal.raise_signal(signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = StopSignals()
    try:
        with signals.recorded():
            signal.raise_signal(signal.SIGHUP)
        assert signals.received == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_a_worker_listens_is_not_lost():
    signals = StopSignals()
    with signals.recorded():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.reset()


def test_the_callers_handler_gets_the_signal_at_the_end(monkeypatch):
    handled = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        with pytest.raises(LaunchError, match="stopped by SIGTERM"):
            launch(lambda: os.kill(os.getppid(), signal.SIGTERM) if rank() == 1 else for_ever())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM]
