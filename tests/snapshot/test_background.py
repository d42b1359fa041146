from __future__ import annotations

import threading
from pathlib import Path

from samestep.snapshot import hooks


class Passes(hooks.Hook):
    def __init__(self, make_pass):
        self._make_pass = make_pass
        super().__init__("passes")


def test_requests_during_a_pass_cause_one_more():
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    passes = []

    def make_pass():
        begun.release()
        assert may_end.acquire(timeout=20)
        passes.append(None)

    background = Passes(make_pass)
    background.finish()
    background.on_commit(Path())
    assert begun.acquire(timeout=20)
    for _ in range(3):
        background.on_commit(Path())
    may_end.release(2)
    background.finish()
    assert len(passes) == 2
    background.close()
    assert not background._thread.is_alive()


def test_closing_waits_only_for_the_grace_period_and_starts_no_pass(monkeypatch):
    monkeypatch.setattr(hooks, "CLOSE_SECONDS", 0.0)
    begun, may_end = threading.Semaphore(0), threading.Event()
    passes = []

    def make_pass():
        passes.append(None)
        begun.release()
        may_end.wait(20)

    background = Passes(make_pass)
    background.on_commit(Path())
    assert begun.acquire(timeout=20)
    background.on_commit(Path())
    background.close()
    may_end.set()
    background._thread.join(20)
    assert len(passes) == 1
