"""What `samestep verify` sees of a script's own variables, and how it kills a worker."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

from samestep.data.generators import can_seed, get_state, observe
from samestep.data.search import KINDS, walk
from samestep.plugin import EndedStep, RunPlugin
from samestep.plugins.divergence import summary
from samestep.snapshot.manifest import NAME
from samestep.user_code import is_installed, is_users

# Set by samestep verify: "step rank" of a worker, and "body" if it may do all until the next step.
KILL: Final = "SAMESTEP_INTERNAL_KILL"
END: Final = -1  # instead of a step, at the end of the script
COMMIT_SECONDS: Final = 60.0  # for the snapshot before a kill
LEAVES: Final = (
    bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor,
)  # fmt: skip
CONTAINERS: Final = (list, tuple, dict, set, deque)
OF_MODULES: Final = ("._parameters[", "._buffers[")  # private attributes that are state


class StepObserver(RunPlugin):
    """Notes the variables of the script before each step, and kills this worker if it is told to.

    A variable that a resumed run has as it was at the start is not part of the snapshot.
    """

    def __init__(
        self, rank: int, directory: Path | None, take_snapshot: Callable[[], object]
    ) -> None:
        self._rank, self._directory, self._take_snapshot = rank, directory, take_snapshot
        self._is_first = True
        self._ended = -1  # the number of the last step that has ended here

    def end_step(self, ended: EndedStep) -> None:
        self._ended = ended.step

    def expire(self) -> None:
        """Kill the process if its loop has ended, before the script does what follows."""
        self._kill_if_told(f"{self._ended} {self._rank}", self._ended)

    def begin_step(self, step: int) -> None:
        """Note the variables before a step; kill the process once the snapshot before it exists."""
        if step == 0:
            self._take_snapshot()  # it also compares the state before the first step
        self._note_variables(step, is_first=self._is_first)
        self._is_first = False
        self._kill_if_told(f"{step} {self._rank}", step)
        self._kill_if_told(f"{step} {self._rank} body", step)

    def end_run(self) -> None:
        """Note the variables that the script ends with."""
        self._note_variables(END, is_first=True)

    def _note_variables(self, step: int, *, is_first: bool) -> None:
        if self._rank == 0:
            values = values_of(script_variables())
            observe(kind="state", step=step, is_first=is_first, values=values)

    def _kill_if_told(self, place: str, step: int) -> None:
        if os.environ.get(KILL) != place or self._directory is None:
            return
        end = time.monotonic() + COMMIT_SECONDS
        committed = self._directory / f"step-{step:08d}" / NAME
        while not committed.exists():
            if time.monotonic() > end:
                return
            time.sleep(0.002)
        observe(kind="killed", step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def script_variables() -> dict[str, Any]:
    """Return the variables of all running functions of the script, and of their modules, by name.

    The innermost ones come first, as in Python's own lookup.
    """
    variables: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (there is no public way)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            for names in (frame.f_locals, frame.f_globals):
                for name, value in list(names.items()):
                    if not name.startswith("__"):
                        variables.setdefault(name, value)
        frame = frame.f_back
    return variables


def values_of(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return summaries of the plain values that variables reach, and lengths of containers."""
    values: dict[str, str] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, LEAVES):
            values[name] = summary(value)
        elif isinstance(value, CONTAINERS):
            values[name] = f"length {len(value)}"
        elif isinstance(value, KINDS) and can_seed(value):
            values[name] = summary(get_state(value))

    for name, value in variables.items():
        note(name, value)
    for _, value, parts, _ in walk(**variables):
        hides = is_installed(type(value)) and not isinstance(value, CONTAINERS)
        for part, content in parts:
            is_private = part.name.rpartition(".")[2].startswith("_")
            if not (hides and is_private):
                note(part.name, content)
    return {_readable(name): value for name, value in values.items()}


def _readable(name: str) -> str:
    for private in OF_MODULES:
        before, found, after = name.partition(private)
        if found:
            return f"{before}.{after.strip('[]').strip(chr(39))}"
    return name
