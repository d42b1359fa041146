"""A standby process that has imported the workers' modules, from which new workers are forked."""

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

from samestep.host import end_with_parent, missing_system_calls, no_garbage_collection
from samestep.launch.output import Pipes, print_to
from samestep.launch.worker import FORK, NVML_CHECK, ExitReport, Job, LocalAttempt, can_use_gpus
from samestep.user_code import imported_modules

MAX_BYTES: Final = 1 << 16  # of a message
FILES: Final = 3  # a worker's report, stdout and stderr
READY: Final = b"ready"
ANSWER_SECONDS: Final = 2.0  # an answer takes milliseconds unless the fork server is stopped
LOOKUP_SECONDS: Final = 10


class ForkServer:
    """The launcher's side of the fork server.

    Imports may take seconds, start threads or crash. Without this server, each worker would repeat
    them; the launcher does not import itself, because it must stay responsive and able to fork. The
    launcher forks workers until the imports are done, or always if it has all modules.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: ForkProcess | None = None
        self._socket: socket.socket | None = None
        self._has_decided = self._is_ready = False
        self._started: list[int] = []  # pid and pidfd of the worker that was forked last
        self._exit_codes: dict[int, int] = {}  # by process id

    def close(self) -> None:
        """Kill the process and with it its workers."""
        self._give_up()
        if self._process is not None:
            self._process.join()
            self._process.close()

    def prepare(self) -> None:
        """Start the process once workers have reported their modules, if it is useful."""
        modules = self._job.launcher_state.modules_reported
        if self._has_decided or modules is None:
            return
        self._has_decided = True
        missing = [name for name in modules if name not in sys.modules]
        restarts = self._job.config.max_restarts > 0
        if missing and restarts and "pidfd_open" not in missing_system_calls():
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            arguments = (self._job, missing, other)
            self._process = FORK.Process(target=_serve, args=arguments, name="fork-server")
            with other, no_garbage_collection():
                self._process.start()

    def start(
        self, attempt: LocalAttempt, local_rank: int, report: ExitReport, pipes: Pipes
    ) -> ForkedWorker | None:
        """Fork a worker; return None if the launcher has to fork it instead."""
        self._receive_all()
        if not self._is_ready or self._socket is None:
            return None
        message = json.dumps([asdict(attempt), local_rank]).encode()
        self._started = []
        try:
            socket.send_fds(self._socket, [message], [report.file, *pipes.ends])
            while not self._started:  # other messages are exit codes
                if not self._receive(ANSWER_SECONDS):
                    raise TimeoutError
        except OSError:
            self._give_up()
            return None
        pid, pidfd = self._started
        self._exit_codes.pop(pid, None)  # of an earlier process with this id
        return ForkedWorker(pid, pidfd, self)

    def exitcode(self, pid: int, *, has_ended: bool) -> int | None:
        """Return a worker's exit code as multiprocessing does; None while it runs."""
        self._receive_all()
        while has_ended and self._is_ready and pid not in self._exit_codes:
            if not self._receive(ANSWER_SECONDS):
                self._give_up()
        return self._exit_codes.get(pid, None if self._is_ready else -signal.SIGKILL)

    def _receive_all(self) -> None:
        while self._receive(0.0):
            pass

    def _receive(self, seconds: float) -> bool:
        """Handle one message; return whether one arrived in time."""
        if self._socket is None or not wait([self._socket], seconds):
            return False
        try:
            message, files, *_ = socket.recv_fds(self._socket, MAX_BYTES, 1)
        except ConnectionResetError:
            message = b""
        if not message:  # it has died
            self._give_up()
        elif message == READY:
            self._is_ready = True
        else:
            pid, code = json.loads(message)
            if code is None:
                self._started = [pid, *files]
            else:
                self._exit_codes[pid] = code
        return bool(message)

    def _give_up(self) -> None:
        """Kill the process and with it its workers; the launcher forks all further ones."""
        self._is_ready = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()


class ForkedWorker:
    """A worker of the fork server, with the interface of a multiprocessing process."""

    def __init__(self, pid: int, pidfd: int, fork_server: ForkServer) -> None:
        self.pid, self._file, self._fork_server = pid, pidfd, fork_server

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the worker runs."""
        has_ended = bool(wait([self._file], 0.0))
        return self._fork_server.exitcode(self.pid, has_ended=has_ended)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._file)


def _serve(job: Job, modules: Sequence[str], connection: socket.socket) -> None:
    """Import modules, then fork a worker for each message and send back its exit code."""
    end_with_parent(job.launcher_pid)
    os.setsid()  # Ctrl-C is for the launcher
    # first: inherited thread pools have no threads after a fork
    torch.set_num_threads(job.config.threads)
    devnull = os.open(os.devnull, os.O_WRONLY)
    print_to([devnull, os.dup(devnull)])
    # A thread of the launcher may have held glibc's lock for name lookups during the fork. Lookups
    # would then block: SIGALRM ends this process, and the launcher forks workers itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOOKUP_SECONDS)
    with suppress(OSError):
        socket.getaddrinfo("localhost", None)
    signal.alarm(0)
    os.environ.update(NVML_CHECK)
    for name in modules:
        with suppress(Exception):  # a worker that needs the module raises the error again
            import_module(name)
    imported_modules.note()
    if job.config.device != "cpu" and not can_use_gpus():
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
            data, files, *_ = socket.recv_fds(connection, MAX_BYTES, FILES)
            if not data:
                return
            worker = _fork(job, data, files)
            # The launcher gets the pidfd: the worker may have exited before it could open one.
            pidfd = os.pidfd_open(worker.pid or 0)
            workers[pidfd] = worker
            socket.send_fds(connection, [json.dumps([worker.pid, None]).encode()], [pidfd])


def _fork(job: Job, data: bytes, files: Sequence[int]) -> ForkProcess:
    attempt, local_rank = json.loads(data)
    report, *ends = files
    arguments = (LocalAttempt(**attempt), local_rank, ExitReport(report), partial(print_to, ends))
    worker = FORK.Process(target=job.run, args=arguments)
    with no_garbage_collection():
        worker.start()
    for end in ends:
        os.close(end)
    return worker
