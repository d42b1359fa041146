"""The process of a worker: its devices, threads, deferred signals, and the use of its host."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch

from samestep.cluster import STARTED_BY, ProcessInfo
from samestep.comm.status import WorkerStatus
from samestep.config import PREFIX, Config
from samestep.errors import ConfigError, RecordError
from samestep.handoff import ATTEMPT, TERMINAL, ScriptArguments, finished_directories
from samestep.host import YELLOW, colored, kernel_id, printable
from samestep.record import Record
from samestep.torch_internals import is_forked_after_cuda

SAMPLE_SECONDS: Final = 1.0  # for a GPU's driver to respond when the run ends
MOST_HOSTS: Final = 8  # more are sampled less often, so that the record grows no faster


def set_up_devices(config: Config, process: ProcessInfo) -> list[torch.device]:
    """Return the worker's devices, and set torch's threads and deterministic kernels.

    Raises `ConfigError` if the requested GPUs do not exist.
    """
    if config.device != "cpu" and gpus_are_lost():
        raise ConfigError(
            "CUDA cannot be used in this worker, because the process it was forked from had "
            "already used CUDA; call ss.launch before using CUDA"
        )
    torch.set_num_threads(config.threads)  # results depend on it
    names = config.devices if isinstance(config.devices, tuple) else None
    wants_cuda = config.device == "cuda" or (names is not None and names[0] != "cpu")
    # in this order: asking for GPUs opens the driver
    may_use = config.device != "cpu" and (names is None or wants_cuda)
    cuda = may_use and torch.cuda.is_available()
    if wants_cuda and not cuda:
        option = "device='cuda'" if names is None else f"devices={','.join(names)}"
        raise ConfigError(
            f"{option} needs a GPU, but torch finds no GPU; check the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    if not cuda:
        count = config.devices if isinstance(config.devices, int) else len(config.devices)
        return [torch.device("cpu")] * count
    devices = _gpus(config.devices, process, torch.cuda.device_count())
    if config.deterministic:
        # cuBLAS reads it when it is first used, and is deterministic only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False  # it chooses kernels by their measured speed
        torch.backends.cudnn.deterministic = True  # CTC asks for this instead
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(devices[0])  # for user code that names no device
    return devices


def gpus_are_lost() -> bool:
    """Return whether the process that this one was forked from kept it from using GPUs.

    It did if it asked CUDA for GPUs and there are any. torch itself reports that there are none.
    """
    return is_forked_after_cuda() and torch.cuda.device_count() > 0


def _gpus(asked: int | tuple[str, ...], process: ProcessInfo, count: int) -> list[torch.device]:
    """Return the GPUs of one worker on a host with `count` GPUs."""
    if isinstance(asked, tuple):
        option = f"devices={','.join(asked)}"
        if process.local_world_size > 1:
            raise ConfigError(
                f"devices must be a number with several workers on one host "
                f"({process.local_world_size}), which would share named devices, got {option}; "
                "name the GPUs of all workers with samestep run --gpus or CUDA_VISIBLE_DEVICES"
            )
        devices = [torch.device(name) for name in asked]
        if len(set(devices)) < len(devices) or max(device.index for device in devices) >= count:
            raise ConfigError(
                f"devices must be different GPUs of this host's {count}, got {option}"
            )
        return devices
    if asked > count:
        raise ConfigError(
            f"devices must be at most the number of GPUs of this host ({count}), got {asked}"
        )
    # Workers take GPUs in order. If there are too few, they share them, and do not use NCCL.
    first = process.local_rank * asked
    return [torch.device("cuda", (first + number) % count) for number in range(asked)]


def gpu_names(devices: list[torch.device]) -> list[str]:
    """Return a name for each GPU, equal for the same one in all containers of its host.

    It has the host and the bus address, by which NCCL recognizes a GPU, because indices depend on
    what is visible. NCCL takes the host from NCCL_HOSTID if that is set, as tests with one GPU do.
    torch before 2.8 has no address, but a UUID.
    """
    host = os.environ.get("NCCL_HOSTID") or kernel_id() or socket.gethostname()
    names = []
    for device in devices:
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            parts = (
                getattr(properties, f"pci_{part}_id", "") for part in ("domain", "bus", "device")
            )
            address = ":".join(map(str, parts)).strip(":")
            address = address or getattr(properties, "uuid", f"index {device.index}")
            names.append(f"{host} {address}")
    return names


def reaches_terminal() -> bool:
    """Return whether stderr is a terminal, or rank 0's is printed on the launcher's terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal or bool(os.environ.get(TERMINAL))


