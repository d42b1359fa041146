"""A request to stop that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn


class StopRequest:
    """Holds SIGTERM and Ctrl-C back while `deferring` is set, so that a step can end and be kept.

    `received` is the number of the signal that came first, or 0. Outside of steps a signal acts at
    once, and so does Ctrl-C after another signal; SIGTERM after another changes nothing: schedulers
    send it to all processes of a job, and launchers pass it on. Python lets only the main thread
    hold signals; elsewhere nothing is held.
    """

    def __init__(self) -> None:
        self.received = 0
        self.deferring = False
        self._former: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._handle)

    def act(self, number: int) -> NoReturn:
        """Raise what a signal asks for: KeyboardInterrupt, or SystemExit with status 128 + its number."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.received != 0
        if again and number == signal.SIGTERM:
            return
        self.received = self.received or number
        if again or not self.deferring:
            self.act(number)
