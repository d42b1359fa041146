"""In-memory snapshots: complete states in the launcher's memory that outlive the workers.

Any number of replacement workers can resume from them. Every worker writes its parts alternately
into its two memory slots. All workers communicate between any two snapshots, so no worker starts
one before all workers finished the previous one, which is in the other slot. So after the first
snapshot, one of the two slots always holds a complete snapshot on all workers.

Replacement workers first write into the slot that they did not resume from, so that the other
snapshot stays until all of them have finished a new one. Without a launcher that holds memory, no
snapshots are made.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Final

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.errors import SnapshotError
from samestep.handoff import SLOTS, LauncherState
from samestep.host import anonymous_file, available_bytes
from samestep.snapshot import memory_slot
from samestep.snapshot.commit import combine
from samestep.snapshot.memory_slot import MemorySlot
from samestep.snapshot.part import contribution
from samestep.snapshot.read import READ_ERRORS, Snapshot, read_state
from samestep.snapshot.state import States

CHUNK_BYTES: Final = 2**24  # sent to other hosts at a time
SHARE_OF_TIME: Final = 0.01
SHARE_OF_MEMORY: Final = 0.5  # of the available memory
_OPEN_FILES: Final = Path("/proc/self/fd")
_runs_without_directory = count()


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """Identifies an in-memory snapshot after `step`, in slot number `slot` of all its workers."""

    step: int
    attempt: str
    workers: int
    slot: int


class InMemorySnapshots:
    """One worker's view of a run's in-memory snapshots; without `launcher_state` there are none."""

    def __init__(
        self,
        launcher_state: LauncherState | None,
        process: ProcessInfo,
        world: World,
        directory: Path | None,
        every: str | None,
    ) -> None:
        self._launcher_state, self._process, self._world = launcher_state, process, world
        self._directory = "" if directory is None else str(directory.resolve())
        self._every = None if launcher_state is None else every
        # the label of this run's snapshots: its directory or, without one, its number in the script
        self._run = self._directory
        if not self._directory and launcher_state is not None:
            self._run = str(next(_runs_without_directory))
        self._files = [] if launcher_state is None else launcher_state.slots
        own_files = self._files[process.local_rank] if self._files else []
        self._slots = [MemorySlot(file) for file in own_files]
        # the files of this host's parts, and the bytes of the parts on each worker's host
        self._parts: dict[tuple[SnapshotKey, int], int] = {}
        self._part_bytes: list[dict[tuple[SnapshotKey, int], int]] = []
        self._first_slot = 0
        self._saves = 0
        self._given_up = False
        self._due_time = 0.0
        self._modules_reported = False
        self._barriers_at_save = -1

    def has_begun(self, attempt: int) -> bool:
        """Return whether an earlier attempt began this run, on any host; collective."""
        state = self._launcher_state
        begun = False
        if attempt > 0 and state is not None:
            begun = state.step is not None and state.directory == self._directory
        return any(self._world.all_gather_json(begun, "starting"))

    def time_is_up(self) -> bool:
        """Return whether, by this worker's clock, a save leaves 99 percent of time to training."""
        return self._every == "auto" and not self._given_up and time.monotonic() >= self._due_time

    def is_due(self, step: int, *, agreed: bool) -> bool:
        """Return whether to save after `step`; the first save is always due.

        `agreed` is the result of `time_is_up` on rank 0.
        """
        if self._every is None:
            return False
        if self._saves == 0:
            return True
        return agreed if self._every == "auto" else step % int(self._every) == 0

    def report_start(self, step: int, *, is_new: bool) -> None:
        """Report to the launcher that the run continues after `step`.

        A new run discards the snapshots of another history.
        """
        if is_new:
            self._clear_slots()
        if self._launcher_state is not None and self._process.local_rank == 0:
            self._launcher_state.report_start(self._directory, step)
        # one worker per host reports, once, that there is no memory
        if not self._slots and not (is_new and self._process.local_rank == 0):
            self.give_up()

    def report_step(self, step: int) -> None:
        """Report the number of finished steps to the launcher and, once, the imported modules."""
        if self._launcher_state is None or self._process.local_rank > 0:
            return
        self._launcher_state.report_step(step)
        if not self._modules_reported:
            self._modules_reported = True
            self._launcher_state.report_modules()

    def give_up(self) -> None:
        """Make no more snapshots: this worker's part of them would be missing."""
        self._given_up = True

    def save(
        self, step: int, attempt: str, shared: States, own: States, info: States, started: float
    ) -> None:
        """Copy the state, passed as to `SnapshotWriter.save`; all workers call this.

        `started` is the `time.monotonic` at which the save began. Raises `SnapshotError` or
        `OSError` if the memory does not suffice.
        """
        if self._world.barriers == self._barriers_at_save:
            self._world.barrier("starting an in-memory snapshot")
        number = (self._first_slot + self._saves) % SLOTS
        key = SnapshotKey(step, attempt, self._world.size, number)
        self._barriers_at_save, self._saves = self._world.barriers, self._saves + 1
        if self._given_up:
            return
        if not self._slots:
            raise SnapshotError(
                "this host refuses memfd_create, usually by the seccomp profile of a container, "
                "and no other memory outlives workers: after a worker is killed, the run resumes "
                "from its newest snapshot; allow the call, or use hot_every=none"
            )
        mine, values = contribution(shared, own, self._world.rank, self._world.size)
        names = {"run": self._run, "key": list(astuple(key)), "rank": self._world.rank}
        before = time.monotonic()
        if self._saves == 1:
            self._check_memory(mine.nbytes)
        self._slots[number].reserve(mine.nbytes)
        if self._saves == SLOTS:  # the slots of earlier workers are no longer needed
            self._clear_slots(1)
        preparation_seconds = time.monotonic() - before  # long only for the first saves
        self._slots[number].write({**names, "info": dict(info)}, mine, values)
        ended = time.monotonic()
        self._due_time = ended + (ended - started - preparation_seconds) / SHARE_OF_TIME

    def _clear_slots(self, first: int = 0) -> None:
        """Free this worker's slots and those of earlier workers; not its own if `first` is 1."""
        process = self._process
        for files in self._files[process.local_rank :: process.local_world_size][first:]:
            for file in files:
                os.ftruncate(file, 0)

    def _check_memory(self, nbytes: int) -> None:
        """Raise `SnapshotError` if snapshots of `nbytes` per worker need too much memory."""
        missing = sum(slot.missing_bytes(nbytes) for slot in self._slots)
        wanted = self._process.local_world_size * missing
        available = available_bytes()
        if available is not None and wanted > SHARE_OF_MEMORY * available:
            raise SnapshotError(
                f"in-memory snapshots must take at most half of the {available / 1e9:.1f} GB of "
                f"memory that this host has left, got {wanted / 1e9:.1f} GB: use hot_every=none, "
                "or a host with more memory"
            )

    def find(self, report: Callable[..., object]) -> list[SnapshotKey]:
        """Return the snapshots with all parts on any hosts, in the order of steps; collective.

        Calls `report("in_memory_snapshot_rejected", reason=...)` for damaged parts.
        """
        sizes, faults = {}, []
        for file in chain.from_iterable(self._files):
            try:
                content = memory_slot.read(file)
            except SnapshotError as error:
                faults.append(str(error))
                continue
            if content is not None and content.label["run"] == self._run:
                part = SnapshotKey(*content.label["key"]), content.label["rank"]
                self._parts[part], sizes[part] = file, content.nbytes
        mine = [[astuple(key), rank, nbytes] for (key, rank), nbytes in sizes.items()]
        gathered = self._world.all_gather_json([mine, faults], "looking for in-memory snapshots")
        for fault in dict.fromkeys(fault for _, others in gathered for fault in others):
            report("in_memory_snapshot_rejected", reason=fault)
        self._part_bytes = [
            {(SnapshotKey(*key), rank): nbytes for key, rank, nbytes in parts}
            for parts, _ in gathered
        ]
        found = Counter(key for key, _ in set().union(*self._part_bytes))
        return sorted(key for key, parts in found.items() if parts == key.workers)

    def load(self, key: SnapshotKey) -> Snapshot:
        """Load a snapshot that was found; the next save uses the other slot. Collective.

        Raises `SnapshotError` if it is damaged.
        """
        self._first_slot = (key.slot + 1) % SLOTS
        with ExitStack() as exits:
            files = [self._file(key, rank, exits) for rank in range(key.workers)]
            try:
                return _load(key, files)
            except READ_ERRORS as error:
                raise SnapshotError(
                    f"the in-memory snapshot of step {key.step} cannot be used: {error}"
                ) from error

    def _file(self, key: SnapshotKey, rank: int, exits: ExitStack) -> int:
        """Return the file of a part; the first worker that has it sends it to other hosts."""
        part = key, rank
        sender = next(worker for worker, parts in enumerate(self._part_bytes) if part in parts)
        receivers = [worker for worker, parts in enumerate(self._part_bytes) if part not in parts]
        file = self._parts.get(part)
        if file is None:
            file = anonymous_file("samestep-received")
            exits.callback(os.close, file)
        if receivers:
            _send(self._world, file, self._part_bytes[sender][part], sender, receivers)
        return file


