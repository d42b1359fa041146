"""Run a function in several real processes, each in the environment that torchrun would give it."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import resource
import secrets
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkProcess

GRACE_SECONDS = 0.25  # time for a worker that failed at the same moment as another to say so


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: with the `value` its body returned, the `error` it raised, or neither where a signal ended it.

    `exitcode` is None where the worker was stopped because another had failed. `failed_at` is
    monotonic time, in seconds.
    """

    rank: int
    exitcode: int | None
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = 0.0

    @property
    def failed(self) -> bool:
        return self.exitcode not in {None, 0}

    def __str__(self) -> str:
        how = repr(self.error) if self.error else f"exit code {self.exitcode}"
        return f"worker {self.rank} ended with {how}\n{self.traceback}".rstrip()


class WorkerFailedError(Exception):
    """The first worker to fail, with its own traceback; the error it raised is the `__cause__`."""


def run_workers(
    body: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what `body(*args)` returned in each of `workers` processes, by rank.

    When one fails the others are stopped, and `WorkerFailedError` tells of the first to fail.
    Raises `TimeoutError` with the stack of each worker that still runs after `timeout` seconds.
    """
    outcomes = _run(body, workers, args, timeout, environment or {}, stop_at_failure=True)
    if failures := [outcome for outcome in outcomes if outcome.failed]:
        first = min(failures, key=lambda outcome: outcome.failed_at)
        raise WorkerFailedError(str(first)) from first.error
    return [outcome.value for outcome in outcomes]


def try_workers(
    body: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Return how each of `workers` processes ended, by rank; the failure of one stops none of the others.

    Raises `TimeoutError` as `run_workers` does.
    """
    return _run(body, workers, args, timeout, environment or {}, stop_at_failure=False)


def free_port() -> int:
    """Return a port of the loopback that is free now, below those that outgoing connections are given."""
    while True:
        # not random's: that has the same seed in every pytest process
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(
    body: Callable[..., Any],
    workers: int,
    args: Sequence[Any],
    timeout: float,
    environment: Mapping[str, str],
    *,
    stop_at_failure: bool,
) -> list[Outcome]:
    port = free_port()
    with ExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory()))
        team = []
        for rank in range(workers):
            worker = _Worker(
                rank, folder, body, args, {**_torchrun(rank, workers, port), **environment}
            )
            exits.callback(worker.stop)
            team.append(worker)
        _wait(team, timeout, stop_at_failure=stop_at_failure)
        return [worker.outcome() for worker in team]


def _torchrun(rank: int, workers: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(team: Sequence[_Worker], timeout: float, *, stop_at_failure: bool) -> None:
    """Return when all have ended, or soon after the first failure if that stops them."""
    deadline = time.monotonic() + timeout
    stop_at = math.inf
    while running := [worker for worker in team if not worker.ended()]:
        if stop_at_failure and any(worker.exitcode for worker in team):
            stop_at = min(stop_at, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > stop_at:
            return
        if time.monotonic() > deadline:
            stacks = [
                f"worker {worker.rank} still ran after {timeout:g} s, here:\n{worker.abort()}"
                for worker in running
            ]
            failures = [
                str(worker.outcome())
                for worker in team
                if worker not in running and worker.exitcode
            ]
            raise TimeoutError("\n".join(stacks + failures))
        time.sleep(0.005)


class _Worker:
    """A process that runs a body, writes its report to a file, and its stack to another when a fatal signal ends it."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        body: Callable[..., Any],
        args: Sequence[Any],
        environment: Mapping[str, str],
    ) -> None:
        self.rank = rank
        self.exitcode: int | None = None
        self._report, self._stack = folder / f"report-{rank}", folder / f"stack-{rank}"
        self._process: ForkProcess = get_context("fork").Process(
            target=_work,
            args=(body, args, environment, self._report, self._stack),
            name=f"worker {rank}",
        )
        with warnings.catch_warnings():
            # The other threads here are those of pytest's plugins; they hold no lock that a worker
            # needs.
            warnings.filterwarnings(
                "ignore",
                r".*multi-threaded, use of fork\(\) may lead to deadlocks",
                DeprecationWarning,
            )
            self._process.start()

    def ended(self) -> bool:
        self.exitcode = self._process.exitcode
        return self.exitcode is not None

    def outcome(self) -> Outcome:
        if self.exitcode is not None and self._report.exists():
            return Outcome(self.rank, self.exitcode, **pickle.loads(self._report.read_bytes()))
        return Outcome(self.rank, self.exitcode, traceback=self._stack_text())

    def abort(self) -> str:
        """End the worker by a signal on which faulthandler writes the stacks of all threads; return them."""
        os.kill(self._process.pid, signal.SIGABRT)
        deadline = time.monotonic() + 5.0
        while self._process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._stack_text()

    def stop(self) -> None:
        """Leave nothing of a worker that did not end well; what a good one leaves behind, its test must answer for."""
        if self.exitcode != 0:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def _stack_text(self) -> str:
        return self._stack.read_text() if self._stack.exists() else ""


def _work(
    body: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
    report: Path,
    stack: Path,
) -> None:
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    os.environ.update(environment)
    faulthandler.enable(stack.open("w"))
    try:
        report.write_bytes(pickle.dumps({"value": body(*args)}))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  whatever a test raises is its parent's to judge
        told = {
            "failed_at": time.monotonic(),
            "error": _portable(error),
            "traceback": traceback.format_exc(),
        }
        report.write_bytes(pickle.dumps(told))
        sys.exit(1)


def _portable(error: BaseException) -> BaseException:
    """Return the error, or its words where it cannot travel between processes."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  an error's own code runs here
        return RuntimeError(repr(error))
