"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def end_with_parent(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent `pid` is gone, which may be already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != pid:
        os.kill(os.getpid(), number)
