"""What a launcher hands to its workers.

Memory that outlives them, with a run's progress and slots for their state, and the arguments of
their script.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from samestep.host import anonymous_file, anonymous_memory, set_size
from samestep.user_code import is_of_package

TERMINAL: Final = "SAMESTEP_INTERNAL_TERMINAL"  # "1" if the launcher's stderr is a terminal
ATTEMPT: Final = "SAMESTEP_INTERNAL_ATTEMPT"  # the attempt number, from 0
LAUNCHER_STATE: Final = "SAMESTEP_INTERNAL_LAUNCHER_STATE"
LOGGED: Final = "SAMESTEP_INTERNAL_LOGGED"  # the number of a socket for logged values
SLOTS: Final = 2  # per worker: while one is being written, the other is valid
_PAGE: Final = mmap.PAGESIZE
# the board's first page: the step, whether the run is under way, whether it uses NCCL, whether it
# has finished, and the path of the run's directory; its second page: the line on the terminal
_STEP: Final = struct.Struct("<q")
_UNDER_WAY_AT, _NCCL_AT, _FINISHED_AT, _PATH_AT = range(_STEP.size, _STEP.size + 4)
_NO, _YES = b"\0", b"\1"
_NO_RUN: Final = -1
_MAX_MODULES: Final = 1 << 20  # maximum size of the modules' names, in bytes


class ScriptArguments(list[str]):
    """The `sys.argv` of a script, which notes the arguments that the script reads.

    `late` has those that are options of `samestep run` by their position, with their values, and
    `unread` those that were not read yet. Copies are plain lists.
    """

    def __init__(self, words: Iterable[str], late: Mapping[int, str]) -> None:
        super().__init__(words)
        self.late, self.unread = late, dict(late)

    def __getitem__(self, key: Any) -> Any:
        value, positions = super().__getitem__(key), range(len(self))[key]
        for position in [positions] if isinstance(positions, int) else positions:
            self.unread.pop(position, None)
        return value

    def __iter__(self) -> Iterator[str]:
        self.unread.clear()
        return super().__iter__()

    def __contains__(self, word: object) -> bool:
        self.unread.clear()
        return super().__contains__(word)

    def describe(self, options: Iterable[str]) -> str:
        """Return what to do about options that came too late, "" for none."""
        if not (texts := " ".join(options)):
            return ""
        return (
            f"{texts} came after {super().__getitem__(0)}, which gets all arguments after it; "
            "write options of samestep before the script"
        )

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, (list(self),)


@dataclass(frozen=True)
class LauncherState:
    """Anonymous files of a launcher, open in all workers that it forks.

    The kernel frees them however the processes exit. `slots[r]` hold copies of the state of the
    host's r-th worker; `slots` is empty if the system has no anonymous memory.
    """

    board: int
    modules: int
    locks: tuple[int, int]  # a socket pair
    slots: Sequence[Sequence[int]]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherState | None:
        """Return the state of this process's launcher, None if it has none."""
        if LAUNCHER_STATE not in environment:
            return None
        return cls.from_files(*map(int, environment[LAUNCHER_STATE].split(",")))

    @classmethod
    def from_files(
        cls, board: int, modules: int, send: int, receive: int, *slots: int
    ) -> LauncherState:
        """Return the state in these files, with the slots assigned to workers."""
        starts = range(0, len(slots), SLOTS)
        assigned = [slots[start : start + SLOTS] for start in starts]
        return cls(board, modules, (send, receive), assigned)

    @property
    def environment(self) -> dict[str, str]:
        """The variable through which workers find it."""
        files = [self.board, self.modules, *self.locks, *chain.from_iterable(self.slots)]
        return {LAUNCHER_STATE: ",".join(map(str, files))}

    def report_start(self, directory: str, step: int) -> None:
        """Record that a run began in a directory (full path, "" for none), so it can be resumed."""
        path = os.fsencode(directory) + b"\0"
        os.pwrite(self.board, _NO + path, _FINISHED_AT)
        os.pwrite(self.board, _STEP.pack(step) + _YES, 0)

    def report_step(self, step: int) -> None:
        """Record the number of completed steps."""
        os.pwrite(self.board, _STEP.pack(step), 0)

    def report_line(self, text: str, step: int) -> None:
        """Show a line of text below all output on the launcher's terminal; "" removes it."""
        os.pwrite(self.board, f"{step} {text}\0".encode()[:_PAGE], _PAGE)

    @property
    def line(self) -> tuple[str, int]:
        """The line that `report_line` shows, and the step at which it was reported."""
        # it may be torn, and is complete at the next update
        data = os.pread(self.board, _PAGE, _PAGE).partition(b"\0")[0].decode(errors="replace")
        step, _, text = data.partition(" ")
        return text, int(step) if step.isdecimal() else 0

    def report_finish(self) -> None:
        """Record that the run has finished."""
        os.pwrite(self.board, _YES, _FINISHED_AT)

    @property
    def has_finished(self) -> bool:
        """Whether the last run has finished."""
        return self._has(_FINISHED_AT)

    @property
    def step(self) -> int | None:
        """The number of completed steps, None before the run began."""
        (step,) = _STEP.unpack(os.pread(self.board, _STEP.size, 0))
        return None if step == _NO_RUN else step

    @property
    def directory(self) -> str:
        """The run's directory, "" for none or before the run began."""
        path = os.pread(self.board, _PAGE - _PATH_AT, _PATH_AT)
        return os.fsdecode(path.partition(b"\0")[0])

    def keep_open(self, file: int, name: str) -> None:
        """Keep a file of this worker open, with its lock, until the launcher and all workers exit.

        It stays in the buffer of a socket, with those of other runs, until `close_kept` reads it.
        """
        with self._socket(self.locks[0]) as sender:
            socket.send_fds(sender, [name.encode()], [file])

    def is_open(self, name: str) -> bool:
        """Return whether `keep_open` keeps a file of this name open."""
        return name in self._kept()

    def close_kept(self, name: str) -> None:
        """Close the file of this name that is kept open."""
        self._kept(without=name)

    def close_locks(self, parent: int) -> None:
        """Close the sockets that keep files open, in a process that `parent` has forked.

        Further forks inherit this call, but not the files.
        """
        for file in self.locks if os.getppid() == parent else ():
            os.close(file)

    def _kept(self, without: str = "") -> list[str]:
        """Return the names of the files that are kept open; close one of them."""
        kept = []
        with self._socket(self.locks[1]) as receiver, suppress(BlockingIOError):
            while True:
                name, files, *_ = socket.recv_fds(receiver, _PAGE, 1)
                kept.append((name.decode(), files))
        for text, files in kept:
            for file in files:
                if text != without:
                    self.keep_open(file, text)
                os.close(file)
        return [text for text, _ in kept]

    @contextmanager
    def _socket(self, file: int) -> Iterator[socket.socket]:
        with socket.socket(fileno=os.dup(file)) as opened:
            opened.setblocking(False)
            yield opened

    def leave_run(self) -> None:
        """Record that this host has left the run; copies of state stay."""
        os.pwrite(self.board, _STEP.pack(_NO_RUN), 0)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Record that workers are being started and have not begun the run."""
        os.pwrite(self.board, _NO + _NO, _UNDER_WAY_AT)
        self.report_line("", 0)

    def report_nccl(self) -> None:
        """Record that the workers of this attempt exchange through NCCL."""
        os.pwrite(self.board, _YES, _NCCL_AT)

    @property
    def uses_nccl(self) -> bool:
        """Whether the workers of the current attempt exchange through NCCL."""
        return self._has(_NCCL_AT)

    @property
    def is_under_way(self) -> bool:
        """Whether the workers of the current attempt have begun the run."""
        return self._has(_UNDER_WAY_AT)

    def _has(self, flag: int) -> bool:
        return os.pread(self.board, 1, flag) == _YES

    def report_modules(self) -> None:
        """Record this process's modules from installed packages, in import order."""
        modules = sys.modules.copy()  # in one step: meanwhile, a thread or finalizer may import
        names = [
            name
            for name, module in modules.items()
            if is_of_package(getattr(module, "__file__", None) or "")
        ]
        os.pwrite(self.modules, json.dumps(names).encode(), 0)

    @property
    def modules_reported(self) -> list[str] | None:
        """The modules recorded by `report_modules`, None before that."""
        try:
            names = json.loads(os.pread(self.modules, _MAX_MODULES, 0))
        except (ValueError, RecursionError):  # not written yet, or being written
            return None
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return names if is_list else None


