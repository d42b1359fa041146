"""A worker's entry point, its stop signals, and its report to the launcher."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from samestep.config import Config
from samestep.errors import LaunchError
from samestep.handoff import ATTEMPT, LauncherState, LoggedValues
from samestep.host import ECHO_SECONDS, anonymous_file, end_with_parent, no_garbage_collection
from samestep.launch.attempt import WorkerFailure

FORK: Final = multiprocessing.get_context("fork")
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LATEST_GROUP: Final = "group/latest"  # the number of the last group that rank 0 began to make
COMPLETE: Final = b"all ranks joined"  # of a group that rank 0 began
GIVEN_UP: Final = b"rank 0 began another one"
KEPT_DESTROYED_GROUPS: Final = 8  # with a few open files each
BLOCKED_SECONDS: Final = 5.0  # until a process that runs no Python code is ended as well
# Makes `torch.cuda.is_available()` ask the driver's management library, so that forks stay usable.
NVML_CHECK: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def can_use_gpus() -> bool:
    """Return whether processes that are forked from this one can use GPUs, if there are any.

    They cannot if it has asked the driver for GPUs, as `torch.cuda.is_available()` may do: this
    can only be observed in a fork.
    """
    import torch

    if torch.cuda.is_initialized():
        return False
    if not torch.backends.cuda.is_built():
        return True
    probe = FORK.Process(target=_exit_if_gpus_are_lost, name="probe of GPUs")
    with no_garbage_collection():
        probe.start()
    probe.join()
    return probe.exitcode == 0


def _exit_if_gpus_are_lost() -> None:
    from samestep.run.process import gpus_are_lost

    os._exit(gpus_are_lost())


class StopSignals:
    """The signals that asked this process to stop, in order, in `received`.

    A signal within a second of another does not count: timeout(1) and others send one to a process
    and then to its group.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._received_at = 0.0
        self._has_notice = False  # of a cloud, whose SIGTERM follows when the host shuts down

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record signals instead of acting on them; restore the previous handlers at the end.

        Ignored signals stay ignored (nohup). Off the main thread, where Python allows no handlers,
        nothing is recorded.
        """
        handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if (handler := signal.getsignal(number)) not in {signal.SIG_IGN, None}:
                    handlers[number] = handler
                    signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _record(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        is_echo = self._has_notice and number == signal.SIGTERM
        if not self.received or (now - self._received_at > ECHO_SECONDS and not is_echo):
            self.received.append(signal.Signals(number))
            self._received_at = now

    def notice(self) -> None:
        """Stop like on SIGTERM, unless a signal came before. The SIGTERM that follows is its echo.

        Threads may call it.
        """
        self._has_notice = True
        if not self.received:
            self.received.append(signal.SIGTERM)

    def reset(self) -> None:
        """Restore the default handlers in a worker, and raise the signals that it missed."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                interrupts = number is signal.SIGINT
                handler = signal.default_int_handler if interrupts else signal.SIG_DFL
                signal.signal(number, handler)
        for number in self.received:
            signal.raise_signal(number)


class ExitReport:
    """A `file` in memory that passes a worker's result or failure to its launcher."""

    def __init__(self, file: int | None = None) -> None:
        """Open new memory, or a file that another process has opened."""
        self.file = anonymous_file("samestep-report") if file is None else file
        self._memory = os.fdopen(self.file, "w+b")

    def write_result(self, result: Any) -> None:
        """Write a worker's result, which must be picklable."""
        import torch

        torch.save(result, self._memory)
        self._memory.flush()

    def write_failure(self, failure: WorkerFailure, error: BaseException) -> None:
        """Write a worker's failure, and its error if possible, replacing an incomplete result."""
        self._memory.seek(0)
        self._memory.truncate()
        self._memory.write(json.dumps(asdict(failure)).encode() + b"\n")
        if isinstance(error, Exception):
            with suppress(Exception):  # an error may hold anything
                self._memory.write(_pickled(error))
        self._memory.flush()

    @property
    def is_empty(self) -> bool:
        """Whether the worker has written neither a result nor a failure."""
        return self._memory.seek(0, os.SEEK_END) == 0

    def result(self) -> Any:
        """Return the result. Its tensors are on the CPU: a launcher must not use CUDA."""
        import torch

        self._memory.seek(0)
        # safe: only forks of this process can write to this memory
        return torch.load(self._memory, map_location="cpu", weights_only=False)

    def failure(self) -> WorkerFailure | None:
        """Return the failure; None if the worker was killed before it was written completely."""
        self._memory.seek(0)
        try:
            return WorkerFailure(**json.loads(self._memory.readline()))
        except ValueError:
            return None

    def error(self) -> Exception | None:
        """Return the error of the failure, None if it cannot be rebuilt in this process."""
        self._memory.seek(0)
        self._memory.readline()
        try:
            error = pickle.load(self._memory)  # noqa: S301  only forks of this process write to it
        except Exception:  # noqa: BLE001  such as a class of the script, which is unknown here
            return None
        return error if isinstance(error, Exception) else None

    def close(self) -> None:
        self._memory.close()


