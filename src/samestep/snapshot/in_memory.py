"""In-memory snapshots: complete states in the launcher's memory that outlive the workers.

Any number of replacement workers can resume from them. Every worker writes its parts alternately
into its two memory slots. A snapshot that is also written to disk is written from its slot: until
all workers have done so, newer ones replace each other in the other slot. All workers communicate
between any two snapshots, so no worker starts one before all workers finished the previous one,
which is in the other slot. So after the first snapshot, one of the two slots always holds a
complete snapshot on all workers.

Replacement workers first write into the slot that they did not resume from, so that the other
snapshot stays until all of them have finished a new one. Without a launcher that holds memory, no
snapshots are made.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Final, NamedTuple

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.errors import SnapshotError
from samestep.handoff import SLOTS, LauncherState, finished_directories
from samestep.host import available_bytes
from samestep.snapshot import memory_slot
from samestep.snapshot.commit import combine
from samestep.snapshot.files import TRANSFER_BYTES
from samestep.snapshot.memory_slot import MemorySlot, SlotContent
from samestep.snapshot.part import Contribution, Part, contribution_of
from samestep.snapshot.read import READ_ERRORS, Snapshot, SnapshotSource, read_together
from samestep.snapshot.state import States

SHARE_OF_TIME: Final = 0.01  # of training, at most
SHARE_OF_MEMORY: Final = 0.5  # of the available memory
_OPEN_FILES: Final = Path("/proc/self/fd")
_runs_without_directory = count()


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """Identifies an in-memory snapshot after `step`, in slot number `slot` of all its workers.

    `order` counts those of the run: a step may be saved again, with what changed after the loop.
    """

    step: int
    order: int
    attempt: str
    workers: int
    slot: int


class Saving(NamedTuple):
    """What is saved: the state after `step` in an attempt of the run, and plain `info`.

    `started` is the `time.monotonic` at which the save began.
    """

    step: int
    attempt: str
    info: States
    started: float


class InMemorySnapshots:
    """One worker's view of a run's in-memory snapshots; without `launcher_state` there are none.

    If it `stages`, snapshots on disk are written from them. Those of GPUs are not: they are copied
    to memory that GPUs reach faster.
    """

    def __init__(
        self,
        launcher_state: LauncherState | None,
        process: ProcessInfo,
        world: World,
        directory: Path | None,
        every: str | None,
        *,
        stages: bool = True,
    ) -> None:
        self._launcher_state, self._process, self._world = launcher_state, process, world
        self.has_launcher = launcher_state is not None  # whose memory outlives this process
        self._directory = "" if directory is None else str(directory.resolve())
        self._every = None if launcher_state is None else every
        self._stages = stages
        # the label of this run's snapshots: its directory or, without one, its number in the script
        self._run = self._directory
        if not self._directory and launcher_state is not None:
            self._run = str(next(_runs_without_directory))
        self._files = [] if launcher_state is None else launcher_state.slots  # by worker, then slot
        own_files = self._files[process.local_rank] if self._files else []
        self._slots = [MemorySlot(file) for file in own_files]
        # the parts on this host, and which ones each worker has on its host
        self._contents: dict[tuple[SnapshotKey, int], SlotContent] = {}
        self._present: list[set[tuple[SnapshotKey, int]]] = []
        self._next_slot = 0  # equal on all workers
        self._order = 0  # of the last one, counted over restarts
        self._written_slot: int | None = None  # that is being written to disk
        self._saves, self._saved_step = 0, -1  # of this attempt
        self._given_up = False
        self._due_time = 0.0
        self._modules_reported = False
        self._barriers_at_save = -1  # the world's count of barriers then

    @property
    def is_enabled(self) -> bool:
        """Whether snapshots are made."""
        return self._every is not None and not self._given_up

    def has_begun(self, attempt: int) -> bool:
        """Return whether an earlier attempt began this run, on any host; collective."""
        state = self._launcher_state
        begun = False
        if attempt > 0 and state is not None:
            begun = state.step is not None and state.directory == self._directory
        # A replaced host has a new launcher, which knows nothing of the run.
        return any(self._world.all_gather_json(begun, "starting"))

    def time_is_up(self) -> bool:
        """Return whether, by this worker's clock, a save leaves 99 percent of time to training."""
        return self._every == "auto" and not self._given_up and time.monotonic() >= self._due_time

    def is_due(self, step: int, *, agreed: bool) -> bool:
        """Return whether to save after `step`; the first save is always due.

        `agreed` is whether `time_is_up` is true on all workers.
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
        # From here on, replacement workers resume whatever `resume` says, see `has_begun`.
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

    def report_finish(self) -> None:
        """Report to the launcher, and to later runs in this process, that the run has finished."""
        if self._directory:
            finished_directories.add(self._directory)
        if self._launcher_state is not None:
            self._launcher_state.report_finish()

    def give_up(self) -> None:
        """Make no more snapshots: this worker's part of them would be missing."""
        self._given_up = True

    def save(
        self, saving: Saving, shared: States, own_states: States, *, writing: bool = False
    ) -> None:
        """Copy the state, passed as to `SnapshotWriter.save`; all workers call this.

        `writing` is whether any worker may still write a snapshot to disk. Raises `SnapshotError`
        or `OSError` if the memory does not suffice.
        """
        if saving.step == self._saved_step:  # by `stage`, after the workers agreed on `writing`
            return
        # All workers agreed in the same note, so all of them free the slot at the same save.
        if not writing:
            self._written_slot = None
        rank, size = self._world.rank, self._world.size
        self._write(saving, *contribution_of(shared, own_states, rank, size))

    @property
    def can_stage(self) -> bool:
        """Whether this worker writes snapshots on disk from a slot."""
        return self._stages and self.is_enabled and bool(self._slots)

    def stage(
        self, saving: Saving, contribution: Contribution, values: Sequence[torch.Tensor]
    ) -> memoryview | None:
        """Copy a contribution, even for a snapshot on disk; return its data file, None without one.

        All workers call this, and only after they wrote the last one to disk. Raises as `save`.
        """
        if self._every is None or not self._stages:
            return None
        self._written_slot = None
        data = self._write(saving, contribution, values)
        self._written_slot = (self._next_slot + 1) % SLOTS  # the slot just written
        return data

    def _write(
        self, saving: Saving, contribution: Contribution, values: Sequence[torch.Tensor]
    ) -> memoryview | None:
        step, attempt, info, started = saving
        # Without any communication since the last save, a slow worker may still be writing its
        # slot, while a fast one would already overwrite the only complete snapshot, in the other
        # slot.
        if self._world.barriers == self._barriers_at_save:
            self._world.barrier("starting an in-memory snapshot")
        # Normally the slots alternate. While one is read for a snapshot on disk, it must not
        # change.
        number = self._next_slot
        if self._written_slot is not None:
            number = (self._written_slot + 1) % SLOTS
        self._order += 1
        key = SnapshotKey(step, self._order, attempt, self._world.size, number)
        # A worker that has given up counts as well: all workers must go on using the same slots.
        self._barriers_at_save, self._saves = self._world.barriers, self._saves + 1
        self._next_slot, self._saved_step = (number + 1) % SLOTS, step
        if self._given_up:
            return None
        if not self._slots:
            raise SnapshotError(
                "this host refuses memfd_create, usually by the seccomp profile of a container, "
                "and without it, no memory outlives workers, so after a worker is killed, the run "
                "resumes from its newest snapshot; allow the call, or use hot_every=none"
            )
        names = {"run": self._run, "key": list(astuple(key)), "rank": self._world.rank}
        before = time.monotonic()
        if any(slot.missing_bytes(contribution.file_bytes) for slot in self._slots):
            self._check_memory(contribution.file_bytes)  # else the kernel would kill a process
            for slot in self._slots:  # later ones then need not wait for memory
                slot.reserve(contribution.file_bytes)
        self._slots[number].reserve(contribution.file_bytes)
        if self._saves == SLOTS:  # the slots of earlier workers are no longer needed
            self._clear_slots(1)
        preparation_seconds = time.monotonic() - before  # long only for the first saves
        data = self._slots[number].write({**names, "info": dict(info)}, contribution, values)
        ended = time.monotonic()
        self._due_time = ended + (ended - started - preparation_seconds) / SHARE_OF_TIME
        return data

    def _clear_slots(self, first: int = 0) -> None:
        """Free this worker's slots and those of earlier workers; not its own if `first` is 1."""
        process = self._process
        # If there are fewer workers than before, each also frees the slots of workers that are
        # gone.
        for files in self._files[process.local_rank :: process.local_world_size][first:]:
            for file in files:
                os.ftruncate(file, 0)

    def _check_memory(self, nbytes: int) -> None:
        """Raise `SnapshotError` if snapshots of `nbytes` per worker need too much memory.

        This host needs the slots of its workers, and where slots do not serve for it, memory from
        which they write to disk. Replacement workers read the complete state once per host, and
        receive from other hosts what this one lacks.
        """
        here, everywhere = self._process.local_world_size, self._world.size
        wanted = here * sum(slot.missing_bytes(nbytes) for slot in self._slots)
        if self._directory and not self._stages:
            wanted += here * nbytes
        read = everywhere * nbytes
        if here < everywhere:
            read += min(TRANSFER_BYTES, (everywhere - here) * nbytes)
        available = available_bytes()
        if available is None:  # the system does not tell
            return
        if wanted > SHARE_OF_MEMORY * available or wanted + read > available:
            raise SnapshotError(
                f"in-memory snapshots must take at most half of the {available / 1e9:.1f} GB of "
                f"memory that this host has left, and leave {read / 1e9:.1f} GB for replacement "
                f"workers to read them, but they would take {wanted / 1e9:.1f} GB; use "
                "hot_every=none, or a host with more memory"
            )

    def find(self, report: Callable[..., object]) -> list[SnapshotKey]:
        """Return the snapshots with all parts on any hosts, in the order of steps; collective.

        Calls `report("in_memory_snapshot_rejected", reason=...)` for damaged parts.
        """
        faults = []
        for file in chain.from_iterable(self._files):  # also those of workers that no longer exist
            try:
                content = memory_slot.read(file)
            except SnapshotError as error:
                faults.append(str(error))
                continue
            if content is not None and content.label["run"] == self._run:  # not another run's
                part = SnapshotKey(*content.label["key"]), content.label["rank"]
                self._contents[part] = content
        own_parts = [[astuple(key), rank] for key, rank in self._contents]
        gathered = self._world.all_gather_json(
            [own_parts, faults], "looking for in-memory snapshots"
        )
        for fault in dict.fromkeys(fault for _, others in gathered for fault in others):
            report("in_memory_snapshot_rejected", reason=fault)
        self._present = [
            {(SnapshotKey(*key), rank) for key, rank in parts} for parts, _ in gathered
        ]
        # A snapshot is complete if each part is on some host: ranks may have moved.
        part_counts = Counter(key for key, _ in set().union(*self._present))
        return sorted(key for key, parts in part_counts.items() if parts == key.workers)

    def load(self, key: SnapshotKey) -> Snapshot:
        """Load a snapshot that was found; the next save uses the other slot. Collective.

        Raises `SnapshotError` if it is damaged, on all workers.
        """
        # the loaded one stays until a newer one is complete
        self._next_slot, self._order = (key.slot + 1) % SLOTS, key.order
        # collective, so not in `find`, which may fail on one worker
        described = self._describe(key)

        def find() -> SnapshotSource:
            parts = [described[rank] for rank in range(key.workers)]
            info = parts[0].label["info"]
            manifest = combine(
                [content.part for content in parts],
                step=key.step,
                attempt=key.attempt,
                info=info,
                score=None,
            )
            manifest.validate()
            files = [rank for rank in range(key.workers) if (key, rank) in self._contents]
            # The slots are read as data files: their names in /proc are the numbers of the open
            # files.
            return SnapshotSource(manifest, _OPEN_FILES, "", files, memory_slot.START)

        manifest, state, shared = read_together(self._world, find, partial(_faults_of, key))
        path = Path(f"in-memory-snapshot-of-step-{key.step}")
        return Snapshot(path, key.step, manifest.info, None, state, in_memory=True, shared=shared)

    def _describe(self, key: SnapshotKey) -> dict[int, SlotContent]:
        """Return the descriptions of all parts by rank; hosts send those that others lack."""
        local = {rank: content for (of, rank), content in self._contents.items() if of == key}
        lacking = [
            rank
            for rank in range(key.workers)
            if any((key, rank) not in present for present in self._present)
        ]
        if not lacking:
            return local
        # [missing part][worker]
        holders = [[(key, rank) in present for present in self._present] for rank in lacking]
        sent = [
            [rank, dict(local[rank].label), local[rank].part.to_bytes().decode()]
            for rank, having in zip(lacking, holders, strict=True)
            if having.index(True) == self._world.rank  # the first worker that has it
        ]
        gathered = self._world.all_gather_json(sent, "describing an in-memory snapshot")
        received = {
            rank: SlotContent(label, Part.from_bytes(part.encode()))
            for descriptions in gathered
            for rank, label, part in descriptions
        }
        return received | local


@contextmanager
def _faults_of(key: SnapshotKey) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        raise SnapshotError(
            f"the in-memory snapshot of step {key.step} cannot be used: {error}"
        ) from error