def _load(key: SnapshotKey, files: Sequence[int]) -> Snapshot:
    contents = [content for content in map(memory_slot.read, files) if content is not None]
    if len(contents) != len(files):
        raise SnapshotError("a part of it is incomplete")
    info = contents[0].label["info"]
    parts = [content.part for content in contents]
    manifest = combine(parts, step=key.step, attempt=key.attempt, info=info, score=None)
    manifest.validate()
    state = read_state(_OPEN_FILES, manifest, first_byte=memory_slot.START)
    path = Path(f"in-memory-snapshot-of-step-{key.step}")
    return Snapshot(path, key.step, info, None, state, in_memory=True)


def _send(world: World, file: int, nbytes: int, sender: int, receivers: Sequence[int]) -> None:
    """Copy the first `nbytes` of the sender's file into the receivers' files."""
    sends, receives = world.rank == sender, world.rank in receivers
    chunk = max(CHUNK_BYTES // len(receivers), 1)
    for start in range(0, nbytes, chunk):
        size = min(chunk, nbytes - start)
        sizes = [size if sends and rank in receivers else 0 for rank in range(world.size)]
        sent = torch.empty(sum(sizes), dtype=torch.uint8)
        if sends:
            data = torch.frombuffer(bytearray(os.pread(file, size, start)), dtype=torch.uint8)
            sent.view(len(receivers), size).copy_(data)
        received_sizes = [size if rank == sender and receives else 0 for rank in range(world.size)]
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        world.all_to_all(received, received_sizes, sent, sizes, "sending an in-memory snapshot")
        if receives:
            os.pwrite(file, received.numpy().data, start)
