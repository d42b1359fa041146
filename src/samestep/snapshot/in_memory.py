"""Copies of the whole state in the launcher's memory, from which the successors of killed workers continue.

Every worker puts its part of each copy into one of its two slots, and that of the next into the
other. At any moment one of the two holds a whole copy on all workers, once there was one: copies
are made at a step's boundary, all workers meet between any two of them, and so nobody begins a copy
before everybody has finished the one before, which lies in the other slot. Successors, be they more
or fewer, write first into the slot that they did not continue from: what they continued from stays
until all of them have finished a copy. A launcher that keeps nothing has no copies made.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.errors import SnapshotError
from samestep.handoff import SLOTS, LauncherState
from samestep.host import anonymous_file, available_bytes
from samestep.snapshot import memory_slot as slot
from samestep.snapshot.commit import combined
from samestep.snapshot.memory_slot import MemorySlot
from samestep.snapshot.part import Contribution, contribution
from samestep.snapshot.read import Snapshot, read_state

PASSED_BYTES: Final = 2**24  # at a time, from host to host
SHARE_OF_TIME: Final = 0.01
SHARE_OF_MEMORY: Final = 0.5  # of what is left
_OPEN_FILES: Final = Path("/proc/self/fd")
_runs_without_directory = count()


@dataclass(frozen=True, order=True)
class Copy:
    """A copy by `workers` workers of their state after `step`; `slot` is which of their two slots it is in."""

    step: int
    attempt: str
    workers: int
    slot: int


class InMemorySnapshots:
    """Makes and finds copies of a run's state, as one of its workers; without anything `kept` there are none."""

    def __init__(
        self,
        kept: LauncherState | None,
        place: ProcessInfo,
        world: World,
        directory: Path | None,
        every: str | None,
    ) -> None:
        self._kept, self._place, self._world = kept, place, world
        self._directory = "" if directory is None else str(directory.resolve())
        self._every = None if kept is None else every
        # Another run of the same script has other copies: those of its directory or, where it has
        # none, of its number.
        self._run = (
            self._directory
            if self._directory or kept is None
            else str(next(_runs_without_directory))
        )
        self._slots = [] if kept is None else kept.slots
        self._own = (
            [MemorySlot(file) for file in self._slots[place.local_rank]] if self._slots else []
        )
        # parts that this host holds, by copy and rank
        self._files: dict[tuple[Copy, int], int] = {}
        # the bytes of those that each worker's host holds
        self._seen: list[dict[tuple[Copy, int], int]] = []
        self._first_slot = 0
        self._copies = 0
        self._given_up = False
        self._due_time = 0.0
        self._told_modules = False
        self._meetings = -1

    def has_begun(self, attempt: int) -> bool:
        """Tell whether this is a later attempt at a run that an earlier one began, on any host; collective."""
        begun = (
            attempt > 0
            and self._kept is not None
            and self._kept.step is not None
            and self._kept.directory == self._directory
        )
        return any(self._world.all_gather_json(begun, "starting"))

    def time_is_up(self) -> bool:
        """Tell whether, on this worker's clock, another copy would still leave 99 percent of the time to training."""
        return self._every == "auto" and not self._given_up and time.monotonic() >= self._due_time

    def is_due(self, step: int, *, agreed: bool) -> bool:
        """Tell whether a copy is made after `step`: the first one is at once; `agreed` is what rank 0's clock said."""
        if self._every is None:
            return False
        return self._copies == 0 or (
            agreed if self._every == "auto" else step % int(self._every) == 0
        )

    def begin(self, step: int, *, anew: bool) -> None:
        """Tell the launcher that the run goes on after `step`. Copies of another history, where it began `anew`, are given up."""
        for pair in (
            self._slots[self._place.local_rank :: self._place.local_world_size] if anew else ()
        ):
            _empty(pair)
        if self._kept is not None and self._place.local_rank == 0:
            self._kept.report_start(self._directory, step)
        # one worker of a host says, once, that there is no memory
        if not self._own and not (anew and self._place.local_rank == 0):
            self.give_up()

    def report_step(self, step: int) -> None:
        """Tell the launcher how many steps are done and, after the first, what had to be imported for it."""
        if self._kept is None or self._place.local_rank > 0:
            return
        self._kept.report_step(step)
        if not self._told_modules:
            self._told_modules = True
            self._kept.report_modules()

    def give_up(self) -> None:
        """Have no more copies made: this worker's part of them would be missing."""
        self._given_up = True

    def save(
        self,
        step: int,
        attempt: str,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        info: Mapping[str, Any],
        started: float,
    ) -> None:
        """Copy the state, given as to `SnapshotWriter.save`; `started` is when that began, by `time.monotonic`. All workers call it.

        Raises `SnapshotError` or `OSError` where it cannot be held.
        """
        if self._world.barriers == self._meetings:
            self._world.barrier("starting a hot copy")
        copy = Copy(step, attempt, self._world.size, (self._first_slot + self._copies) % SLOTS)
        self._meetings, self._copies = self._world.barriers, self._copies + 1
        if self._given_up:
            return
        if not self._own:
            raise SnapshotError(
                "this host refuses memfd_create, in a container mostly by its seccomp profile, and nothing else holds memory that outlives "
                "workers: when one is killed, the run goes on from its newest snapshot; allow the call, or use hot_every=none"
            )
        mine, values = contribution(shared, own, self._world.rank, self._world.size)
        label = {
            "run": self._run,
            "copy": list(astuple(copy)),
            "rank": self._world.rank,
            "info": dict(info),
        }
        before = time.monotonic()
        self._prepare(copy.slot, mine)
        spent_once = time.monotonic() - before
        self._own[copy.slot].write(label, mine, values)
        ended = time.monotonic()
        self._due_time = ended + (ended - started - spent_once) / SHARE_OF_TIME

    def _prepare(self, number: int, mine: Contribution) -> None:
        """Make memory ready for a part; once there is a copy by these workers, give back what only others had."""
        nbytes = sum(piece.nbytes for piece in mine.pieces)
        if self._copies == 1:
            self._check_room(nbytes)
        self._own[number].reserve(nbytes)
        for pair in (
            self._slots[self._place.local_rank :: self._place.local_world_size][1:]
            if self._copies == SLOTS
            else ()
        ):
            _empty(pair)

    def _check_room(self, nbytes: int) -> None:
        """Raise `SnapshotError` where copies, of which a worker has about so many bytes, would take memory that others need."""
        wanted = self._place.local_world_size * sum(
            slot.missing_bytes(nbytes) for slot in self._own
        )
        there = available_bytes()
        if there is not None and wanted > SHARE_OF_MEMORY * there:
            raise SnapshotError(
                f"copies of the state would take {wanted / 1e9:.1f} GB of the {there / 1e9:.1f} GB of memory that this host has left; "
                "expected no more than half: use hot_every=none, or a host with more memory"
            )

    def find(self, report: Callable[..., object]) -> list[Copy]:
        """Return the copies of this run of which every part is held on some host, in order of steps; collective.

        What is damaged is told by `report("hot_copy_rejected", reason=...)`.
        """
        sizes, faults = {}, []
        for file in (file for pair in self._slots for file in pair):
            try:
                held = slot.read(file)
            except SnapshotError as error:
                faults.append(str(error))
                continue
            if held is not None and held.label["run"] == self._run:
                key = Copy(*held.label["copy"]), held.label["rank"]
                self._files[key], sizes[key] = file, held.nbytes
        mine = [[astuple(copy), rank, nbytes] for (copy, rank), nbytes in sizes.items()]
        told = self._world.all_gather_json([mine, faults], "looking for hot copies")
        for fault in dict.fromkeys(fault for _, others in told for fault in others):
            report("hot_copy_rejected", reason=fault)
        self._seen = [
            {(Copy(*copy), rank): nbytes for copy, rank, nbytes in parts} for parts, _ in told
        ]
        found = Counter(copy for copy, _ in set().union(*self._seen))
        return sorted(copy for copy, parts in found.items() if parts == copy.workers)

    def load(self, copy: Copy) -> Snapshot:
        """Load a copy that was found; the next one will not be made in its place. Collective. Raises `SnapshotError` if it is damaged."""
        self._first_slot = (copy.slot + 1) % SLOTS
        with ExitStack() as exits:
            files = [self._file(copy, rank, exits) for rank in range(copy.workers)]
            try:
                return _assembled(copy, files)
            except (
                LookupError,
                OSError,
                RuntimeError,
                SnapshotError,
                TypeError,
                ValueError,
            ) as error:
                raise SnapshotError(
                    f"the hot copy of step {copy.step} cannot be used: {error}"
                ) from error

    def _file(self, copy: Copy, rank: int, exits: ExitStack) -> int:
        """Return the file that holds a part of a copy; the first worker that has it passes it on to those on other hosts."""
        key = copy, rank
        sender = next(worker for worker, parts in enumerate(self._seen) if key in parts)
        receivers = [worker for worker, parts in enumerate(self._seen) if key not in parts]
        file = self._files.get(key)
        if file is None:
            file = anonymous_file("samestep-passed")
            exits.callback(os.close, file)
        if receivers:
            _pass_on(self._world, file, self._seen[sender][key], sender, receivers)
        return file


