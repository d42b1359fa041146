"""A process that stands by while workers run: it has imported what they had to, and their successors are forked from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Final

import torch
from typing_extensions import Self

from samestep.host import end_with_parent, missing_system_calls, no_garbage_collection
from samestep.launch.exit_report import Report
from samestep.launch.output import Pipes, print_to
from samestep.launch.worker import FORK, Attempt, Job

MOST_BYTES: Final = 1 << 16  # of a message
FILES: Final = 3  # a worker's report, stdout and stderr
READY: Final = b"ready"
ANSWER_SECONDS: Final = 2.0  # for what takes milliseconds, unless a signal has stopped the nursery


class ForkServer:
    """The launcher's end of it; a context manager.

    Imports may take seconds, start threads or crash: not in the launcher, which sees to the workers
    meanwhile and must stay fit to fork others, and not once for each worker. Before the imports are
    done, and where the launcher has all of them, workers are forked from it.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: ForkProcess | None = None
        self._socket: socket.socket | None = None
        self._has_decided = self._is_ready = False
        self._started = 0  # process id of the worker that was forked last
        self._ended: dict[int, int] = {}  # exit codes by process id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()

    def prepare(self) -> None:
        """Begin once workers have told what they import, unless the launcher has all of it, or workers are not to be replaced."""
        if self._has_decided or (modules := self._job.kept.modules_reported) is None:
            return
        self._has_decided = True
        missing = [name for name in modules if name not in sys.modules]
        if (
            missing
            and self._job.config.max_restarts > 0
            and "pidfd_open" not in missing_system_calls()
        ):
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = FORK.Process(
                target=_stand_by, args=(self._job, missing, other), name="nursery"
            )
            with other, no_garbage_collection():
                self._process.start()

    def start(
        self, attempt: Attempt, local_rank: int, report: Report, pipes: Pipes
    ) -> ForkedWorker | None:
        """Have a worker forked; None where that has to be done otherwise."""
        self._hear()
        if not self._is_ready or self._socket is None:
            return None
        message = json.dumps([asdict(attempt), local_rank]).encode()
        self._started = 0
        try:
            socket.send_fds(self._socket, [message], [report.file, *pipes.ends])
            while not self._started:  # other messages tell of ends
                if not self._hear_one(ANSWER_SECONDS):
                    raise TimeoutError
            self._ended.pop(self._started, None)  # of another one with that number
            return ForkedWorker(self._started, self)
        except OSError:
            self._give_up()
            return None

    def exitcode(self, pid: int, *, has_ended: bool) -> int | None:
        """Return how a worker ended, as multiprocessing has it; None while it runs."""
        self._hear()
        while has_ended and self._is_ready and pid not in self._ended:
            if not self._hear_one(ANSWER_SECONDS):
                self._give_up()
        return self._ended.get(pid, None if self._is_ready else -signal.SIGKILL)

    def _hear(self) -> None:
        """Take in what was told."""
        while self._hear_one(0.0):
            pass

    def _hear_one(self, seconds: float) -> bool:
        """Take in one message, and tell whether one came in time."""
        if self._socket is None or not wait([self._socket], seconds):
            return False
        try:
            message = self._socket.recv(MOST_BYTES)
        except ConnectionResetError:
            message = b""
        if not message:  # it has died
            self._give_up()
        elif message == READY:
            self._is_ready = True
        else:
            pid, code = json.loads(message)
            if code is None:
                self._started = pid
            else:
                self._ended[pid] = code
        return bool(message)

    def _give_up(self) -> None:
        """End it, and its workers with it; from now on workers are forked from the launcher."""
        self._is_ready = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()


class ForkedWorker:
    """A worker that was forked in the nursery, as its launcher sees it: as much of a process of multiprocessing as that needs."""

    def __init__(self, pid: int, nursery: ForkServer) -> None:
        self.pid = pid
        self._nursery = nursery
        self._file = os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """How it ended; None while it runs."""
        has_ended = bool(wait([self._file], 0.0))
        return self._nursery.exitcode(self.pid, has_ended=has_ended)

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def join(self) -> None:
        """Return when it has ended."""
        wait([self._file])

    def close(self) -> None:
        """Give its file back."""
        os.close(self._file)


def _stand_by(job: Job, modules: Sequence[str], connection: socket.socket) -> None:
    """Import, then fork a worker for each message, and tell how it ended."""
    end_with_parent(job.launcher_pid)
    os.setsid()  # Ctrl-C is the launcher's
    # first: inherited pools of threads have no threads after a fork
    torch.set_num_threads(job.config.threads)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    print_to([nowhere, os.dup(nowhere)])
    for name in modules:
        with suppress(Exception):  # a worker will say so, if it matters to it
            import_module(name)
    if torch.cuda.is_initialized():  # no process that is forked from here could use a GPU
        return
    connection.send(READY)
    job = replace(job, launcher_pid=os.getpid())
    workers: dict[int, ForkProcess] = {}
    while True:
        ready = wait([connection, *workers])
        for file in [file for file in workers if file in ready]:
            worker = workers.pop(file)
            os.close(file)
            worker.join()
            connection.send(json.dumps([worker.pid, worker.exitcode]).encode())
        if connection in ready:
            data, files, *_ = socket.recv_fds(connection, MOST_BYTES, FILES)
            if not data:
                return
            worker = _fork(job, data, files)
            workers[os.pidfd_open(worker.pid or 0)] = worker
            connection.send(json.dumps([worker.pid, None]).encode())


def _fork(job: Job, data: bytes, files: Sequence[int]) -> ForkProcess:
    attempt, local_rank = json.loads(data)
    report, *ends = files
    arguments = (Attempt(**attempt), local_rank, Report(report), partial(print_to, ends))
    worker = FORK.Process(target=job.work, args=arguments)
    with no_garbage_collection():
        worker.start()
    for end in ends:
        os.close(end)
    return worker