def _pickled(error: Exception) -> bytes:
    """Return an error as bytes. Raises if it holds a tensor: a launcher must not use CUDA."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                raise pickle.PicklingError("a tensor")
            return NotImplemented

    data = io.BytesIO()
    Pickler(data).dump(error)
    return data.getvalue()


@dataclass(frozen=True)
class LocalAttempt:
    """An attempt on this host: ranks `first_rank` to `first_rank + local_workers - 1` of `workers`.

    `environment` has the variables with the address of the attempt's store, such as MASTER_ADDR.
    """

    number: int
    first_rank: int
    local_workers: int
    workers: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """The function that this host's workers run, and what they share with their launcher."""

    body: Callable[[], Any]
    config: Config
    environment: Mapping[str, str]
    launcher_state: LauncherState
    signals: StopSignals
    launcher_pid: int
    logged: LoggedValues | None = None
    notices: deque[str] = field(default_factory=deque)  # lines to print, from another thread

    def run(
        self,
        attempt: LocalAttempt,
        local_rank: int,
        report: ExitReport,
        take_over: Callable[[], None],
    ) -> NoReturn:
        """Run the body in a forked worker, report its result or failure, and exit."""
        # Exit functions and uncollected garbage belong to the launcher. Finalizers that wait for
        # its threads would wait forever here, because a fork does not have these threads.
        atexit._clear()  # noqa: SLF001
        gc.freeze()
        gc.enable()
        code, kept = 1, list[Any]()
        try:
            take_over()
            code = self._run(attempt, local_rank, report, kept)
        finally:
            _exit_within(self.config.timeout, attempt.first_rank + local_rank, code)
            kept.clear()
            atexit._run_exitfuncs()  # noqa: SLF001  a forked process does not run them
        raise SystemExit(code)

    def _run(
        self, attempt: LocalAttempt, local_rank: int, report: ExitReport, kept: list[Any]
    ) -> int:
        """Return the exit status; `kept` keeps the body's result, its error and its locals."""
        rank = attempt.first_rank + local_rank
        try:
            self._set_up(attempt, local_rank)
            with _first_frame(kept):
                result = self.body()
            kept.append(result)
            report.write_result(result if rank == 0 else None)
        except BaseException as error:  # noqa: BLE001  the launcher reports every kind
            if not isinstance(error, SystemExit) or error.code:
                failure = WorkerFailure.of_error(rank, error)
                report.write_failure(failure, error)
                kept.append(error)
                return failure.status
            report.write_result(None)  # sys.exit(0)
        return 0

    def _set_up(self, attempt: LocalAttempt, local_rank: int) -> None:
        """Give the worker its own threads, session, environment, signal handlers and generators."""
        import torch

        from samestep.data.random_state import key, set_generators

        # first: inherited thread pools have no threads after a fork
        torch.set_num_threads(self.config.threads)
        # an orphan would write to the same files as the next attempt's workers
        end_with_parent(self.launcher_pid)
        # Ctrl-C reaches only the launcher, which forwards it once; killing this session's group
        # also kills everything that the worker started
        os.setsid()
        # A process that the body forks may outlive the run, and would keep its directory locked.
        os.register_at_fork(after_in_child=partial(self.launcher_state.close_locks, os.getpid()))
        os.environ.update({**self.environment, **attempt.environment, ATTEMPT: str(attempt.number)})
        os.environ.update(
            RANK=str(attempt.first_rank + local_rank),
            WORLD_SIZE=str(attempt.workers),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(attempt.local_workers),
        )
        _open_input(attempt.workers)
        _prepare_process_groups()
        # what the body draws before `init` is the same in all workers and at every start
        set_generators(key(self.config.seed, "before init"))
        self.signals.reset()