def _assembled(copy: Copy, files: Sequence[int]) -> Snapshot:
    held = [there for there in map(slot.read, files) if there is not None]
    if len(held) != len(files):
        raise SnapshotError("a part of it is not whole")
    info = held[0].label["info"]
    manifest = combined(
        [there.part for there in held], step=copy.step, attempt=copy.attempt, info=info, score=None
    )
    manifest.validate()
    state = read_state(_OPEN_FILES, manifest, first_byte=slot.START)
    return Snapshot(Path(f"hot-copy-of-step-{copy.step}"), copy.step, info, None, state, hot=True)


def _pass_on(world: World, file: int, nbytes: int, sender: int, receivers: Sequence[int]) -> None:
    """Put the first `nbytes` of the sender's file into the receivers' files."""
    receives = world.rank in receivers
    at_once = max(PASSED_BYTES // len(receivers), 1)
    for start in range(0, nbytes, at_once):
        size = min(at_once, nbytes - start)
        sizes = (
            [size if rank in receivers else 0 for rank in range(world.size)]
            if world.rank == sender
            else [0] * world.size
        )
        sent = torch.empty(sum(sizes), dtype=torch.uint8)
        if world.rank == sender:
            sent.view(len(receivers), size).copy_(
                torch.frombuffer(bytearray(os.pread(file, size, start)), dtype=torch.uint8)
            )
        arriving = [size if rank == sender and receives else 0 for rank in range(world.size)]
        arrived = torch.empty(sum(arriving), dtype=torch.uint8)
        world.all_to_all(arrived, arriving, sent, sizes, "passing on a hot copy")
        if receives:
            os.pwrite(file, arrived.numpy().data, start)


def _empty(files: Sequence[int]) -> None:
    """Give back the memory of slots."""
    for file in files:
        os.ftruncate(file, 0)
