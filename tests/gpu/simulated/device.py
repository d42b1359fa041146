"""Loads the simulated devices, and gives `torch.cuda` what it would ask a driver.

Import it before torch is used in any other way: torch asks only once whether it has CUDA.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

from tests.gpu.simulated import CUDA_BUILD, LIBRARY_FILE, VISIBLE

LIBRARY = ctypes.CDLL(os.environ[LIBRARY_FILE])  # before torch
if os.environ.get(CUDA_BUILD):
    ctypes.CDLL(os.environ[CUDA_BUILD])

import torch  # noqa: E402
from torch import cuda  # noqa: E402

REPLACED_KERNELS = LIBRARY.sim_install()  # after torch

MAX_DEVICES = 4
CUDA_TYPE = 1  # c10::DeviceType::CUDA
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

LIBRARY.sim_wait.restype = ctypes.c_char_p
LIBRARY.sim_wait.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
LIBRARY.sim_record.restype = ctypes.c_int64
LIBRARY.sim_record.argtypes = [ctypes.c_int, ctypes.c_int64]
LIBRARY.sim_is_done.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
LIBRARY.sim_exchange_stream.restype = ctypes.c_int64
LIBRARY.sim_exchange_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
LIBRARY.sim_capture.argtypes = [ctypes.c_int, ctypes.c_int64]
LIBRARY.sim_stream_wait.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
LIBRARY.sim_wait_reason.restype = ctypes.c_char_p
LIBRARY.sim_failure.restype = ctypes.c_char_p
LIBRARY.sim_fail.argtypes = LIBRARY.sim_latch.argtypes = [ctypes.c_char_p]
LIBRARY.sim_pinned_bytes.restype = ctypes.c_int64
LIBRARY.sim_peer_copies.restype = ctypes.c_int64
LIBRARY.sim_peak_bytes.restype = ctypes.c_int64
LIBRARY.sim_register.argtypes = [ctypes.c_void_p, ctypes.c_int64]
LIBRARY.sim_unregister.argtypes = [ctypes.c_void_p]
LIBRARY.sim_begin_use.argtypes = LIBRARY.sim_end_use.argtypes = [ctypes.c_void_p]
LIBRARY.sim_use.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
LIBRARY.sim_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
LIBRARY.sim_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

# torch before 2.8 has another one
AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)

# processes that have used the driver, and a context on a device; a fork inherits both numbers
_used_by: list[int] = []
_initialized_by: list[int] = []
calls: list[str] = []  # to torch.cuda that ask the driver
refuses_pinning = False  # of memory that exists: `ulimit -l` is too small
hides_addresses = False  # of GPUs, as torch before 2.8
_stream_ids = itertools.count(1)
opened: set[int] = set()  # devices that this process has a context on


def device_waits() -> list[str]:
    """Return the reasons for which the host has waited for a device so far."""
    return [LIBRARY.sim_wait_reason(n).decode() for n in range(LIBRARY.sim_waits())]


@contextmanager
def counted():
    """Yield a list that has the reasons for waits in the block at its end."""
    reasons: list[str] = []
    before = LIBRARY.sim_waits()
    yield reasons
    reasons += device_waits()[before:]


def check_frees() -> None:
    """Free what is garbage; raise if any memory was freed while a stream could still use it."""
    gc.collect()
    if message := LIBRARY.sim_failure():
        raise AcceleratorError(message.decode())


def _visible() -> list[int]:
    return [int(index) for index in os.environ.get(VISIBLE, "0,1,2,3").split(",") if index]


def _use_driver() -> None:
    _used_by.append(os.getpid())


def _is_in_bad_fork() -> bool:
    return bool(_used_by) and _used_by[-1] != os.getpid()


def _is_available() -> bool:
    calls.append("is_available")
    if os.environ.get(NVML_CHECK) != "1" and not _is_in_bad_fork():
        _use_driver()
    return bool(_visible())


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method"
        )
    if not _is_initialized():
        calls.append("init")
        _use_driver()
        _initialized_by.append(os.getpid())
        LIBRARY.sim_set_visible(len(_visible()))


def _is_initialized() -> bool:
    return bool(_initialized_by) and _initialized_by[-1] == os.getpid()


def _device_count() -> int:
    calls.append("device_count")
    return len(_visible())


def _index(device: object) -> int:
    if device is None:
        return LIBRARY.sim_exchange_device(-1)
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return LIBRARY.sim_exchange_device(-1) if index is None else index


def _exchange_device(index: int) -> int:
    _lazy_init()
    if index >= len(_visible()):
        raise AcceleratorError("CUDA error: invalid device ordinal")
    return LIBRARY.sim_exchange_device(index)


def _set_device(device: object) -> None:
    _exchange_device(_index(device))
    opened.add(_index(device))


def _wait(device: int, reason: str, up_to: int = -1, stream: int = -1) -> None:
    message = LIBRARY.sim_wait(device, reason.encode(), up_to, stream)
    if message is not None:
        raise AcceleratorError(message.decode())


class Event:
    """`torch.cuda.Event`: the first `query` returns False, as if the device was still busy.

    The second one is counted as a wait.
    """

    def __init__(self, **_: object) -> None:
        self._number, self._stream, self._asked, self._is_done = -1, None, False, False

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _current_stream()
        self._number = LIBRARY.sim_record(self._stream.device_index, self._stream.stream_id)
        self._asked, self._is_done = False, False
        self._time = time.perf_counter()

    def query(self) -> bool:
        opened.add(LIBRARY.sim_exchange_device(-1))  # a thread starts on the first device
        if self._stream is None:
            return True
        asked, self._asked = self._asked, True
        if not asked or LIBRARY.sim_is_stuck():
            return False
        if not self._is_done:  # a loop of queries is a wait
            self._is_done = True
            _wait(self._stream.device_index, "query", self._number, self._stream.stream_id)
        return True

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            stream = event._stream
            if not LIBRARY.sim_is_done(stream.device_index, event._number, stream.stream_id):
                raise AcceleratorError("CUDA error: device not ready")
        return 1000 * (end._time - self._time)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._is_done = True
            _wait(self._stream.device_index, "event", self._number, self._stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        if self._stream is not None:
            stream = stream or _current_stream()
            LIBRARY.sim_stream_wait(stream.device_index, stream.stream_id, self._number)


class Stream(torch.Stream):
    """`torch.cuda.Stream`: kernels run at once in each, only copies are later."""

    def __new__(cls, device: object = None, stream_id: int | None = None, **_: object):
        stream_id = next(_stream_ids) if stream_id is None else stream_id
        return super().__new__(
            cls, stream_id=stream_id, device_index=_index(device), device_type=CUDA_TYPE
        )

    def synchronize(self) -> None:
        _wait(self.device_index, "stream", stream=self.stream_id)

    def query(self) -> bool:
        number = LIBRARY.sim_record(self.device_index, self.stream_id)
        return bool(LIBRARY.sim_is_done(self.device_index, number, self.stream_id))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        stream.record_event().wait(self)


def _current_stream(device: object = None) -> Stream:
    return Stream(device, LIBRARY.sim_exchange_stream(_index(device), -1))


def _default_stream(device: object = None) -> Stream:
    return Stream(device, 0)


@contextmanager
def _stream(stream: Stream):
    device = LIBRARY.sim_exchange_device(stream.device_index)
    before = LIBRARY.sim_exchange_stream(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        LIBRARY.sim_exchange_stream(stream.device_index, before)
        LIBRARY.sim_exchange_device(device)


class Runtime:
    """`torch.cuda.cudart()`: returns error codes; the next kernel of the thread fails as well."""

    @staticmethod
    def cudaHostRegister(pointer: int, size: int, _: int) -> int:  # noqa: N802  as in CUDA
        if refuses_pinning:
            LIBRARY.sim_latch(b"CUDA error: out of memory")
            return 2
        LIBRARY.sim_register(pointer, size)
        return 0

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:  # noqa: N802  as in CUDA
        LIBRARY.sim_unregister(pointer)
        return 0


def _get_device_properties(device: object = None) -> SimpleNamespace:
    index = _visible()[_index(device)]
    address = {"pci_domain_id": 0, "pci_bus_id": 0x10 + index, "pci_device_id": 0}
    return SimpleNamespace(
        name="Simulated GPU",
        major=9,
        minor=0,
        total_memory=1 << 30,
        multi_processor_count=1,
        uuid=f"simulated-{index}",
        **({} if hides_addresses else address),
    )


_resize = torch.UntypedStorage.resize_


def _resize_storage(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, nbytes)
    LIBRARY.sim_resize(storage._cdata, nbytes)
    return storage


def install() -> None:
    """Replace what `torch.cuda` asks a driver, and what a CPU build cannot do with its memory."""
    torch.UntypedStorage.resize_ = _resize_storage
    simulated = {
        "is_available": _is_available,
        "is_initialized": _is_initialized,
        "_is_in_bad_fork": _is_in_bad_fork,
        "_lazy_init": _lazy_init,
        "init": _lazy_init,
        "device_count": _device_count,
        "current_device": lambda: LIBRARY.sim_exchange_device(-1),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "set_device": _set_device,
        "synchronize": lambda device=None: _wait(_index(device), "synchronize"),
        "Event": Event,
        "Stream": Stream,
        "stream": _stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "cudart": Runtime,
        "get_device_name": lambda device=None: "Simulated GPU",
        "get_device_properties": _get_device_properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "can_device_access_peer": lambda *_: True,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.version = lambda: None  # as in the CPU build
    for name, value in simulated.items():
        setattr(cuda, name, value)
    devices = [torch.device("cuda", index) for index in range(MAX_DEVICES)]
    before, torch.cuda._lazy_init = cuda._lazy_init, lambda: None
    cuda.default_generators = tuple(torch.Generator(device) for device in devices)
    torch.cuda._lazy_init = before
