"""The parts of a run in one worker, from its start to its end or failure."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.comm.connect import connect, end_group
from samestep.comm.rendezvous import locate
from samestep.config import Config, is_url
from samestep.data.agreement import DataCheck
from samestep.data.generators import is_observed
from samestep.data.random_state import set_generators
from samestep.errors import ConfigError, RecordError, SamestepError, SnapshotError
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import keep_freed_memory, release_freed_memory
from samestep.masking import mask, mask_urls, mask_words
from samestep.record import Record, open_record
from samestep.record.events import FORMAT, samestep_version
from samestep.record.exporter import ExporterProcess
from samestep.record.files import DirectoryLock, is_locked_by, locked_by
from samestep.record.sinks import SinkSpec, check_sinks, sinks_of
from samestep.run.alerts import LossAlerts
from samestep.run.divergence import DivergenceCheck, LaneObserver
from samestep.run.process import (
    HASH_SEED,
    CommitQuery,
    StopRequest,
    SystemSampler,
    announce,
    differences,
    digests_of_program,
    environment_of_results,
    gpu_names,
    inputs_of_program,
    set_up_devices,
)
from samestep.run.progress import Progress
from samestep.run.progress_line import open_line
from samestep.run.replay import Replay, Request
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manager import SnapshotManager, Tracked
from samestep.snapshot.owner import START_SECONDS, Owner, store
from samestep.snapshot.read import Snapshot, list_snapshots, load_together, step_of
from samestep.snapshot.resume import (
    Downloads,
    find_owner,
    last_own_step,
    load_best,
    load_from,
    load_newest,
)
from samestep.step.deterministic import replaced_kernels
from samestep.step.graph_choice import LaneGraphs
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import unobserved

KEEP_SEED: Final = "to keep it, start with PYTHONHASHSEED={} (samestep run sets it to 0)"


class Session:
    """A run in this worker: devices, world, record, snapshots and progress."""

    def __init__(self, config: Config, process: ProcessInfo, settings: Mapping[str, Any]) -> None:
        # Devices depend on the local rank, which `locate` finds if no launcher has told it.
        self._process = process = locate(process, config.timeout)
        self._settings = settings
        self._source = config  # of the snapshot
        self.config = config = config.without_writing() if config.read_only else config
        # what worker 0 wrote to the directory, until all hosts have seen it
        self._lock: str | None = None
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
            self._assemble(config)
        except BaseException as error:
            # The other workers are connected and wait for this one, so they must learn of it.
            self.world.abandon()
            self.world.status.report_failure(error)
            with suppress(Exception):  # the error being reported is more important
                self._add_failure(self.record, error)
            self.close()
            raise

    def _assemble(self, config: Config) -> None:
        # All workers run this in the same order: many of these calls are collective.
        world, is_main = self.world, self._process.rank == 0
        state, lock = LauncherState.from_environment(os.environ), None
        if config.dir is not None and is_main:
            # First, so that no other run writes to the directory from here on. `self._exits` runs
            # in reverse order, so the lock is released after everything that writes there.
            lock = DirectoryLock(config.dir, state, config.timeout)
            self._exits.callback(lock.close)
        self._check_directory()
        self.record = open_record(config.dir, writes=is_main)
        self._exits.callback(self.record.close)
        attempt_number = int(os.environ.get(ATTEMPT, "0"))
        sinks = sinks_of(config) if is_main else []
        check_sinks(sinks)  # a wrong address ends the run now, not hours later
        in_memory = InMemorySnapshots(
            state,
            self._process,
            world,
            config.dir,
            config.hot_every,
            stages=self.devices[0].type == "cpu",
        )
        has_begun = in_memory.has_begun(attempt_number) and not config.read_only
        self._owner, self._remote_owner = find_owner(
            config, world, self._describe_run, has_begun=has_begun
        )
        if self._remote_owner is not None:
            self._exits.callback(self._remote_owner.close)
        # Before the lane engine, because a resumed run has the lanes of its snapshot. The state
        # waits in memory until the script tracks the objects that it belongs to.
        if config.read_only:
            resumed = find_snapshot_of_others(self._source, world, self.record, in_memory)
        else:
            # a remote that has just failed is asked once more, without retries
            responds = self._remote_owner is None or self._remote_owner.responds
            resumed = find_snapshot(
                *(config, world, self.record, in_memory, self._owner),
                has_begun=has_begun,
                listing_seconds=START_SECONDS if responds else 0.0,
            )
        if self._owner is not None and resumed is not None:
            self._owner = self._note_origin(self._owner, resumed)
        self._has_resumed = resumed is not None
        named = step_of(Path(config.resume)) if config.resume != "auto" else None
        if resumed is not None and (
            resumed.step == named or (config.resume != "auto" and not has_begun)
        ):
            # Whoever names a snapshot wants to train on, even if the run had finished.
            resumed.state["run"].update(finished=False, ended=False)
        config = with_skipped_batches(config, resumed)
        lanes = resolve_lanes(config, world.size, len(self.devices), resumed)
        self.config = replace(config, lanes=lanes)
        # in the names of data files, so that no start overwrites those of another one
        attempt = world.broadcast_json(uuid.uuid4().hex[:8], "starting")
        # Only a start by the user can begin another history. Replacement workers continue this one.
        if is_main and not has_begun:
            set_other_snapshots_aside(config, resumed, attempt, self.record, self._owner)
        modules: list[torch.nn.Module] = []  # replicated
        self.lanes = self._make_lanes(lanes, modules)
        workers = self._gather_workers()
        environment = workers[0]["environment"]
        if resumed is not None:
            self._compare_environments(resumed, environment)
        self.progress = self._make_progress(
            config, attempt, environment, resumed, in_memory, modules, lock
        )
        # What the script draws before its first loop, such as parameters, is then the same on all
        # workers, and does not depend on what was drawn while the run started.
        set_generators(config.seed)
        self._record_start(attempt, resumed, workers)
        if is_main and not is_observed():
            announce(self._describe_start(resumed))
        # From here on, replacement workers resume. Those of a worker that is killed earlier start
        # as this one did.
        in_memory.report_start(self.progress.step, is_new=not has_begun)
        if config.dir is not None:
            self._follow(config.dir, sinks, workers)

    def _make_progress(
        self,
        config: Config,
        attempt: str,
        environment: Mapping[str, str],
        resumed: Snapshot | None,
        in_memory: InMemorySnapshots,
        modules: list[torch.nn.Module],
        lock: DirectoryLock | None,
    ) -> Progress:
        """Return what counts steps, with the snapshots, checks and signals that it acts on."""
        world = self.world
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
            environment,
            resumed,
            in_memory,
            tracked=tracked,
            owner=self._owner,
            remote_owner=self._remote_owner,
            writes=self.replay is None or self.replay.saves_state,
            check_models=self.lanes.check_models,
            compare=None if is_observed() else self.divergence.compare,
        )
        self._exits.callback(self.snapshots.close)
        # Signals ended the process at once until now, since there was no state to save.
        # A state that exists only in memory is written at the end of the first step.
        self.stop = StopRequest(deferring=resumed is not None and resumed.in_memory)
        self._exits.callback(self.stop.close)
        self.data_check = DataCheck(config.seed, world.rank, world.size, world.all_gather_json)
        return Progress(
            config,
            self.record,
            self.snapshots,
            self.stop,
            self.lanes,
            self.divergence,
            data_check=self.data_check,
            alerts=self._make_alerts(config),
            resumed=resumed,
            line=open_line(self._process, config.stop_after, self._exits.callback)
            if config.progress
            else None,
            check_directory=lock.check if lock else lambda: None,
            on_end=self._samplers.close,
        )

    def _make_alerts(self, config: Config) -> LossAlerts:
        return LossAlerts(
            self.record,
            config.dir,
            self.snapshots.keep_newest,
            is_main=self.world.rank == 0,
            only_nonfinite=config.precision == "float16",  # a scaler changes losses
            left_out=config.skipped_steps,
        )

    def _make_lanes(self, lanes: int, modules: list[torch.nn.Module]) -> LaneEngine:
        """Return the engine, which checks every step of an optimizer until the run ends."""
        observe: Callable[..., AbstractContextManager[Any]] = unobserved
        if is_observed():  # `samestep verify` looks for changes by lanes
            observe = LaneObserver(self.world.rank, modules).lane
        elif self.replay is not None:
            observe = self.replay.lane
        engine = LaneEngine(
            self.world,
            self.config,
            lanes,
            self.devices,
            observe,
            keeps_gradients=self.replay is not None,
            graphs=self._make_graphs(),
        )
        self._exits.callback(engine.close)
        # of all optimizers, tracked or not
        hook = register_optimizer_step_pre_hook(engine.optimizers.before_step)
        self._exits.callback(hook.remove)
        return engine

    def _make_graphs(self) -> LaneGraphs | None:
        """Return the CUDA graphs of lanes, None without them."""
        config, on_cuda = self.config, self.devices[0].type == "cuda"
        if config.graphs == "on" and not on_cuda:
            raise ConfigError(
                'graphs="on" requires GPUs, but the devices are CPUs; use graphs="auto"'
            )
        if config.graphs == "off" or not on_cuda or self.replay is not None:
            return None  # `samestep replay` looks into each lane
        level = logging.WARNING if config.graphs == "on" else logging.INFO

        def say(text: str) -> None:
            if self._process.rank == 0:
                announce(text, level)

        if not config.deterministic:
            say('graphs="auto" has no effect with deterministic=False, which lanes need to compare')
            return None
        return LaneGraphs(is_required=config.graphs == "on", say=say)

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

    def _check_directory(self) -> None:
        """Raise `ConfigError` if workers have different directories, or hosts do not share them."""
        directory = self.config.dir
        # What rank 0 wrote into the lock is a text that no other directory contains.
        lock = locked_by(directory) if directory is not None and self._process.rank == 0 else ""
        rows = self.world.all_gather_json([str(directory), lock], "starting")
        first, self._lock = rows[0]
        for rank, (path, _) in enumerate(rows):
            if path != first:
                raise ConfigError(
                    f"dir must be the same on all workers, got {first} on worker 0 and {path} on"
                    f" worker {rank}; leave times and process ids out of its name"
                )
        if self.config.snapshot_every is not None:  # otherwise `run.track` checks it
            self.check_shared()

    def check_shared(self) -> None:
        """Raise `ConfigError` if hosts do not share the directory; collective, checked once."""
        directory, lock = self.config.dir, self._lock
        if directory is None or lock is None:
            return
        # worker 0 had written by then: NFS remembers for a while that a file was not there
        row = [socket.gethostname(), is_locked_by(directory, lock, self.config.timeout)]
        for rank, (host, sees) in enumerate(self.world.all_gather_json(row, "starting")):
            if not sees:
                raise ConfigError(
                    f"dir must be shared by all hosts, but worker {rank} on {host} does not see"
                    f" what worker 0 wrote to {directory}; use a directory on a file system such as"
                    " NFS, or, to record the run without snapshots, set snapshot_every=None and"
                    " track nothing"
                )
        self._lock = None  # all hosts have seen it

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
        first = workers[0]["environment"]
        changes = (
            (rank, differences(first, other["environment"])) for rank, other in enumerate(workers)
        )
        # the first one is enough for a warning
        rank, lines = next((pair for pair in changes if pair[1]), (0, ""))
        if lines and self._process.rank == 0:
            logging.getLogger("samestep").warning(
                "results may depend on the number of workers, because the environment of worker "
                "%s differs from that of worker 0:\n%s",
                rank,
                lines,
            )
        return workers

    @cached_property
    def _program(self) -> dict[str, str]:
        """The files and inputs of the program, which are read once."""
        program = digests_of_program()
        if self._process.rank == 0:  # some launchers pass ranks in arguments
            program |= inputs_of_program(self._settings)
        return program

    def _describe_run(self) -> dict[str, str]:
        """Describe the program, and what a snapshot of it must agree with."""
        config = self.config
        return self._program | {"seed": str(config.seed), "lanes": str(config.lanes)}

    def _note_origin(self, owner: Owner, resumed: Snapshot) -> Owner:
        """Return the run once it knows where it started; say if that is no snapshot of its own."""
        started = owner.started_from(resumed)
        if self._process.rank > 0 or self.config.dir is None:
            return started
        if text := owner.describe_start(resumed):
            announce(text)
        if started != owner:
            store(self.config.dir, started)
            if self._remote_owner is not None:
                self._remote_owner.update(started)
        return started

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

    def _compare_environments(self, resumed: Snapshot, environment: Mapping[str, str]) -> None:
        """Warn if the run resumes where results may differ; with `resume_strict`, raise."""
        before = dict(resumed.info.get("environment", {}))
        seed = before.pop(HASH_SEED, "random")
        others = differences(before, environment)
        if seed != "random":  # which no start can repeat
            before[HASH_SEED] = seed
        lines = differences(before, environment)
        if not lines:
            return
        advice = "" if seed in {"random", environment[HASH_SEED]} else KEEP_SEED.format(seed)
        end = f"\n{advice}" if advice else ""
        what = (
            f"the snapshot of step {resumed.step} was written by another program or in another "
            "environment"
        )
        if self.config.resume_strict:
            raise ConfigError(
                f"{what}, so resume_strict refuses to resume, because results may differ:\n{lines}"
                f"{end}"
            )
        if self._process.rank == 0 and not others:
            change = f"PYTHONHASHSEED was {seed} and is {environment[HASH_SEED]}"
            text = f"{change}, so a set of strings may have another order; {advice}"
            announce(text, logging.WARNING)
        elif self._process.rank == 0:
            logging.getLogger("samestep").warning(
                "%s, so the results of this run may differ from those of an uninterrupted one:\n%s"
                "\nWhat run.track restores, such as an optimizer with its learning rate, keeps the "
                "values of the snapshot; all else has the new ones.%s",
                what,
                lines,
                end,
            )
        self.record.event("environment_changed", step=resumed.step, differences=lines)

    def _record_start(
        self, attempt: str, resumed: Snapshot | None, workers: Sequence[Mapping[str, Any]]
    ) -> None:
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self.config).items()
        }
        if options["on_event"] and is_url(options["on_event"]):
            options["on_event"] = "a URL"  # which may contain a secret
        self.record.event(
            "started" if resumed is None else "resumed",
            attempt=attempt,
            step=self.progress.step,
            epoch=self.progress.epoch,
            snapshot=None if resumed is None else str(resumed.path),
            continues=last_own_step(self.config, resumed, self._owner) >= 0,
            **({} if self._owner is None else {"run": self._owner.id}),
            lanes=self.config.lanes,
            exchange=self.world.backend,
            workers=[
                {name: worker[name] for name in ("rank", "host", "pid", "devices")}
                for worker in workers
            ],
            devices=workers[0]["devices"],
            torch=torch.__version__,
            environment=workers[0]["environment"],
            format=FORMAT,
            samestep=samestep_version(),
            config=mask(options),
            settings=mask(self._settings),
            command=shlex.join(mask_words(sys.argv)),
            **(self._commit.result if self._commit else {}),
        )

    def _describe_start(self, resumed: Snapshot | None) -> str:
        """Return what a user wants to know when workers have started."""
        lanes, size, folder = self.config.lanes or 1, self.world.size, self.config.dir
        workers, before = f"{size} worker{'s' * (size != 1)}", size
        if resumed is not None:
            workers, before = (
                f"resumed at step {resumed.step}, {workers}",
                resumed.info.get("workers", size),
            )
        text = f"{workers}{f' (was {before})' * (before != size)}, {lanes} lane{'s' * (lanes != 1)}"
        if self.config.skip_batches is not None:
            text += f", without the batches of steps {self.config.skip_batches}"
        if skipped := [] if resumed is None else resumed.state["run"].get("skipped_steps", []):
            text += f", {len(skipped)} batch{'es' * (len(skipped) != 1)} skipped so far"
        if self.config.read_only:
            source = self._source.dir or self._source.remote
            return f"{text};{f' reads {source}, and' if source else ''} saves nothing"
        if folder is None:
            return f"{text}; without a directory (--dir), nothing is saved"
        return f"{text}, {folder} (watch: samestep watch {folder})"

    def _write_images(self) -> None:
        with suppress(RecordError):  # a successful run has already raised it
            self.record.flush()

    def end(self) -> None:
        """Take the last snapshot, and report an error like any other."""
        try:
            self.lanes.buffers.check()
            self.progress.end_run()
        except Exception as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Report an error to the other workers, so that all exit, and to the record."""
        self.world.abandon()
        self.world.status.report_failure(error)
        # The other workers first: they wait for this one. Then the record, which any worker can add
        # an event to, since only rank 0 has it open.
        with suppress(Exception):  # the error being reported is more important
            record = open_record(self.config.dir, writes=True)
            self._add_failure(record, error, step=self.progress.step)
            record.close()

    def _add_failure(self, record: Record, error: BaseException, **step: int) -> None:
        """Record this worker's error; `step` is missing if the run has not begun."""
        trace = mask_urls("".join(traceback.format_exception(error)))
        worker = {"host": socket.gethostname(), "rank": self._process.rank}
        text = mask_urls(f"{type(error).__name__}: {error}").removesuffix(": ")
        secondary = isinstance(error, SamestepError) and error.is_secondary
        fields = {"error": text, "is_secondary": secondary, "traceback": trace}
        record.event("failed", **worker, **step, **fields)

    def _report_stall(self, text: str | None) -> None:
        """Print that workers wait for another one, and record it, or its end. From a thread."""
        if text is None:
            self._add_to_record("recovered")
            return
        announce(text, logging.WARNING)
        self._add_to_record("stalled", reason=text.removeprefix("stalled: "))

    def _add_to_record(self, event: str, **fields: Any) -> None:
        """Record an event of a thread of any worker."""
        with suppress(Exception):  # the disk is full, or the run still starts
            record = open_record(self.config.dir, writes=True)
            record.event(event, step=self.progress.step, **fields)
            record.close()

    def load_best(self) -> Snapshot:
        """Load the snapshot with the highest score; collective. Errors are those of the caller."""
        source = self._source
        if source.dir is None or source.keep_best < 1:
            raise ConfigError(
                "run.best_snapshot requires dir and a keep_best of at least 1, got"
                f" dir={source.dir} and keep_best={source.keep_best}"
            )
        # a run that only reads downloads nothing into the directory
        remote = None if self.config.read_only else source.remote
        return load_best(source.dir, remote, self.world, self.record.event)

    def check_read(self) -> None:
        """Raise `SnapshotError` in a run that only reads, if there was nothing to read."""
        source = self._source
        place = source.dir or source.remote
        if source.read_only and not self._has_resumed and place and source.resume != "never":
            raise SnapshotError(f"{mask_urls(str(place))} has no complete snapshot to read")

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


