"""The parts of a run in one worker, from its start to its end or failure."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.cluster import ProcessInfo
from samestep.comm.connect import connect, end_group
from samestep.comm.rendezvous import locate
from samestep.config import Config
from samestep.data.agreement import DataCheck
from samestep.data.generators import is_observed
from samestep.data.random_state import set_generators
from samestep.errors import RecordError, SamestepError
from samestep.guards import plugins_of
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import keep_freed_memory, release_freed_memory
from samestep.masking import mask_urls
from samestep.plugin import RunPlugin
from samestep.plugins.data_agreement import DataAgreement
from samestep.plugins.divergence import DivergenceCheck, LaneObserver
from samestep.plugins.graph_choice import LaneGraphs
from samestep.plugins.graphed_pass import graphed
from samestep.plugins.history import History
from samestep.plugins.kernels import replaced_kernels
from samestep.plugins.observer import StepObserver
from samestep.plugins.profile import Profile
from samestep.plugins.progress_line import open_line
from samestep.plugins.random_positions import RandomPositions
from samestep.plugins.replay import Replay, Request
from samestep.plugins.restored import RestoredCheck
from samestep.plugins.values import StepValues
from samestep.record import FileRecord, Record, open_record
from samestep.record.exporter import ExporterProcess
from samestep.record.files import DirectoryLock
from samestep.record.sinks import SinkSpec, check_sinks, sinks_of
from samestep.run.alerts import LossAlerts
from samestep.run.environment import (
    CommitQuery,
    ProgramFiles,
    compare_environments,
    description_of,
    environment_of_results,
    inputs_of_program,
    warn_of_workers,
)
from samestep.run.process import StopRequest, SystemSampler, announce, gpu_names, set_up_devices
from samestep.run.progress import Progress
from samestep.run.start import SharedDirectory, Start, read_exclusion
from samestep.run.step_times import StepTimes
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager, Tracked
from samestep.snapshot.read import Snapshot
from samestep.step.lane_engine import LaneEngine


class Session:
    """A run in this worker: devices, world, record, snapshots and progress."""

    def __init__(self, config: Config, process: ProcessInfo, settings: Mapping[str, Any]) -> None:
        # Devices depend on the local rank, which `locate` finds if no launcher has told it.
        self._process = process = locate(process, config.timeout)
        self._settings = settings
        source = config  # of the snapshot
        self.config = config = config.without_writing() if config.read_only else config
        request = Request.from_environment()
        # of `samestep replay`
        self.replay = None if request is None else Replay(request, process.rank)
        self._exits = ExitStack()
        self._samplers = ExitStack()  # stopped before the end of the run is recorded
        self._exporter: ExporterProcess | None = None
        is_first = process.rank == 0 and os.environ.get(ATTEMPT, "0") == "0"
        # Git runs while this worker starts; only the first attempt of a run records the commit.
        self._commit = CommitQuery() if config.dir is not None and is_first else None
        self._exits.callback(lambda: self._commit and self._commit.result)  # git must exit
        # Before the world, which takes NCCL if all workers have GPUs of their own.
        self.devices = set_up_devices(config, process)
        on_cuda = self.devices[0].type == "cuda"
        if on_cuda and config.deterministic:
            self._exits.enter_context(replaced_kernels())
        if not on_cuda:
            keep_freed_memory()
            self._exits.callback(release_freed_memory)
        try:
            # Blocks until all workers are there, or `timeout` has passed.
            gpus = gpu_names(self.devices)
            self.world = connect(process, config, gpus=gpus, on_stall=self._report_stall)
        except BaseException:
            self._exits.close()
            raise
        self.record = Record()  # until the directory is this run's
        try:
            self._check_exchange()
            self._assemble(source)
        except BaseException as error:
            # The other workers are connected and wait for this one, so they must learn of it.
            self.world.abandon()
            self.world.status.report_failure(error)
            with suppress(Exception):  # the error being reported is more important
                self.record.event("failed", **failure_of(error, process.rank))
            self.close()
            raise

    def _assemble(self, source: Config) -> None:
        # All workers run this in the same order: many of these calls are collective.
        config, world, is_main = self.config, self.world, self._process.rank == 0
        lock, self.directory, self.record = self._claim_directory()
        sinks = sinks_of(config) if is_main else []
        check_sinks(sinks)  # a wrong address ends the run now, not hours later
        state, on_cpu = LauncherState.from_environment(os.environ), self.devices[0].type == "cpu"
        in_memory = InMemorySnapshots(
            state, self._process, world, config.dir, config.hot_every, stages=on_cpu
        )
        begun = in_memory.has_begun(int(os.environ.get(ATTEMPT, "0")))
        has_begun = begun and not config.read_only
        self.start = Start(
            source,
            world,
            self.record,
            self._describe_run,
            self._exits.callback,
            has_begun=has_begun,
        )
        # Before the lane engine, because a resumed run has the lanes of its snapshot. The state
        # waits in memory until the script tracks the objects that it belongs to.
        resumed = self.start.find_snapshot(in_memory)
        config = self.start.config_of_run(resumed, len(self.devices))
        self._exclusion, self.config = read_exclusion(config, resumed, world)
        config = self.config
        # in the names of data files, so that no start overwrites those of another one
        attempt = world.broadcast_json(uuid.uuid4().hex[:8], "starting")
        # Only a start by the user can begin another history. Replacement workers continue this one.
        if is_main and not has_begun:
            self.start.set_others_aside(resumed, attempt)
        modules: list[torch.nn.Module] = []  # replicated
        self._history = self._make_history(resumed)
        self.lanes = self._make_lanes(modules)
        workers = self._gather_workers()
        environment = workers[0]["environment"]
        if resumed is not None:
            self._compare_environment(environment, resumed)
        self.progress = self._make_progress(attempt, environment, resumed, in_memory, modules, lock)
        # What the script draws before its first loop, such as parameters, is then the same on all
        # workers, and does not depend on what was drawn while the run started.
        set_generators(config.seed)
        self._record_start(attempt, resumed, workers)
        if is_main and not is_observed():
            announce(self.start.describe(config, resumed))
        # From here on, replacement workers resume. Those of a worker that is killed earlier start
        # as this one did.
        in_memory.report_start(self.progress.step, is_new=not has_begun)
        if config.dir is not None:
            self._follow(config.dir, sinks, workers)

    def _claim_directory(self) -> tuple[DirectoryLock | None, SharedDirectory, Record]:
        """Return the lock of `dir`, on rank 0, and the directory and the record in it."""
        config, is_main, lock = self.config, self._process.rank == 0, None
        if config.dir is not None and is_main:
            # First, so that no other run writes to the directory from here on. `self._exits` runs
            # in reverse order, so the lock is released after everything that writes there.
            state = LauncherState.from_environment(os.environ)
            lock = DirectoryLock(config.dir, state, config.timeout)
            self._exits.callback(lock.close)
        directory = SharedDirectory(config, self.world)
        record = open_record(config.dir, writes=is_main)
        self._exits.callback(record.close)
        return lock, directory, record

    def _compare_environment(self, environment: Mapping[str, str], resumed: Snapshot) -> None:
        """Say, and record, what differs from the environment in which the run was saved."""
        config, is_main = self.config, self._process.rank == 0
        before: Mapping[str, str] = resumed.info.get("environment", {})
        if not config.read_only:
            self._files.expect(before)
        now = {**({} if config.read_only else self._files.digests()), **environment}
        lines = compare_environments(
            before, now, resumed.step, is_main=is_main, is_strict=config.resume_strict
        )
        if lines:
            self.record.event("environment_changed", step=resumed.step, differences=lines)

    def _make_progress(
        self,
        attempt: str,
        environment: Mapping[str, str],
        resumed: Snapshot | None,
        in_memory: InMemorySnapshots,
        modules: list[torch.nn.Module],
        lock: DirectoryLock | None,
    ) -> Progress:
        """Return what counts steps, with the snapshots, checks and signals that it acts on."""
        config, world = self.config, self.world
        # `samestep verify` compares snapshots itself
        tracked = Tracked(resumed, read_only=config.read_only)
        intervals = (None, None) if is_observed() else (config.check_every, config.recheck_every)
        blames = config.recheck_every is not None
        self.divergence = DivergenceCheck(intervals, world, tracked, modules, blames=blames)
        self.snapshots = SnapshotManager(
            config,
            world,
            self.record,
            attempt,
            lambda: {**environment, **self._files.digests()},
            resumed,
            in_memory,
            tracked=tracked,
            owner=self.start.owner,
            remote_owner=self.start.remote_owner,
            writes=self.replay is None or self.replay.request.saves_state,
            check_models=self.lanes.check_models,
            compare=None if is_observed() else self.divergence.compare,
        )
        self._exits.callback(self.snapshots.close)
        # Signals ended the process at once until now, since there was no state to save.
        # A state that exists only in memory is written at the end of the first step.
        self.stop = StopRequest(deferring=resumed is not None and resumed.in_memory)
        self._exits.callback(self.stop.close)
        self.data_check = DataCheck(config.seed, world.rank, world.size, world.all_gather_json)
        line = None
        if config.progress:
            line = open_line(self._process, config.stop_after, self._exits.callback)
        own = (line, self._history)
        plugins: list[RunPlugin] = [plugin for plugin in own if plugin is not None]
        if world.size > 1:
            agreement = DataAgreement(self.data_check)
            plugins[:0] = [agreement, self.divergence, RandomPositions(self.devices)]
        self.restored = None
        if resumed is not None and not config.read_only and not is_observed():
            self.restored = RestoredCheck(resumed.step, self._say)
            plugins.append(self.restored)
        if is_observed():
            plugins.append(
                StepObserver(
                    world.rank, config.dir, lambda: self.progress.snapshot(None, now=False)
                )
            )
        if config.profiled_steps is not None and config.dir is not None and not is_observed():
            profile = Profile(
                config.profiled_steps,
                config.dir,
                world.rank,
                self.record,
                partial(self._say, level=logging.INFO),
                on_cuda=self.devices[0].type == "cuda",
            )
            self._samplers.callback(profile.end)
            self._exits.callback(profile.close)
            plugins.append(profile)
        return Progress(
            config,
            self.record,
            self.snapshots,
            self.stop,
            self.lanes,
            StepTimes(
                self.record,
                self.snapshots,
                self.lanes,
                *([] if line is None else [line.evaluating]),
            ),
            plugins,
            alerts=LossAlerts(
                self.record, config, self.snapshots.keep_newest, is_main=world.rank == 0
            ),
            resumed=resumed,
            exclusion=self._exclusion,
            lock=lock,
            on_end=self._samplers.close,
        )

    def _make_history(self, resumed: Snapshot | None) -> History | None:
        """Return what writes the chain, on the worker that has a record of steps that count."""
        record, config = self.record, self.config
        if not isinstance(record, FileRecord) or is_observed():
            return None
        begin = partial(record.begin_chain, config.seed)
        state = {} if resumed is None else resumed.state["run"]
        history = History(config, begin, self._files.digests, state)
        hook = register_optimizer_step_pre_hook(history.before_update)
        self._exits.callback(hook.remove)
        return history

    def _make_lanes(self, modules: list[torch.nn.Module]) -> LaneEngine:
        """Return the engine, which checks every step of an optimizer until the run ends."""
        graphs = None
        if self.replay is None:  # which looks into each lane
            graphs = LaneGraphs.of(self.config, self.devices[0], self._say)
        pass_of = None if graphs is None else partial(graphed, graphs)
        lanes = self.config.lanes or 1
        engine = LaneEngine(self.world, self.config, lanes, self.devices, pass_of)
        plugins = plugins_of(engine)
        if is_observed():  # `samestep verify` looks for changes by lanes
            plugins.insert(0, LaneObserver(self.world.rank, modules))
        elif self.replay is not None:
            values = [StepValues(self.replay.request)] * self.replay.request.keeps_values
            plugins[:0] = [self.replay, *values]
        engine.use(plugins if self._history is None else [*plugins, self._history])
        self._exits.callback(engine.close)
        if graphs is not None:
            self._exits.callback(graphs.close)
        # of all optimizers, tracked or not
        hook = register_optimizer_step_pre_hook(engine.optimizers.before_step)
        self._exits.callback(hook.remove)
        return engine

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if self._process.rank == 0:
            announce(text, level)

    def _follow(
        self, directory: Path, sinks: Sequence[SinkSpec], workers: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send the record to sinks, and add samples of hosts to it, until the run ends."""
        config, process = self.config, self._process
        if sinks:
            self._exporter = ExporterProcess(directory, sinks, self.record)
            self._exits.callback(self._exporter.finish)
            self._exits.callback(self._write_images)  # runs before the exporter finishes
        # One worker per host samples it; the one of rank 0 writes all samples to the record.
        if process.local_rank == 0 and config.system_every is not None:
            hosts = {
                worker["rank"]: worker["host"] for worker in workers if worker["local_rank"] == 0
            }
            status, seconds = self.world.status, config.system_every
            sampler = SystemSampler(seconds, hosts, status, self.record)
            self._samplers.callback(sampler.stop)
            self._exits.callback(sampler.close)

    def _gather_workers(self) -> list[dict[str, Any]]:
        """Return a description of each worker by rank; warn if their results may differ."""
        worker: dict[str, Any] = {
            "rank": self._process.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "local_rank": self._process.local_rank,
            "devices": [str(device) for device in self.devices],
            "environment": environment_of_results(self.config, self.devices),
        }
        if not self.config.read_only:  # an evaluation is another program
            worker["environment"] |= self._program
        workers = self.world.all_gather_json(worker, "starting")
        if self._process.rank == 0:
            warn_of_workers(workers)
        return workers

    @cached_property
    def _files(self) -> ProgramFiles:
        return ProgramFiles()

    @cached_property
    def _program(self) -> dict[str, str]:
        """The files and inputs of the program at its start."""
        program = self._files.digests()
        if self._process.rank == 0:  # some launchers pass ranks in arguments
            program |= inputs_of_program(self._settings)
        return program

    def _describe_run(self) -> dict[str, str]:
        """Describe the program, and what a snapshot of it must agree with."""
        config = self.config
        return self._program | {"seed": str(config.seed), "lanes": str(config.lanes)}

    def _check_exchange(self) -> None:
        """Tell the launcher about NCCL, whose errors end processes; warn of a slow exchange."""
        state = LauncherState.from_environment(os.environ)
        if state is not None and self.world.backend == "NCCL":
            state.report_nccl()
        if self.world.backend == "host memory" and self._process.rank == 0:
            logging.getLogger("samestep").warning(
                "workers share GPUs, so gradients are exchanged through host memory, which is slow,"
                " because NCCL refuses two workers on one GPU; start one worker per GPU"
            )

    def _record_start(
        self, attempt: str, resumed: Snapshot | None, workers: Sequence[Mapping[str, Any]]
    ) -> None:
        self.record.event(
            "started" if resumed is None else "resumed",
            attempt=attempt,
            step=self.progress.step,
            epoch=self.progress.epoch,
            snapshot=None if resumed is None else str(resumed.path),
            continues=self.start.last_own_step(resumed) >= 0,
            **({} if self.start.owner is None else {"run": self.start.owner.id}),
            exchange=self.world.backend,
            **description_of(self.config, self._settings, workers),
            **(self._commit.result if self._commit else {}),
        )

    def _write_images(self) -> None:
        with suppress(RecordError):  # a successful run has already raised it
            self.record.flush()

    def end(self) -> None:
        """Take the last snapshot, and report an error like any other."""
        try:
            self.lanes.check_late()
            self.progress.end_run()
            if unused := self.progress.loops.exclusion.unused:
                self._say(f"exclude names loops that the script has not: {', '.join(unused)}")
        except Exception as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Report an error to the other workers, so that all exit, and to the record."""
        self.world.abandon()
        self.world.status.report_failure(error)
        # The other workers first: they wait for this one.
        with suppress(Exception):  # the error being reported is more important
            self._add_to_record("failed", **failure_of(error, self._process.rank))

    def _report_stall(self, text: str | None) -> None:
        """Print that workers wait for another one, and record it, or its end. From a thread."""
        if text is None:
            self._add_to_record("recovered")
            return
        announce(text, logging.WARNING)
        self._add_to_record("stalled", reason=text.removeprefix("stalled: "))

    def _add_to_record(self, event: str, **fields: Any) -> None:
        """Record an event of any worker and thread, although only rank 0 has the record open."""
        with suppress(Exception):  # the disk is full, or the run still starts
            record = open_record(self.config.dir, writes=True)
            record.event(event, step=self.progress.step, **fields)
            record.close()

    def call_at_close(self, fn: Callable[[], None]) -> None:
        """Call `fn` when this worker has left the run."""
        self._exits.callback(fn)

    def close(self) -> None:
        """Leave the world and restore the state of the process."""
        try:
            self.world.close()  # first: after a failure, others wait until this worker has left
        finally:
            self._exits.close()
            end_group(self.world)
        # an error that ends the run matters more; a stop is none
        if self._exporter is not None and not isinstance(sys.exc_info()[1], Exception):
            self._exporter.raise_if_failed()


def failure_of(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the fields of an event `failed` about a worker's error."""
    text = mask_urls(f"{type(error).__name__}: {error}").removesuffix(": ")
    return {
        "host": socket.gethostname(),
        "rank": rank,
        "error": text,
        "is_secondary": isinstance(error, SamestepError) and error.is_secondary,
        "traceback": mask_urls("".join(traceback.format_exception(error))),
    }
