"""What a worker leaves to its launcher: rank 0's result, or how it failed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch

from samestep.launch.failure import Failure
from samestep.launch.files import unnamed_file


class Report:
    """Memory that a worker shares with its launcher: it has no name, so nothing is left of it however both end."""

    def __init__(self, file: int | None = None) -> None:
        """Open memory of its own, or that of another process's report, by its file."""
        self._memory = os.fdopen(unnamed_file("samestep-report") if file is None else file, "w+b")

    @property
    def file(self) -> int:
        """The open file, for another process."""
        return self._memory.fileno()

    def leave_result(self, result: Any) -> None:
        """Leave a worker's result: anything that can be pickled."""
        torch.save(result, self._memory)
        self._memory.flush()

    def leave_failure(self, failure: Failure) -> None:
        """Leave a worker's failure, in place of a result that could not be left whole."""
        self._memory.seek(0)
        self._memory.truncate()
        self._memory.write(json.dumps(asdict(failure)).encode())
        self._memory.flush()

    def result(self) -> Any:
        """Return what the worker left with its tensors on the CPU, since a launcher must not use CUDA; None when nothing was left."""
        if self._memory.seek(0, os.SEEK_END) == 0:
            return None
        self._memory.seek(0)
        # What is unpickled comes from a fork of this process, through memory that no other has.
        return torch.load(self._memory, map_location="cpu", weights_only=False)

    def failure(self) -> Failure | None:
        """Return the failure that the worker left, None when it was killed before or while it wrote."""
        self._memory.seek(0)
        try:
            return Failure(**json.loads(self._memory.read()))
        except ValueError:
            return None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