# full paths of the directories in which this process, or workers of this launcher, finished a run
finished_directories: set[str] = set()


def report_logged(step: int, values: Mapping[str, float]) -> None:
    """Send logged values to the launcher, which asks for them with the variable `LOGGED`."""
    with socket.socket(fileno=os.dup(int(os.environ[LOGGED]))) as sender:
        sender.send(json.dumps([step, dict(values)]).encode())


class LoggedValues:
    """The launcher's end of `report_logged`, which calls `on_log(step, values)`."""

    def __init__(self, on_log: Callable[[int, dict[str, float]], object]) -> None:
        self._on_log = on_log
        # messages are received completely, even from workers that are killed
        self.file, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def environment(self) -> dict[str, str]:
        """The variable through which workers find it."""
        return {LOGGED: str(self._sender.fileno())}

    def forward(self) -> None:
        """Call `on_log` with all values that have arrived."""
        with suppress(BlockingIOError):
            while True:
                data = self.file.recv(_MAX_MODULES, socket.MSG_DONTWAIT)
                self._on_log(*json.loads(data))

    def close(self) -> None:
        self.file.close()
        self._sender.close()


@contextmanager
def open_launcher_state(workers: int) -> Iterator[LauncherState]:
    """Yield the state for a number of workers on this host."""
    name = "samestep-state"
    slots = [anonymous_memory(name) for _ in range(SLOTS * workers)]
    locks = [end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)]
    opened = [slot for slot in slots if slot is not None]
    files = [anonymous_file(name), anonymous_file(name), *locks, *opened]
    try:
        state = LauncherState.from_files(*files)
        set_size(state.board, 2 * _PAGE)
        state.leave_run()
        yield state
    finally:
        for file in files:
            os.close(file)
