"""What a run is made of: put together when it starts, taken apart when it ends, and told to the others when it fails."""

from __future__ import annotations

import os
import socket
import traceback
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.connect import connect
from samestep.config import Config
from samestep.data.random_state import set_generators
from samestep.errors import RecordError
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import keep_freed_memory, release_freed_memory
from samestep.record import open_record
from samestep.record.exporter import ExporterProcess
from samestep.record.sinks.base import check_sinks
from samestep.run.divergence import DivergenceCheck
from samestep.run.progress import Progress
from samestep.run.start import agree_on_lanes, find_snapshot, set_aside, set_up_devices, share_gpus
from samestep.run.stop import StopRequest
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager
from samestep.snapshot.read import Snapshot
from samestep.step.lane_engine import LaneEngine


class Session:
    """The parts of a run in this worker, from its start to its end; `resumed_streams` are states by name and lane that nobody took yet."""

    def __init__(self, config: Config, place: ProcessInfo) -> None:
        self._place = place
        self._exits = ExitStack()
        self.devices = set_up_devices(config, place)
        if self.devices[0].type == "cpu":
            keep_freed_memory()
            self._exits.callback(release_freed_memory)
        self.world = connect(
            place,
            config,
            cuda=self.devices[0].type == "cuda",
            gpus_are_shared=share_gpus(self.devices, place),
        )
        try:
            self._assemble(config)
        except BaseException as error:
            self.world.status.report_failure(error)
            self.close()
            raise

    def _assemble(self, config: Config) -> None:
        world, place = self.world, self._place
        self.record = open_record(config.dir, writes=place.rank == 0)
        self._exits.callback(self.record.close)
        attempt_number = int(os.environ.get(ATTEMPT, "0"))
        # later, what holds it is a worker before, which another host may still be ending
        if attempt_number == 0:
            self.record.claim()
        sinks = _sinks(config) if place.rank == 0 else []
        check_sinks(sinks)
        hot = InMemorySnapshots(
            LauncherState.from_environment(os.environ), place, world, config.dir, config.hot_every
        )
        begun = hot.has_begun(attempt_number)
        resumed = find_snapshot(config, world, self.record, hot, begun=begun)
        lanes = agree_on_lanes(config, place.world_size, len(self.devices), resumed)
        self.config = replace(config, lanes=lanes)
        attempt = world.broadcast_object(uuid.uuid4().hex[:8], "starting")
        if place.rank == 0 and not begun:
            set_aside(config, resumed, attempt, self.record)
        self.lanes = LaneEngine(world, config, lanes, self.devices)
        self.keeper = SnapshotManager(config, world, self.record, attempt, resumed, hot)
        self._exits.callback(self.keeper.close)
        self.stop = StopRequest()
        # what is in memory alone is kept at the end of a step
        self.stop.deferring = resumed is not None and resumed.in_memory
        self._exits.callback(self.stop.close)
        self.divergence = DivergenceCheck(config.check_every, world, self.keeper.tracked)
        self.progress = Progress(
            config, self.record, self.keeper, self.stop, self.lanes, self.divergence, resumed
        )
        self.resumed_streams: dict[str, dict[int, Any]] = (
            {} if resumed is None else resumed.state.get("streams", {})
        )
        set_generators(config.seed)
        self._tell_start(attempt, resumed)
        hot.report_start(self.progress.step, is_new=not begun)
        if config.dir is not None and place.rank == 0 and (sinks or config.transfer):
            self._exits.callback(
                ExporterProcess(config.dir, sinks, config.transfer, self.record).finish
            )
            self._exits.callback(self._write_images)  # before it is told to send the last

    def _tell_start(self, attempt: str, resumed: Snapshot | None) -> None:
        devices = [str(device) for device in self.devices]
        worker = {
            "rank": self._place.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "devices": devices,
        }
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
        with suppress(RecordError):  # where the run ends well, it was told before
            self.record.flush()

    def end(self) -> None:
        """Keep the last step; what fails then is told like any other failure."""
        try:
            self.progress.end_run()
        except Exception as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Tell the other workers, so that all end, and the record."""
        self.world.status.report_failure(error)
        with suppress(Exception):  # the error that is on its way matters more than its record
            record = open_record(self.config.dir, writes=True)
            trace = "".join(traceback.format_exception(error))
            host, rank, step = socket.gethostname(), self._place.rank, self.progress.step
            record.event(
                "failed", host=host, rank=rank, step=step, error=repr(error), traceback=trace
            )
            record.close()

    def close(self) -> None:
        """Leave the world and put the process back as it was."""
        self.world.close()  # first: after a failure, others wait for this worker until it has left
        self._exits.close()


def _sinks(config: Config) -> list[str]:
    """Return where the record goes besides the run's directory, each place once."""
    return list(dict.fromkeys([*([config.remote] if config.remote else []), *(config.sinks or ())]))