def find_snapshot(
    config: Config,
    world: World,
    record: Record,
    in_memory: InMemorySnapshots,
    owner: Owner | None,
    *,
    has_begun: bool,
    listing_seconds: float = START_SECONDS,
) -> Snapshot | None:
    """Load the snapshot that the run `owner` resumes from, the same one on all workers.

    A run that had begun before its workers were killed continues from its newest snapshot, in
    memory or on disk, whatever `resume` says. A failed listing of the remote is repeated for
    `listing_seconds`.
    """

    def report_rejected(event: str, **fields: str) -> None:
        record.event(event, **fields)
        if world.rank == 0:
            logging.getLogger("samestep").warning("skipped: %s", fields["reason"])

    if has_begun or config.resume == "auto":
        # Once the run has begun, its local state is newer than any remote copy.
        downloads = None
        if not has_begun and config.remote is not None and config.dir is not None:
            seconds = listing_seconds
            downloads = Downloads(config.remote, config.dir, world, listing_seconds=seconds)
        memory = in_memory if has_begun else None  # otherwise of another history
        newest = load_newest(config.dir, world, report_rejected, memory, downloads, owner)
        if newest is not None:
            return newest
    if config.resume in {"auto", "never"}:  # nothing was found, or nothing is wanted
        return None
    if is_url(config.resume) and config.dir is not None:
        return load_from(config.resume, config.dir, world)
    return load_together(Path(config.resume), world)