def announce(text: str, level: int = logging.INFO) -> None:
    """Log a line about the whole run, or write it to stderr if the script does not log such lines.

    A level of the logger itself is respected. Call this on one worker only.
    """
    logger, text = logging.getLogger("samestep"), printable(text)
    if logger.hasHandlers() and (logger.level or logger.isEnabledFor(level)):
        logger.log(level, text)
    elif sys.stderr is not None:
        title = "samestep:"
        if level >= logging.WARNING:
            title = colored(title, YELLOW, sys.stderr, is_terminal=reaches_terminal())
        sys.stderr.write(f"{title} {text}\n")
        sys.stderr.flush()


def refuse_finished(directory: Path) -> None:
    """Raise `ConfigError` if this process has finished a run there, such as an earlier fold."""
    if str(directory.resolve()) in finished_directories:
        raise ConfigError(
            f"this process has already finished a run in {directory}, so another one there would"
            " start with its weights and train nothing; give each fold or trial a directory of its"
            f' own, as in\n    for fold in range(5):\n        with ss.init(dir=f"{directory}/'
            '{fold}") as run:\nTo train the finished run longer, pass the path of its last snapshot'
            " as resume=; to start over, resume='never'; to evaluate it, read_only=True"
        )


def refuse_unknown_to_launcher(config: Config, environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the script asks for notices, which only a launcher that knows gets."""
    is_known = environment.get(STARTED_BY) == "samestep" and f"{PREFIX}PREEMPTION" in environment
    if config.preemption is not None and not is_known:
        name = config.preemption
        raise ConfigError(
            f"preemption={name!r} is for the launcher, which asks before the script runs; start "
            f"the script with samestep run --preemption {name}, or samestep.launch(..., "
            f"preemption={name!r})"
        )


def warn_of_late_options() -> None:
    """Warn of options of `samestep run` that a script got instead, and has not read.

    A script that reads an argument knows whether it is its own.
    """
    words, is_first = sys.argv, os.environ.get(ATTEMPT, "0") == "0"
    if is_first and isinstance(words, ScriptArguments) and words.unread:
        announce(words.describe(words.unread.values()), logging.WARNING)


class SystemUse:
    """Resource usage of this host: shares (0 to 1), bytes, and bytes/second since the last call."""

    FIELDS: Final = (
        "cpu", "memory", "memory_total", "disk_read", "disk_written", "network_received",
        "network_sent", "gpus",
    )  # fmt: skip

    def __init__(self) -> None:
        import psutil  # takes 9 ms

        self._psutil = psutil
        self._nvml: Any = None
        self._gpus: list[Any] = []
        with suppress(Exception):  # not installed, or there is no driver
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        psutil.cpu_percent()  # the next call returns the mean since this one
        self._time, self._counts = time.monotonic(), self._read_counts()

    def sample(self) -> dict[str, Any]:
        """Return the fields of an event `system`, without those that this host does not report."""
        before, self._time = self._time, time.monotonic()
        earlier, self._counts = self._counts, self._read_counts()
        seconds = max(self._time - before, 1e-3)
        memory = self._psutil.virtual_memory()
        return {
            "cpu": round(self._psutil.cpu_percent() / 100, 4),
            "memory": memory.total - memory.available,
            "memory_total": memory.total,
            **{
                name: max(0, round((count - earlier[name]) / seconds))
                for name, count in self._counts.items()
                if name in earlier
            },
            **({"gpus": [self._sample_gpu(gpu) for gpu in self._gpus]} if self._gpus else {}),
        }

    def _read_counts(self) -> dict[str, int]:
        disk = self._psutil.disk_io_counters()  # None in some containers
        network = self._psutil.net_io_counters(pernic=True)
        outer = [count for name, count in network.items() if name != "lo"]
        disks = {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes} if disk else {}
        return {
            **disks,
            "network_received": sum(count.bytes_recv for count in outer),
            "network_sent": sum(count.bytes_sent for count in outer),
        }

    def _sample_gpu(self, gpu: Any) -> dict[str, float]:
        usage: dict[str, float] = {}
        with suppress(self._nvml.NVMLError):  # some GPUs report only some of this
            memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
            usage |= {"memory": memory.used, "memory_total": memory.total}
        with suppress(self._nvml.NVMLError):
            usage["use"] = self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        return usage


class SystemSampler:
    """A thread of the first worker of each host that samples the host's use every few seconds.

    `hosts` has the name of each host by the rank of its first worker. Worker 0 writes the samples
    of all hosts to the record, others send theirs.
    """

    def __init__(
        self, seconds: float, hosts: Mapping[int, str], status: WorkerStatus, record: Record
    ) -> None:
        self._seconds = seconds * -(-len(hosts) // MOST_HOSTS)
        self._hosts, self._status, self._record = hosts, status, record
        self._others = [rank for rank in hosts if rank > 0] if status.rank == 0 else []
        self._newest: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sample the host", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop: nothing is written to the record afterwards."""
        self._stopped.set()
        with self._lock:
            pass  # an event that is being written

    def close(self) -> None:
        """Stop, and wait for the thread for a moment."""
        self.stop()
        self._thread.join(SAMPLE_SECONDS)

    def _run(self) -> None:
        try:
            use = SystemUse()
            while not self._stopped.wait(self._seconds):
                self._take(use.sample())
        except RecordError:
            pass  # the run itself reports a full disk
        except Exception as error:  # noqa: BLE001  the run does not need samples
            text = "system samples of this host are no longer recorded: %s: %s"
            logging.getLogger("samestep").warning(text, type(error).__name__, error)

    def _take(self, sample: Mapping[str, Any]) -> None:
        other_samples: Sequence[Any] = ()
        if len(self._hosts) > 1:
            # the newest ones that were published, without waiting for others
            other_samples = self._status.share_sample(sample, self._others) or ()
        if self._status.rank > 0:
            return
        newest = {0: sample, **dict(zip(self._others, other_samples, strict=False))}
        for rank, host_sample in newest.items():
            # another program's value, or a host that has sent no news
            if not isinstance(host_sample, Mapping) or host_sample == self._newest.get(rank):
                continue
            fields = {name: host_sample[name] for name in SystemUse.FIELDS if name in host_sample}
            with self._lock:
                if not self._stopped.is_set():
                    self._record.event("system", host=self._hosts[rank], **fields)
        self._newest = newest


class StopRequest:
    """Defers stop signals while `deferring` is set, so that the step can end with a snapshot.

    They are SIGTERM, Ctrl-C, and the SIGHUP of a lost terminal unless it is ignored (nohup).

    `signal` is the number of the first signal received, or 0. Between steps, signals act
    immediately. So does Ctrl-C after another signal, but any other further signal has no effect,
    because schedulers send it to all processes of a job and launchers pass it on as well. Python
    handles signals in the main thread only; in other threads nothing is deferred.
    """

    def __init__(self, *, deferring: bool = False) -> None:
        self.signal = 0
        self.deferring = deferring
        self._previous: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                # Python runs handlers between two instructions of the main thread. While native
                # code computes, the request stays pending.
                self._previous[number] = signal.signal(number, self._handle)

    def defer(self, *, active: bool) -> None:
        """Defer signals from now on, or no longer."""
        self.deferring = active

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
        # The state machine of a stop: a first signal in a step waits for its end, where all workers
        # learn of it from the notes. Ctrl-C a second time gives up the snapshot.
        if again and number != signal.SIGINT:
            return
        self.signal = self.signal or number
        if again or not self.deferring:
            self.exit(number)
