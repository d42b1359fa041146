"""The parts of a run in one worker, from its start to its end or failure."""

from __future__ import annotations

import logging
import os
import socket
import traceback
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.comm.connect import connect
from samestep.config import Config, is_url
from samestep.data.random_state import set_generators
from samestep.errors import ConfigError, RecordError
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import keep_freed_memory, release_freed_memory
from samestep.record import Record, open_record
from samestep.record.exporter import ExporterProcess
from samestep.record.sinks import check_sinks
from samestep.run.divergence import DivergenceCheck
from samestep.run.process import StopRequest, set_up_devices, share_gpus
from samestep.run.progress import Progress
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager
from samestep.snapshot.read import Snapshot, list_snapshots, load, step_of
from samestep.snapshot.resume import Downloads, load_from, load_newest
from samestep.step.lane_engine import LaneEngine


class Session:
    """A run in this worker: devices, world, record, snapshots and progress."""

    def __init__(self, config: Config, process: ProcessInfo) -> None:
        self._process = process
        self._exits = ExitStack()
        self.devices = set_up_devices(config, process)
        on_cuda = self.devices[0].type == "cuda"
        if not on_cuda:
            keep_freed_memory()
            self._exits.callback(release_freed_memory)
        self.world = connect(
            process, config, cuda=on_cuda, gpus_are_shared=share_gpus(self.devices, process)
        )
        try:
            self._assemble(config)
        except BaseException as error:
            self.world.status.report_failure(error)
            self.close()
            raise

    def _assemble(self, config: Config) -> None:
        world, is_main = self.world, self._process.rank == 0
        self.record = open_record(config.dir, writes=is_main)
        self._exits.callback(self.record.close)
        attempt_number = int(os.environ.get(ATTEMPT, "0"))
        # After a restart, a previous worker on another host may still hold the claim as it exits.
        if attempt_number == 0:
            self.record.claim()
        remote = () if config.remote is None else (config.remote,)
        sinks = list(dict.fromkeys((*remote, *(config.sinks or ())))) if is_main else []
        check_sinks(sinks)
        state = LauncherState.from_environment(os.environ)
        in_memory = InMemorySnapshots(state, self._process, world, config.dir, config.hot_every)
        has_begun = in_memory.has_begun(attempt_number)
        resumed = find_snapshot(config, world, self.record, in_memory, has_begun=has_begun)
        lanes = resolve_lanes(config, world.size, len(self.devices), resumed)
        self.config = replace(config, lanes=lanes)
        attempt = world.broadcast_object(uuid.uuid4().hex[:8], "starting")
        if is_main and not has_begun:
            set_later_snapshots_aside(config, resumed, attempt, self.record)
        self.lanes = LaneEngine(world, config, lanes, self.devices)
        self.snapshots = SnapshotManager(config, world, self.record, attempt, resumed, in_memory)
        self._exits.callback(self.snapshots.close)
        self.stop = StopRequest()
        # A state that exists only in memory is written at the end of the first step.
        self.stop.deferring = resumed is not None and resumed.in_memory
        self._exits.callback(self.stop.close)
        self.divergence = DivergenceCheck(config.check_every, world, self.snapshots.tracked)
        self.progress = Progress(
            config, self.record, self.snapshots, self.stop, self.lanes, self.divergence, resumed
        )
        set_generators(config.seed)
        self._record_start(attempt, resumed)
        in_memory.report_start(self.progress.step, is_new=not has_begun)
        if config.dir is not None and is_main and (sinks or config.transfer):
            exporter = ExporterProcess(config.dir, sinks, config.transfer, self.record)
            self._exits.callback(exporter.finish)
            self._exits.callback(self._write_images)  # runs before the exporter finishes

    def _record_start(self, attempt: str, resumed: Snapshot | None) -> None:
        devices = [str(device) for device in self.devices]
        host, rank = socket.gethostname(), self._process.rank
        worker = {"rank": rank, "host": host, "pid": os.getpid(), "devices": devices}
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self.config).items()
        }
        self.record.event(
            "started" if resumed is None else "resumed",
            attempt=attempt,
            step=self.progress.step,
            epoch=self.progress.epoch,
            snapshot=None if resumed is None else str(resumed.path),
            lanes=self.config.lanes,
            workers=self.world.all_gather_json(worker, "starting"),
            devices=devices,
            torch=torch.__version__,
            config=options,
        )

    def _write_images(self) -> None:
        with suppress(RecordError):  # a successful run has already raised it
            self.record.flush()

    def end(self) -> None:
        """Take the last snapshot, and report an error like any other."""
        try:
            self.progress.end_run()
        except Exception as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Report an error to the other workers, so that all exit, and to the record."""
        self.world.status.report_failure(error)
        with suppress(Exception):  # the error being reported is more important
            record = open_record(self.config.dir, writes=True)
            trace = "".join(traceback.format_exception(error))
            worker = {"host": socket.gethostname(), "rank": self._process.rank}
            step = self.progress.step
            record.event("failed", **worker, step=step, error=repr(error), traceback=trace)
            record.close()

    def close(self) -> None:
        """Leave the world and restore the state of the process."""
        self.world.close()  # first: after a failure, others wait until this worker has left
        self._exits.close()


def find_snapshot(
    config: Config, world: World, record: Record, in_memory: InMemorySnapshots, *, has_begun: bool
) -> Snapshot | None:
    """Load the snapshot that the run resumes from, the same one on all workers.

    A run that had begun before its workers were killed continues from its newest snapshot, in
    memory or on disk, whatever `resume` says.
    """

    def report_rejected(event: str, **fields: str) -> None:
        record.event(event, **fields)
        if world.rank == 0:
            logging.getLogger("samestep").warning("skipped: %s", fields["reason"])

    if has_begun or config.resume == "auto":
        # Once the run has begun, its local state is newer than any remote copy.
        downloads = None
        if not has_begun and config.remote is not None and config.dir is not None:
            downloads = Downloads(config.remote, config.dir, world)
        memory = in_memory if has_begun else None
        newest = load_newest(config.dir, world, report_rejected, memory, downloads)
        if newest is not None:
            return newest
    if config.resume in {"auto", "never"}:
        return None
    if is_url(config.resume) and config.dir is not None:
        return load_from(config.resume, config.dir, world)
    return load(Path(config.resume))


def set_later_snapshots_aside(
    config: Config, resumed: Snapshot | None, attempt: str, record: Record
) -> None:
    """Move snapshots of later steps to a separate directory if `resume` names the start.

    Otherwise the next `resume="auto"` would load the newest of them, from a different history.
    """
    if config.dir is None or config.resume == "auto":
        return
    start = -1 if resumed is None else resumed.step
    later = [path for path in list_snapshots(config.dir) if (step_of(path) or 0) > start]
    aside = config.dir / f"superseded-{attempt}"
    for path in later:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    if later:
        names = [path.name for path in later]
        record.event("snapshots_set_aside", path=str(aside), snapshots=names)


def resolve_lanes(config: Config, workers: int, devices: int, resumed: Snapshot | None) -> int:
    """Return the number of lanes: as in the snapshot, as configured, or one per device.

    Each of the `workers` has `devices` devices.
    """
    total = workers * devices
    if resumed is None:
        lanes = config.lanes or total
    else:
        lanes = int(resumed.info["lanes"])
        seed = int(resumed.info["seed"])
        pairs = ("lanes", config.lanes or lanes, lanes), ("seed", config.seed, seed)
        for name, given, saved in pairs:
            if given != saved:
                raise ConfigError(
                    f"{name} must be {saved}, as in the snapshot that the run resumes from, got "
                    f"{given}; it is fixed for a run: use {name}={saved}, or resume='never'"
                )
    if total > lanes:
        where = "" if resumed is None else " in the snapshot that the run resumes from"
        fix = "increase lanes" if resumed is None else "start fewer workers"
        raise ConfigError(
            f"lanes must be at least the number of devices ({total}), got {lanes}{where}; {fix}"
        )
    return lanes
