"""A thread for what is done beside training."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Background:
    """Makes a pass whenever it is asked to; what is asked for during a pass is one more. A pass handles its own errors."""

    def __init__(self, name: str, make_pass: Callable[[], None]) -> None:
        self._make_pass = make_pass
        self._changed = threading.Condition()
        self._asked = self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have a pass made that begins after this call."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when every pass that was asked for is over."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._asked or self._busy))

    def close(self, grace_seconds: float) -> None:
        """Make no further pass, and wait for the one that runs for `grace_seconds`; what hangs even then ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(grace_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    return
                self._asked, self._busy = False, True
            self._make_pass()
