"""A stand-in for NCCL on simulated devices: gloo, with the semantics of NCCL's streams.

A collective with `async_op` reads its input when it is waited for, at the latest moment. Until then
its output is NaN, and its input is overwritten if it is freed. A group of NCCL alone refuses CPU
tensors.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.simulated import FAILS_AT, FAILURE, HANGS_AT
from tests.gpu.simulated.device import LIBRARY, AcceleratorError

__name__ = "torch.distributed.simulated"  # for what looks whose code begins a collective

ABORT_TEXT = (
    "[rank%d]: Watchdog caught collective operation timeout: WorkNCCL ran for longer than its "
    "limit; to avoid data inconsistency, we are taking the entire process down.\n"
)

# the names of functions that are replaced; torch before 2.13 has another name for the last one
NAMES = {
    name: name
    for name in (
        "init_process_group",
        "new_group",
        "destroy_process_group",
        "get_backend",
        "all_to_all_single",
        "all_reduce",
        "broadcast",
        "gather",
        "irecv",
        "isend",
    )
}
NAMES["all_gather_single"] = next(
    name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)
)
_real = {name: getattr(dist, torch_name) for name, torch_name in NAMES.items()}
state: dict[str, Any] = {"timeout": None, "collectives": Counter(), "pending": []}
backends: dict[dist.ProcessGroup, str] = {}  # of groups with NCCL
device_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # of gloo, for CUDA tensors
DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}  # of NCCL, if it is an old one


class Work:
    """A collective of CUDA tensors that was enqueued, but not waited for."""

    def __init__(self, run: Any, out: torch.Tensor, source: torch.Tensor) -> None:
        self._run, self._out, self._is_done = run, out, False
        self._pointer, self._shape, self._dtype = source.data_ptr(), source.shape, source.dtype
        self._nbytes = source.nbytes
        LIBRARY.sim_begin_use(self._pointer)
        if out.data_ptr() != source.data_ptr():
            _spoil(out, source)
        state["pending"].append(self)

    def wait(self, timeout: object = None) -> bool:
        """Do this collective, and those before it, in the order in which they were enqueued.

        Only the stream that waits here knows when its memory is no longer in use.
        """
        for writes, pointer in enumerate((self._pointer, self._out.data_ptr())):
            LIBRARY.sim_use(self._out.device.index, pointer, writes)
        while not self._is_done:
            state["pending"].pop(0)._do()
        return True

    def _do(self) -> None:
        source = torch.empty(self._shape, dtype=self._dtype)
        LIBRARY.sim_read(source.data_ptr(), self._pointer, self._nbytes)
        LIBRARY.sim_end_use(self._pointer)
        self._is_done = True
        got = torch.empty(self._out.shape, dtype=self._out.dtype)
        if not _hangs(self._run.__qualname__.partition(".")[0]):
            self._run(got, source)
            with torch.no_grad():
                _without_wait(self._out, got)


def _without_wait(out: torch.Tensor, value: torch.Tensor) -> None:
    """Write to a device; a collective is no wait of the host."""
    flat = out.detach()
    if not flat.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    LIBRARY.sim_read(flat.data_ptr(), value.data_ptr(), value.nbytes)


def _spoil(out: torch.Tensor, source: torch.Tensor) -> None:
    """Fill what is not input with NaN, as long as the collective may not have ended."""
    start, stop = source.data_ptr(), source.data_ptr() + source.nbytes
    for begin, end in ((0, start), (stop, 1 << 62)):
        first = max(out.data_ptr(), begin)
        last = min(out.data_ptr() + out.nbytes, end)
        if first < last:
            garbage = torch.full((last - first,), 255, dtype=torch.uint8)
            LIBRARY.sim_read(first, garbage.data_ptr(), last - first)


def _hangs(name: str) -> bool:
    """Count a collective. One that hangs blocks its device, until NCCL's watchdog aborts."""
    state["collectives"][name] += 1
    call = f"{name} {state['collectives'][name]}"
    if call == os.environ.get(FAILS_AT):
        text = os.environ[FAILURE]
        kinds = {"NCCL": dist.DistBackendError, "CUDA out of memory": torch.OutOfMemoryError}
        matches = (kind for start, kind in kinds.items() if text.startswith(start))
        raise next(matches, AcceleratorError)(text)
    if call != os.environ.get(HANGS_AT):
        return False
    LIBRARY.sim_set_stuck(1)
    threading.Thread(target=_abort_later, daemon=True).start()
    return True


def _abort_later() -> None:
    time.sleep(state["timeout"].total_seconds())
    os.write(2, (ABORT_TEXT % dist.get_rank()).encode())
    os.abort()


