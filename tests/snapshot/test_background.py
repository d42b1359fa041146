from __future__ import annotations

import threading

from samestep.snapshot.mirror import Background


def test_what_is_asked_for_during_a_pass_is_one_more():
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    passes = []

    def make_pass():
        begun.release()
        assert may_end.acquire(timeout=60)
        passes.append(None)

    background = Background("passes", make_pass)
    background.wait()
    background.ask()
    assert begun.acquire(timeout=60)
    for _ in range(3):
        background.ask()
    may_end.release(2)
    background.wait()
    assert len(passes) == 2
    background.close(20.0)
    assert not background._thread.is_alive()


def test_closing_waits_no_longer_than_it_is_told_and_begins_no_pass():
    begun, may_end = threading.Semaphore(0), threading.Event()
    passes = []

    def make_pass():
        passes.append(None)
        begun.release()
        may_end.wait(20)

    background = Background("passes", make_pass)
    background.ask()
    assert begun.acquire(timeout=60)
    background.ask()
    background.close(0.0)
    may_end.set()
    background._thread.join(60)
    assert len(passes) == 1