@contextmanager
def _first_frame(kept: list[Any]) -> Iterator[None]:
    """Append the frame of the first function that is called in the block to `kept`.

    It keeps the function's locals after its return: freeing them may take forever.
    """

    def keep(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            sys.setprofile(None)
            kept.append(frame)

    if sys.getprofile() is not None:  # a profiler of the user
        yield
        return
    sys.setprofile(keep)
    try:
        yield
    finally:
        if sys.getprofile() is keep:  # no Python function was called
            sys.setprofile(None)


class _NoInput(io.TextIOWrapper):
    """An empty stdin, which says what to do to whoever asks for a line."""

    def readline(self, _size: int = -1, /) -> str:  # type: ignore[override]
        """Raise `LaunchError`; at the end of a file, the debugger would quit."""
        raise LaunchError(
            "breakpoint() and input() read from stdin, which only a single worker has, from a"
            f" terminal or a pipe; this is one of {os.environ['WORLD_SIZE']}. Start the script with"
            " python or samestep run -n 1, in a terminal: its result is the same"
        )


def _open_input(workers: int) -> None:
    """Give a single worker the launcher's stdin, which multiprocessing has replaced."""
    null = Path(os.devnull)
    is_empty = workers > 1 or os.path.samestat(os.fstat(0), null.stat())
    sys.stdin = _NoInput(null.open("rb")) if is_empty else open(0, closefd=False)  # noqa: SIM115


def _exit_within(seconds: float, rank: int, code: int) -> None:
    """End this process with `code` if it has not exited after `seconds`.

    Exit functions, threads and processes that the body has left may take that long, and so may the
    destructors of its objects. If one of them stops all Python code, the process is ended with its
    stacks and status 1 a little later.
    """

    def end() -> None:
        time.sleep(seconds)
        left = [each for each in threading.enumerate() if not each.daemon]
        names = [each.name for each in left if each is not threading.main_thread()]
        names += [child.name for child in multiprocessing.active_children()]
        sys.stderr.write(
            f"worker {rank} was killed because its function returned but its process did not exit "
            f"within timeout={seconds:g} s; still running: {', '.join(names) or 'exit functions'}\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    faulthandler.dump_traceback_later(seconds + BLOCKED_SECONDS, exit=True, file=2)
    threading.Thread(target=end, name="samestep exit", daemon=True).start()


def _prepare_process_groups() -> None:
    """Let process groups that the body makes use the run's store, and keep them until the exit.

    torch would open a store to which anyone can write. And a DistributedDataParallel that outlives
    its group's `destroy_process_group`, as a local variable does, destroys the group: it waits for
    gloo's thread without releasing Python's lock, which that thread needs to release its last
    tensors (torch 2.13).
    """
    from samestep.torch_internals import on_new_group, on_new_group_store

    groups = ProcessGroups()
    on_new_group(groups.keep)
    on_new_group_store(groups.connect)


class ProcessGroups:
    """The process groups that a worker's body makes, and the stores that they use.

    Of destroyed groups, the last few are kept. The threads of earlier ones have long been idle.
    """

    def __init__(self) -> None:
        self._number = 0  # of the last default group that all ranks joined, or rank 0 gave up
        self._store: Any = None  # of the next default group
        self._stores: dict[int, Any] = {}  # of default groups, by their id

    def connect(self, rank: int, size: int, timeout: timedelta) -> Any:
        """Return the store of the next default group, with keys of its own, when all joined it.

        After a failed try, ranks may have tried more or less often: rank 0 numbers the groups, and
        says of each whether all joined it.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from samestep.comm.token_store import join_store

        store: Any = join_store(os.environ, timeout)
        if rank == 0:
            self._gather(store, size, timeout)
        else:
            while not self._join(store, rank, timeout):
                pass
        self._store = store
        return PrefixStore(f"group/{self._number}", store)

    def _gather(self, store: Any, size: int, timeout: timedelta) -> None:
        """Begin a group as its rank 0 and wait for the others; those in the last try come along."""
        last, self._number = self._number, store.add(LATEST_GROUP, 1)
        store.set(f"group/{self._number}/begun", b"")
        store.compare_set(f"group/{last}/outcome", "", GIVEN_UP)
        store.wait([f"group/{self._number}/joined/{other}" for other in range(1, size)], timeout)
        store.set(f"group/{self._number}/outcome", COMPLETE)

    def _join(self, store: Any, rank: int, timeout: timedelta) -> bool:
        """Join the latest group; return False if its rank 0 gave it up for another one."""
        store.wait([f"group/{self._number + 1}/begun"], timeout)
        number = store.add(LATEST_GROUP, 0)
        store.set(f"group/{number}/joined/{rank}", b"")
        store.wait([f"group/{number}/outcome"], timeout)
        self._number = number
        return bool(store.get(f"group/{number}/outcome") == COMPLETE)

    def keep(self, group: object, live: Collection[object]) -> None:
        """Keep a new group, and let the earliest of those that are not `live` any more go."""
        from samestep.comm.distributed import KEPT_GROUPS

        destroyed = [kept for kept in KEPT_GROUPS if kept not in live]
        for former in destroyed[:-KEPT_DESTROYED_GROUPS]:
            KEPT_GROUPS[:] = [kept for kept in KEPT_GROUPS if kept is not former]
            if (store := self._stores.pop(id(former), None)) is not None:
                store.close()
        KEPT_GROUPS.append(group)
        if self._store is not None:
            self._stores[id(group)], self._store = self._store, None
