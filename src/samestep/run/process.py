"""The process of a worker: its devices, threads, and deferred signals."""

from __future__ import annotations

import logging
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import numpy as np
import torch

from samestep.cluster import ProcessInfo
from samestep.comm.status import host_name
from samestep.config import Config
from samestep.errors import ConfigError
from samestep.handoff import TERMINAL
from samestep.record.events import samestep_version

COMMIT_SECONDS: Final = 1.0  # for git, which may have to look at many files


def set_up_devices(config: Config, process: ProcessInfo) -> list[torch.device]:
    """Return the worker's devices, and set torch's threads and deterministic kernels.

    Raises `ConfigError` if the requested GPUs do not exist.
    """
    # torch itself would only report that there is no GPU.
    if config.device != "cpu" and torch.cuda._is_in_bad_fork():  # noqa: SLF001  no public check
        raise ConfigError(
            "CUDA cannot be used in this worker, because the process it was forked from had "
            "already used CUDA; call launch before any use of CUDA"
        )
    torch.set_num_threads(config.threads)
    names = config.devices if isinstance(config.devices, tuple) else None
    wants_cuda = config.device == "cuda" or (names is not None and names[0] != "cpu")
    # in this order: asking for GPUs opens the driver
    may_use = config.device != "cpu" and (names is None or wants_cuda)
    cuda = may_use and torch.cuda.is_available()
    if wants_cuda and not cuda:
        given = "device='cuda'" if names is None else f"devices={','.join(names)}"
        raise ConfigError(
            f"{given} needs a GPU, but torch finds no GPU; check the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    if not cuda:
        count = config.devices if isinstance(config.devices, int) else len(config.devices)
        return [torch.device("cpu")] * count
    devices = _gpus(config.devices, process, torch.cuda.device_count())
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False  # it chooses kernels by their measured speed
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(devices[0])
    return devices


def _gpus(asked: int | tuple[str, ...], process: ProcessInfo, count: int) -> list[torch.device]:
    """Return the GPUs of one worker on a host with `count` GPUs."""
    if isinstance(asked, tuple):
        given = f"devices={','.join(asked)}"
        if process.local_world_size > 1:
            raise ConfigError(
                f"devices must be a number with several workers on one host "
                f"({process.local_world_size}), which would share named devices, got {given}; "
                "name the GPUs of all workers with samestep run --gpus or CUDA_VISIBLE_DEVICES"
            )
        devices = [torch.device(name) for name in asked]
        if len(set(devices)) < len(devices) or max(device.index for device in devices) >= count:
            raise ConfigError(f"devices must be different GPUs of this host's {count}, got {given}")
        return devices
    if asked > count:
        raise ConfigError(
            f"devices must be at most the number of GPUs of this host ({count}), got {asked}"
        )
    first = process.local_rank * asked
    return [torch.device("cuda", (first + number) % count) for number in range(asked)]


def environment_of_results(config: Config, devices: list[torch.device]) -> dict[str, str]:
    """Return what the bits of a run depend on, besides its program, data, lanes and seed."""
    names = [
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu {torch.backends.cpu.get_cpu_capability()}"
        for device in devices
    ]
    cudnn = torch.backends.cudnn
    found: dict[str, object] = {
        "samestep": samestep_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version() if devices[0].type == "cuda" else None,
        "numpy": np.__version__,
        "devices": ", ".join(dict.fromkeys(names)),
        "threads": config.threads,
        "precision": config.precision,
        "exchange dtype": config.exchange_dtype,
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in convolutions": cudnn.allow_tf32 if devices[0].type == "cuda" else None,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "assertions": __debug__,  # python -O removes them
        # the order of a set of strings; a random one differs in every process
        "hash seed": os.environ.get("PYTHONHASHSEED", "random")
        if sys.flags.hash_randomization
        else "0",
    }
    return {name: str(value) for name, value in found.items()}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what differs as lines `name: old -> new`; "" if nothing does."""
    changed = [name for name in new if name in old and old[name] != new[name]]
    return "\n".join(f"  {name}: {old[name]} -> {new[name]}" for name in changed)


def gpu_names(devices: list[torch.device]) -> list[str]:
    """Return a name for each GPU, equal for the same one in all containers of its host.

    It has the bus address, by which NCCL recognizes a GPU, because indices depend on what is
    visible.
    """
    names = []
    for device in devices:
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            parts = (getattr(found, f"pci_{part}_id", "") for part in ("domain", "bus", "device"))
            address = ":".join(map(str, parts)).strip(":") or f"index {device.index}"
            names.append(f"{host_name()} {address}")
    return names


def reaches_terminal() -> bool:
    """Return whether stderr is a terminal, or rank 0's is printed on the launcher's terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal or bool(os.environ.get(TERMINAL))


def announce(text: str, level: int = logging.INFO) -> None:
    """Log a line about the whole run, or write it to stderr if the script has not set up logging.

    Call it on one worker only.
    """
    logger = logging.getLogger("samestep")
    if logger.hasHandlers():
        logger.log(level, text)
    elif sys.stderr is not None:
        sys.stderr.write(f"samestep: {text}\n")
        sys.stderr.flush()


class CommitQuery:
    """The git commit of the script's folder, found by git while the run starts."""

    def __init__(self) -> None:
        folder = Path(sys.argv[0] or ".").resolve().parent
        command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
        self._git: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self._git = subprocess.Popen(
                [*command, "--exclude=*"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    @cached_property
    def result(self) -> dict[str, Any]:
        """The `commit`, None if it is unknown, and `dirty`: whether tracked files differ."""
        found = ""
        if self._git is not None:
            try:
                found, _ = self._git.communicate(timeout=COMMIT_SECONDS)
            except subprocess.TimeoutExpired:  # a huge repository, or a slow disk
                self._git.kill()
                self._git.communicate()
        commit, _, dirty = found.strip().partition("-")
        return {"commit": commit or None, "dirty": bool(dirty)}


def plain_settings(settings: Any) -> dict[str, Any]:
    """Return a dict or dataclass as JSON: nested dicts of numbers, text, lists and None."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            value = {one.name: getattr(value, one.name) for one in fields(value)}
        if isinstance(value, Mapping):
            return {str(name): plain(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return value if value is None or type(value) in {bool, int, float, str} else str(value)

    found = plain(settings)
    if not isinstance(found, dict):
        raise ConfigError(
            "settings must be a dict or dataclass of the job's settings, got "
            f"{type(settings).__name__}"
        )
    return found


class StopRequest:
    """Defers SIGTERM and Ctrl-C while `deferring` is set, so that the step can end with a snapshot.

    `signal` is the number of the first signal received, or 0. Between steps, signals act
    immediately. So does Ctrl-C after another signal, but a further SIGTERM has no effect, because
    schedulers send it to all processes of a job and launchers pass it on as well. Python handles
    signals in the main thread only; in other threads nothing is deferred.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.deferring = False
        self._previous: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)

    def exit(self, number: int) -> NoReturn:
        """Raise KeyboardInterrupt for Ctrl-C, or SystemExit with status 128 + `number`."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # typeshed's union
        self._previous.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.signal != 0
        if again and number == signal.SIGTERM:
            return
        self.signal = self.signal or number
        if again or not self.deferring:
            self.exit(number)