def find_snapshot_of_others(
    config: Config, world: World, record: Record, in_memory: InMemorySnapshots
) -> Snapshot | None:
    """Load a snapshot as `find_snapshot` does, and write nothing into `dir`.

    Another run may train there. If it removes all snapshots that were there, look again. Remote
    snapshots are downloaded into a temporary directory; those in `dir` are preferred.
    """

    def find(options: Config) -> Snapshot | None:
        return find_snapshot(options, world, record, in_memory, None, has_begun=False)

    local = replace(config, remote=None)
    while not is_url(config.resume):
        paths = list_snapshots(config.dir) if config.dir is not None else []
        before = world.broadcast_json(list(map(str, paths)), "choosing a snapshot")
        try:
            newest = find(local)
        except SnapshotError:
            still_there = any(path.exists() for path in map(Path, before))
            if config.resume != "auto" or world.broadcast_json(still_there, "choosing a snapshot"):
                raise
        else:
            if newest is not None or config.remote is None or config.resume == "never":
                return newest
            break
    # A folder of the same name on each host; its workers see it.
    name = world.broadcast_json(f"samestep-{uuid.uuid4().hex}", "choosing a snapshot")
    directory = Path(tempfile.gettempdir()) / name
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        remote = replace(config, dir=directory)
        snapshot = find(remote)
        world.barrier("loading a snapshot")  # all have read it
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return snapshot


