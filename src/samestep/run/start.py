"""What a run settles before its first step: the device, the snapshot it continues from, the number of lanes."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import torch

from samestep.cluster import ProcessInfo
from samestep.comm.base import World
from samestep.config import Config, is_url
from samestep.errors import ConfigError
from samestep.record import Record
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.read import Snapshot, list_snapshots, load, step_of
from samestep.snapshot.resume import Downloads, load_from, load_newest


def set_up_devices(config: Config, place: ProcessInfo) -> list[torch.device]:
    """Return the worker's devices, with threads or deterministic kernels as configured. Raises `ConfigError` without the GPUs asked for."""
    # torch would just say that there is no GPU
    if config.device != "cpu" and torch.cuda._is_in_bad_fork():  # noqa: SLF001
        raise ConfigError(
            "CUDA was in use in the process that this worker was forked from; expected a launch before that"
        )
    torch.set_num_threads(config.threads)
    names = config.devices if isinstance(config.devices, tuple) else None
    wants_cuda = config.device == "cuda" or (names is not None and names[0] != "cpu")
    cuda = torch.cuda.is_available() and config.device != "cpu" and (names is None or wants_cuda)
    if wants_cuda and not cuda:
        given = "device='cuda'" if names is None else f"devices={','.join(names)}"
        raise ConfigError(
            f"{given} was given, and torch finds no GPU; expected one: check the driver and CUDA_VISIBLE_DEVICES"
        )
    if not cuda:
        return [torch.device("cpu")] * (
            config.devices if isinstance(config.devices, int) else len(config.devices)
        )
    devices = _gpus(config.devices, place, torch.cuda.device_count())
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False  # it chooses kernels by their speed at the moment
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(devices[0])
    return devices


def _gpus(asked: int | tuple[str, ...], place: ProcessInfo, there: int) -> list[torch.device]:
    """Return the GPUs of one worker of a host that has `there` of them."""
    if isinstance(asked, tuple):
        given = f"devices={','.join(asked)} was given"
        if place.local_world_size > 1:
            raise ConfigError(
                f"{given} to {place.local_world_size} workers of one host, which would share them; expected a number"
            )
        devices = [torch.device(name) for name in asked]
        if len(set(devices)) < len(devices) or max(device.index for device in devices) >= there:
            raise ConfigError(
                f"{given}, and this host has {there} GPUs; expected different ones of them"
            )
        return devices
    if asked > there:
        raise ConfigError(
            f"devices={asked} was given, and this host has {there} GPUs; expected at most as many"
        )
    return [
        torch.device("cuda", (place.local_rank * asked + number) % there) for number in range(asked)
    ]


def share_gpus(devices: list[torch.device], place: ProcessInfo) -> bool:
    """Tell whether several workers of this host use one GPU."""
    return (
        devices[0].type == "cuda"
        and len(devices) * place.local_world_size > torch.cuda.device_count()
    )


def find_snapshot(
    config: Config, world: World, record: Record, hot: InMemorySnapshots, *, begun: bool
) -> Snapshot | None:
    """Load the snapshot that the run resumes from: the same on all workers.

    A run that had `begun` before its workers were killed goes on from its newest hot copy or
    snapshot, wherever it was told to start.
    """
    if begun or config.resume == "auto":
        # What has begun here is newer here than any copy of it elsewhere.
        downloads = (
            None
            if begun or config.remote is None or config.dir is None
            else Downloads(config.remote, config.dir, world)
        )
        newest = load_newest(
            config.dir,
            world,
            partial(_tell_rejected, record, tells=world.rank == 0),
            hot if begun else None,
            downloads,
        )
        if newest is not None:
            return newest
    if config.resume in {"auto", "never"}:
        return None
    if is_url(config.resume) and config.dir is not None:
        return load_from(config.resume, config.dir, world)
    return load(Path(config.resume))


def _tell_rejected(record: Record, kind: str, *, tells: bool, **fields: str) -> None:
    """Record that a snapshot is passed over, and have one worker say so at once."""
    record.event(kind, **fields)
    if tells:
        logging.getLogger("samestep").warning("passed over: %s", fields["reason"])


def set_aside(config: Config, resumed: Snapshot | None, attempt: str, record: Record) -> None:
    """Move snapshots of later steps, which a run that was told where to start leaves behind, to a directory of their own.

    Otherwise the next `resume="auto"` would take one of them: the newest, but of another history.
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
        record.event(
            "snapshots_set_aside", path=str(aside), snapshots=[path.name for path in later]
        )


def agree_on_lanes(config: Config, workers: int, devices: int, resumed: Snapshot | None) -> int:
    """Return the number of lanes: as given, as in the snapshot, or one a device of each of `workers`, which have `devices` each."""
    if resumed is None:
        lanes = config.lanes or workers * devices
        if workers * devices > lanes:
            raise ConfigError(
                f"lanes={lanes} was given for {workers * devices} devices; expected at least a lane a device: raise lanes"
            )
        return lanes
    lanes, seed = int(resumed.info["lanes"]), int(resumed.info["seed"])
    for name, given, kept in (("lanes", config.lanes or lanes, lanes), ("seed", config.seed, seed)):
        if given != kept:
            raise ConfigError(
                f"{name}={given} was given, and the run in the snapshot has {name}={kept}; it is fixed: give it, or use resume='never'"
            )
    if workers * devices > lanes:
        raise ConfigError(
            f"the run in the snapshot has {lanes} lanes, and {workers} workers with {devices} device{'s' * (devices > 1)} each were "
            "started; expected at most a device a lane"
        )
    return lanes
