"""Says on the terminal what the first step waits for while torch compiles it."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from samestep.run.process import announce
from samestep.user_code import is_callers

WAIT_SECONDS: Final = 5.0
COMPILER: Final = re.compile(r"[/\\](torch[/\\]_(dynamo|inductor)|triton)[/\\]")
IDLE: Final = ("subproc_pool.py", "compile_worker")  # threads that only wait for others


@contextmanager
def reported_compilation() -> Iterator[None]:
    """Announce what is being compiled if the block takes long and torch or Triton compiles then."""
    main, ended = threading.get_ident(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(main, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(main: int, ended: threading.Event) -> None:
    # also if it begins later: backward after a long forward, or Triton after torch
    while not ended.wait(WAIT_SECONDS):
        if _report(main):
            return


def _report(main: int) -> bool:
    """Announce what compiles now; return whether anything does."""
    frames = sys._current_frames()  # noqa: SLF001 (the only way to see another thread's frames)
    stacks = {thread: traceback.extract_stack(frame) for thread, frame in frames.items()}
    # autograd computes backward passes of GPUs in threads of its own
    compiling = next(filter(_compiles, [stacks[main], *stacks.values()]), None)
    if compiling is None:
        return False
    callers = [*filter(is_callers, compiling)] or [*filter(is_callers, stacks[main])]
    where = f" for {callers[-1].filename}:{callers[-1].lineno}" if callers else ""
    announce(f"the first step waits for torch, which has been compiling{where}")
    return True


def _compiles(stack: Sequence[traceback.FrameSummary]) -> bool:
    files = [frame.filename for frame in stack]
    return any(map(COMPILER.search, files)) and not any(
        part in file for file in files for part in IDLE
    )