def set_other_snapshots_aside(
    config: Config, resumed: Snapshot | None, attempt: str, record: Record, owner: Owner | None
) -> None:
    """Move snapshots of other histories to a separate directory if `resume` names the start.

    Otherwise the next `resume="auto"` would load the newest of them.
    """
    if config.dir is None or config.resume == "auto":
        return
    start = last_own_step(config, resumed, owner)
    current = None if resumed is None else resumed.path  # perhaps a download
    later = [path for path in list_snapshots(config.dir) if (step_of(path) or 0) > start]
    others = [path for path in later if current is None or path.resolve() != current.resolve()]
    aside = config.dir / f"superseded-{attempt}"
    for path in others:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)  # nothing is removed: the user may want them
    if others:
        names = [path.name for path in others]
        record.event("snapshots_set_aside", path=str(aside), snapshots=names)


def with_skipped_batches(config: Config, resumed: Snapshot | None) -> Config:
    """Return the options with the batches that are left out, also those that the snapshot names.

    A run that is started again without the option must not train on them. Raises `ConfigError` for
    those on which it has trained.
    """
    saved = None if resumed is None else resumed.state["run"].get("skip_batches")
    step = 0 if resumed is None or config.read_only else resumed.step
    left_out = sorted(replace(config, skip_batches=saved).skipped_steps, key=attrgetter("start"))
    for steps in config.skipped_steps:
        first = steps.start  # not known to be left out
        for others in left_out:
            first = others.stop if first in others else first
        if first < min(steps.stop, step):
            raise ConfigError(
                f"skip_batches={config.skip_batches} cannot leave out step {first}, because the run"
                f" resumes from step {step}, after an update with its batch; resume from an"
                f" earlier snapshot (resume=PATH), or leave out later steps only"
            )
    texts = ",".join(str(text) for text in (saved, config.skip_batches) if text)
    return replace(config, skip_batches=",".join(dict.fromkeys(texts.split(","))) or None)


def resolve_lanes(config: Config, workers: int, devices: int, resumed: Snapshot | None) -> int:
    """Return the number of lanes: as in the snapshot, as configured, or one per device.

    Each of the `workers` has `devices` devices.
    """
    total = workers * devices  # a lane is computed by one device
    if resumed is None:
        lanes = config.lanes or total
    else:
        lanes = int(resumed.info["lanes"])
        seed = int(resumed.info["seed"])
        pairs = ("lanes", config.lanes or lanes, lanes), ("seed", config.seed, seed)
        for name, configured, saved in pairs:
            if configured != saved and not config.read_only:
                raise ConfigError(
                    f"{name} must be {saved}, as in the snapshot that the run resumes from, got "
                    f"{configured}; it is fixed for a run: use {name}={saved}, or resume='never'"
                )
    if total > lanes:
        where = "" if resumed is None else " in the snapshot that the run resumes from"
        fix = "increase lanes" if resumed is None else "start fewer workers"
        raise ConfigError(
            f"lanes must be at least the number of devices ({total}), got {lanes}{where}; {fix}"
        )
    return lanes
