"""The process of a worker: its devices, threads, and deferred signals."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

import torch

from samestep.cluster import ProcessInfo
from samestep.config import Config
from samestep.errors import ConfigError


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
    cuda = torch.cuda.is_available() and config.device != "cpu" and (names is None or wants_cuda)
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
                f"({process.local_world_size}), which would share named devices, got {given}"
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


def share_gpus(devices: list[torch.device], process: ProcessInfo) -> bool:
    """Return whether several workers of this host use the same GPU."""
    needed = len(devices) * process.local_world_size
    return devices[0].type == "cuda" and needed > torch.cuda.device_count()


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