def _check(*tensors: torch.Tensor) -> None:
    if any(tensor.is_cpu for tensor in tensors):
        raise _no_backend("cpu")
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL: {tensor.dtype}")


def _no_backend(kind: str) -> Exception:
    return RuntimeError(f"No backend type associated with device type {kind}")


def _group(group: Any) -> dist.ProcessGroup:
    return group or dist.group.WORLD


def _device_group(group: Any) -> dist.ProcessGroup:
    if _group(group) not in device_groups:
        raise _no_backend("cuda")
    return device_groups[_group(group)]


def init_process_group(
    backend: str, *, timeout: timedelta = timedelta(minutes=10), **options: Any
) -> None:
    _real["init_process_group"]("gloo", timeout=timeout, **options)
    _add_nccl(dist.group.WORLD, backend, timeout)


def new_group(*, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group = _real["new_group"](backend="gloo", timeout=timeout)
    _add_nccl(group, backend, timeout)
    return group


def _add_nccl(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> None:
    if "nccl" in backend:
        backends[group], state["timeout"] = backend, timeout
        device_groups[group] = _real["new_group"](backend="gloo", timeout=timeout)


def destroy_process_group(group: Any = None) -> None:
    LIBRARY.sim_wait(0, b"destroying NCCL", -1, -1)  # until collectives have ended
    device_group = device_groups.pop(_group(group), None)
    if group is None:
        device_groups.clear()
    elif device_group is not None:
        _real["destroy_process_group"](device_group)
    _real["destroy_process_group"](group)


def get_backend(group: Any = None) -> str:
    return backends.get(_group(group)) or _real["get_backend"](group)


class Backend:
    """The part of a group that is for CUDA tensors."""

    @staticmethod
    def _set_default_timeout(timeout: timedelta) -> None:
        state["timeout"] = timeout


def _get_backend(group: Any, device: torch.device) -> Any:
    return Backend if device.type == "cuda" else _real_get_backend(group, device)


_real_get_backend = dist.ProcessGroup._get_backend


def _on_cpu(name: str) -> Any:
    """Return a function of torch.distributed that takes CPU tensors only."""

    def function(tensor, *arguments, **options):
        groups = [each for each in (*arguments, *options.values()) if isinstance(each, GROUP)]
        if tensor.is_cuda or backends.get(_group(next(iter(groups), None))) == "nccl":
            raise _no_backend(tensor.device.type)
        return _real[name](tensor, *arguments, **options)

    function.__name__ = name
    return function


GROUP = dist.ProcessGroup
gather, irecv, isend = map(_on_cpu, ("gather", "irecv", "isend"))
_all_to_all_single, _all_reduce, _broadcast, _all_gather_single = map(
    _on_cpu, ("all_to_all_single", "all_reduce", "broadcast", "all_gather_single")
)


def all_to_all_single(out, source, out_sizes=None, source_sizes=None, group=None, async_op=False):  # noqa: FBT002  as in torch
    if not out.is_cuda:
        return _all_to_all_single(out, source, out_sizes, source_sizes, group, async_op)
    _check(out, source)
    device_group = _device_group(group)

    def run(got, sent):
        _real["all_to_all_single"](got, sent, out_sizes, source_sizes, device_group)

    return _begin(run, out, source, async_op=async_op)


def all_gather_single(out, source, group=None, async_op=False):  # noqa: FBT002  as in torch
    if not out.is_cuda:
        return _all_gather_single(out, source, group, async_op)
    _check(out, source)
    device_group = _device_group(group)

    def run(got, sent):
        _real["all_gather_single"](got, sent, device_group)

    return _begin(run, out, source, async_op=async_op)


def broadcast(tensor, src=0, group=None, async_op=False):  # noqa: FBT002  as in torch
    if not tensor.is_cuda:
        return _broadcast(tensor, src, group, async_op)
    _check(tensor)
    device_group = _device_group(group)

    def run(got, sent):
        got.copy_(sent)
        _real["broadcast"](got, src, device_group)

    return _begin(run, tensor, tensor, async_op=async_op)


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):  # noqa: FBT002  as in torch
    if not tensor.is_cuda:
        return _all_reduce(tensor, op, group, async_op)
    device_group = _device_group(group)

    def run(got, sent):
        got.copy_(sent)
        _real["all_reduce"](got, op, device_group)

    return _begin(run, tensor, tensor, async_op=async_op)


def _begin(run, out, source, *, async_op):
    if not source.is_contiguous() or not out.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    work = Work(run, out, source)
    if async_op:
        return work
    work.wait()
    return None


def install() -> None:
    """Replace the functions of torch.distributed that samestep and the tests call."""
    for name, torch_name in NAMES.items():
        setattr(dist, torch_name, globals()[name])
    dist.ProcessGroup._get_backend = _get_backend
