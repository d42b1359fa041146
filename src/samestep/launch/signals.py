"""Signals that ask to stop: noted while there are workers to be stopped first, as usual again in each worker."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ECHO_SECONDS: Final = 1.0


class StopSignals:
    """The signals that asked this process to stop, in order, in `received`.

    The echo of a signal does not count: timeout(1) and others send to a process and then to its
    group.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._received_at = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals instead of acting on them; then the handlers of before are back.

        Ignored signals stay ignored (nohup). Off the main thread, where Python allows no handlers,
        nothing is noted.
        """
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in STOPPING}
            before = {
                number: handler
                for number, handler in before.items()
                if handler not in {signal.SIG_IGN, None}
            }
        for number in before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.received or now - self._received_at > ECHO_SECONDS:
            self.received.append(signal.Signals(number))
            self._received_at = now

    def as_usual(self) -> None:
        """Give a worker, which inherits all this, the handlers of a fresh process; what was noted already takes effect."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(
                    number,
                    signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL,
                )
        for number in self.received:
            signal.raise_signal(number)
