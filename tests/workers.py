"""Run a function in several processes, each with the environment variables of torchrun."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.ports import free_port

# less than pytest's, so that stacks are reported; enough on a machine that is ten times slower
TIMEOUT_SECONDS = 500.0
GRACE_SECONDS = 1.0  # for workers that fail at the same moment as the first
ABORT_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """The result of a worker: the `value` that its body returned, or the `error` that it raised.

    It has neither if a signal killed it. `exitcode` is None if the worker was stopped because
    another one had failed. `failed_at` is monotonic time, in seconds.
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
    """The first worker that failed, with its traceback. Its error is the `__cause__`."""


def run_workers(
    body: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return the values of `body(*args)` in each of `workers` processes, by rank.

    If one fails, stop the others and raise `WorkerFailedError` for the first failure. Raises
    `TimeoutError` with the stack of each worker that still runs after `timeout` seconds.
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
    timeout: float = TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Return the outcome of each of `workers` processes, by rank. A failure stops no other worker.

    Raises `TimeoutError` as `run_workers` does.
    """
    return _run(body, workers, args, timeout, environment or {}, stop_at_failure=False)


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
            variables = {**_torchrun(rank, workers, port), **environment}
            worker = _Worker(rank, folder, body, args, variables)
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
    """Wait until all workers exited, or until shortly after the first failure."""
    deadline = time.monotonic() + timeout
    stop_at = math.inf
    while True:
        now = time.monotonic()  # before the check, so that no worker counts as late that is not
        running = [worker for worker in team if not worker.has_exited()]
        if not running or now > stop_at:
            return
        if stop_at_failure and any(worker.exitcode for worker in team):
            stop_at = min(stop_at, now + GRACE_SECONDS)
        if now > deadline:
            lines = [
                f"worker {worker.rank} still ran after {timeout:g} s, here:\n{worker.abort()}"
                for worker in running
            ]
            lines += [str(worker.outcome()) for worker in team if worker.exitcode]
            raise TimeoutError("\n".join(lines))
        time.sleep(0.005)


class _Worker:
    """A process that runs a body and writes its result, or its stack if it crashes, to a file."""

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
        self._process = get_context("fork").Process(
            target=_work,
            args=(body, args, environment, self._report, self._stack),
            name=f"worker {rank}",
        )
        with warnings.catch_warnings():
            # The other threads belong to pytest's plugins and hold no lock that a worker needs.
            text = r".*multi-threaded, use of fork\(\) may lead to deadlocks"
            warnings.filterwarnings("ignore", text, DeprecationWarning)
            self._process.start()

    def has_exited(self) -> bool:
        self.exitcode = self._process.exitcode
        return self.exitcode is not None

    def outcome(self) -> Outcome:
        if self.exitcode is not None and self._report.exists():
            return Outcome(self.rank, self.exitcode, **pickle.loads(self._report.read_bytes()))
        return Outcome(self.rank, self.exitcode, traceback=self._stack_text())

    def abort(self) -> str:
        """End the worker with a signal that makes faulthandler write all stacks; return them."""
        os.kill(self._process.pid, signal.SIGABRT)
        self._process.join(ABORT_SECONDS)
        return self._stack_text()

    def stop(self) -> None:
        """Kill a worker and its children. After a success they remain, so that leaks are found."""
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
    gc.freeze()  # garbage of earlier tests may wait for its threads, which a fork does not have
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    os.environ.update(environment)
    faulthandler.enable(stack.open("w"))
    try:
        report.write_bytes(pickle.dumps({"value": body(*args)}))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the parent reports every error
        failure = {"failed_at": time.monotonic(), "error": _portable(error)}
        report.write_bytes(pickle.dumps({**failure, "traceback": traceback.format_exc()}))
        sys.exit(1)


def _portable(error: BaseException) -> BaseException:
    """Return the error, or its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  an error's own code runs here
        return RuntimeError(repr(error))
