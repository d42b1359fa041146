"""Processes that stand by while workers run: they have imported what those had to, and take the place of killed ones at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch

from samestep.launch.crew import Attempt
from samestep.launch.output import print_to
from samestep.launch.parent import end_with_parent
from samestep.launch.preload import no_collection
from samestep.launch.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import ForkProcess

    from typing_extensions import Self

    from samestep.launch.output import Pipes
    from samestep.launch.worker import Job

FORK: Final = multiprocessing.get_context("fork")
MOST_BYTES: Final = 1 << 16  # of an attempt as JSON
FILES: Final = 3  # a worker's report, stdout and stderr


class Spares:
    """A process that stands by for every worker of this host; a context manager."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spares: dict[int, Spare] = {}
        self._prepared = job.config.restarts == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for spare in self._spares.values():
            spare.close()

    def prepare(self) -> None:
        """Have spares once workers have told what they import. Where the launcher has it all, forking from it is as good."""
        if self._prepared or not (modules := self._job.kept.modules_missing):
            return
        self._prepared = True
        with suppress(OSError):  # without them, workers will be forked when they are needed
            for local_rank in range(self._job.workers):
                self._spares[local_rank] = Spare(self._job, local_rank, modules)

    def become_worker(self, attempt: Attempt, local_rank: int, report: Report, pipes: Pipes) -> ForkProcess | None:
        """Return the spare of a local rank as a worker of an attempt, None where there is none."""
        spare = self._spares.pop(local_rank, None)
        self._prepared = self._job.config.restarts == 0
        if spare is None:
            return None
        try:
            return spare.become_worker(attempt, report, pipes.ends)
        except OSError:  # it has died while it stood by
            spare.close()
            return None


class Spare:
    """One process that stands by."""

    def __init__(self, job: Job, local_rank: int, modules: Sequence[str]) -> None:
        """Fork it; it imports the modules by itself. Raises `OSError` if it cannot be forked."""
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = FORK.Process(target=_stand_by, args=(job, local_rank, modules, other), name=f"spare {local_rank}")
        with other, no_collection():
            self._process.start()

    def become_worker(self, attempt: Attempt, report: Report, ends: Sequence[int]) -> ForkProcess:
        """Return the process as a worker, which prints to `ends`. Raises `OSError` if it is gone."""
        socket.send_fds(self._socket, [json.dumps(asdict(attempt)).encode()], [report.file, *ends])
        self._socket.close()
        return self._process

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _stand_by(job: Job, local_rank: int, modules: Sequence[str], connection: socket.socket) -> None:
    end_with_parent(job.launcher_pid)
    torch.set_num_threads(job.config.threads)  # first: inherited pools of threads have no threads after a fork
    nowhere = os.open(os.devnull, os.O_WRONLY)
    print_to([nowhere, os.dup(nowhere)])
    for name in modules:
        with suppress(Exception):  # a worker will say so, if it matters to it
            import_module(name)
    data, files, *_ = socket.recv_fds(connection, MOST_BYTES, FILES)
    connection.close()
    report, *ends = files
    job.work(Attempt(**json.loads(data)), local_rank, Report(report), partial(print_to, ends))
